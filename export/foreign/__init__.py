"""Bundles of networks that no run has trained: ONNX files of others, classes in a Python file, networks of torchvision.

``bundle_network`` makes one; it goes through the gates that every bundle goes through, and devices use it like any
other. Nothing here is imported by a device, and no graph runs before it was read and checked. All names are imported
when they are first used.

Read in this order: `settings` (what can be chosen), `build` (the way), `graph_file` (what is refused), `networks`,
`torchvision_names` and `weights` (networks in torch), `dequantize` (rounded ones), `features` (where the features are),
`preprocessing` and `input_form` (what goes in), `cut` (the encoder), `sizes` (what it computes of its input's size),
`compare` (is it the same?).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import ForeignReport, bundle_network
    from .settings import ForeignSettings

__all__ = ["ForeignReport", "ForeignSettings", "bundle_network"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'export.foreign' has no attribute '{name}'")
    module = ".settings" if name == "ForeignSettings" else ".build"
    return getattr(import_module(module, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
