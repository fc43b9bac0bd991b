"""The networks of torchvision by their names, and how it prepares images for each."""

from __future__ import annotations

import difflib
from typing import Any

from edge_agent.core.errors import UsageError
from edge_agent.models.torchvision_networks import networks


def torchvision_presets(name: str) -> Any:
    """Return how torchvision prepares images for the newest weights of a network: sizes, mean, std, interpolation.

    Raises:
        UsageError: It has no such network for images, or does not say.
        MissingCapability: torchvision is not installed.
    """
    check_name(name)
    models = networks()
    weights = [*models.get_model_weights(name)]
    if not weights:
        raise UsageError(
            f"torchvision:{name}: torchvision does not say how to prepare images; give --size, --mean and --std"
        )
    return weights[-1].transforms()


def check_name(name: str) -> None:
    """Require that torchvision has a network for images of this name.

    Raises:
        UsageError: It has none; the nearest names are given.
        MissingCapability: torchvision is not installed.
    """
    models = networks()
    names = [*models.list_models(module=models)]
    if name not in names:
        near = difflib.get_close_matches(name, names, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(names[:10])} …"
        raise UsageError(f"'{name}' is neither an ONNX file, nor FILE.py:CLASS, nor a network of torchvision{hint}")
