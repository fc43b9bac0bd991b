"""Bundles: one signed file that carries a frozen encoder to devices, and the folder that a device unpacks it into.

A bundle holds a manifest, ONNX variants, golden tensors and, optionally, a shared head. Read in this order: `manifest`
(what is in a bundle), `archive` (the file), `unpacked` (its folder on a device), `installed` (which one is in use),
`trust` (who may sign one), `graph_check` (what its graph would cost), `starter` (the one that comes along). Nothing
here runs an encoder, trains or fits anything. Whether this device computes what a bundle promises is tried in
`personal`.
"""
