"""The only place that imports torchvision: also where its compiled part does not match the installed torch.

A CPU build of torch beside torchvision's PyPI wheel makes ``import torchvision`` fail with "operator torchvision::nms
does not exist", although the networks need none of the compiled operators. Declaring the operators' schemas lets the
import pass. A matching pair never comes this way.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

from ..errors import MissingCapability

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a library object that is collected takes its operators with it


def networks() -> ModuleType:
    """The module ``torchvision.models``.

    Raises:
        MissingCapability: torchvision is not installed, or does not work with the installed torch.
    """
    try:
        return importlib.import_module("torchvision.models")
    except ImportError as error:
        raise MissingCapability.package("torchvision", "train", "this encoder") from error
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            advice = f"install the torchvision release made for torch {torch.__version__}"
            raise MissingCapability(f"torchvision cannot be imported: {error}; {advice}") from error
    _declare_operators()
    _forget_half_imported()
    return importlib.import_module("torchvision.models")


def _declare_operators() -> None:
    if _declared:
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    _declared.append(library)


def _forget_half_imported() -> None:
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
