"""Ground floor of Headwater and the program that runs on a device.

Everything that a coordinator and an agent must agree on lives here: errors, configuration, the wire, bundles,
methods and heads. Importing this package, or anything on its ground floor, never imports torch.
"""

__version__ = "0.1.0"
