"""The folder of a run on a device, which the device writes, and simulation, analysis and audit read.

Read in this order: `layout` (which files it has), `client_state` (what a client keeps between rounds), `checkpoint`
(inside one training), `receipts` (what became of the device's updates). Nothing here imports torch, and numpy comes
with the first array.
"""
