"""From a trained encoder to a bundle for devices: ONNX, int8, parity gates, manifest.

``build_bundle`` writes one. All names are imported when they are first used.

Here lives all that needs ``onnx``, and nothing that a device imports. Read in this order: `build` (the way from a
trained model to a bundle), `packing` (what every bundle goes through), `encoder` and `batch_norm` (its graphs),
`quantize` (the int8 variant), `parity` (what has to agree before a bundle is written), `domains` (samples by domain, to
compare on).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import TrainedEncoder, build_bundle, model_from_state, synthetic_inputs
    from .calibration import Calibration
    from .domains import domains_of
    from .packing import BundleOptions, Report
    from .parity import Gate

__all__ = [
    "BundleOptions",
    "Calibration",
    "Gate",
    "Report",
    "TrainedEncoder",
    "build_bundle",
    "domains_of",
    "model_from_state",
    "synthetic_inputs",
]

_MODULES = {
    "BundleOptions": ".packing",
    "Calibration": ".calibration",
    "Gate": ".parity",
    "Report": ".packing",
    "domains_of": ".domains",
}
"""The modules of the names that are not in `build`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'export' has no attribute '{name}'")
    return getattr(import_module(_MODULES.get(name, ".build"), __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
