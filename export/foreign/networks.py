"""Networks in torch as graphs: classes in a Python file, and networks of torchvision, with weights from a file."""

from __future__ import annotations

import difflib
from typing import Any

from edge_agent.core.errors import UsageError


def torchvision_presets(name: str) -> Any:
    """Return how torchvision prepares images for the newest weights of a network: sizes, mean, std, interpolation.

    Raises:
        UsageError: It has no such network for images, or does not say.
        MissingCapability: torchvision is not installed.
    """
    models = _models()
    check_name(name)
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
    """
    models = _models()
    names = [*models.list_models(module=models)]
    if name not in names:
        near = difflib.get_close_matches(name, names, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(names[:10])} …"
        raise UsageError(f"torchvision has no network '{name}' for images{hint}")


def _models() -> Any:
    """Return the module ``torchvision.models``."""
    from edge_agent.models.torchvision_networks import networks

    return networks()
