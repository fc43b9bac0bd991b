"""The only place that imports torchvision: also where its compiled part does not match the installed torch.

A CPU build of torch beside torchvision's PyPI wheel makes ``import torchvision`` fail with "operator torchvision::nms
does not exist", although networks, transforms and data sets need none of the compiled operators. Declaring the
operators' schemas lets the import pass. A matching pair never comes this way.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType

import torch

from ..core.errors import MissingCapability, raiser_of

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a library object that is collected takes its operators with it


def import_torchvision() -> ModuleType:
    """Import torchvision, so that ``import torchvision`` works from then on in this process, too.

    Raises:
        MissingCapability: torchvision is not installed, or does not work with the installed torch.
    """
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        raise MissingCapability.package("torchvision", "train", "this encoder") from error
    except RuntimeError as error:
        if not _lacks_operators(error):
            advice = f"install the torchvision release made for torch {torch.__version__}"
            raise MissingCapability(f"torchvision cannot be imported: {error}; {advice}") from error
    declare_operators()
    return importlib.import_module("torchvision")


def _lacks_operators(error: RuntimeError) -> bool:
    """Return whether an import failed because torch does not know an operator of torchvision's compiled part."""
    module, _ = raiser_of(error)
    is_of_library = module.split(".")[:2] in (["torch", "library"], ["torch", "_library"])
    return is_of_library and not hasattr(torch.ops.torchvision, "nms")


def declare_operators() -> None:
    """Declare the compiled operators, and forget the modules that were half imported without them."""
    if not _declared:
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for schema in _SCHEMAS:
            library.define(schema)  # type: ignore[no-untyped-call]
        _declared.append(library)
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]


def main() -> None:
    """Print as JSON what a plain import says (``plain``, empty: it works), and what `import_torchvision` says."""
    answers = {"plain": "", "ours": ""}
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # noqa: BLE001 - whatever another package raises at its import is what is asked for
        answers["plain"] = f"{type(error).__name__}: {error}"
    try:
        import_torchvision()
    except MissingCapability as error:
        answers["ours"] = str(error)
    sys.stdout.write(f"{json.dumps(answers)}\n")
