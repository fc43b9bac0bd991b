"""Bundles of networks that no run has trained: ONNX files of others, classes in a Python file, networks of torchvision.

``bundle_network`` makes one; it goes through the gates that every bundle goes through, and devices use it like any
other. Nothing here is imported by a device, and nothing that a file holds is run before it was read and checked. Read
in this order: `settings` (what can be chosen), `build` (the way), `graph_file` (what is refused), `networks` and
`weights` (networks in torch), `dequantize` (rounded ones), `features` (where the
features are), `preprocessing` and `input_form` (what goes in),
`cut` (the encoder), `compare` (is it the same?).
"""

from .build import ForeignReport, bundle_network
from .settings import ForeignSettings

__all__ = ["ForeignReport", "ForeignSettings", "bundle_network"]
