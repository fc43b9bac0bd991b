"""What this machine does: transport, whole rounds, and a device's footprint, each beside a yardstick of the same run.

Everything measured runs as a process of its own, as in service; this package starts them, reads what the kernel says of
them, and puts the figures together. Times of different machines, or of a busy one, cannot be compared: ratios can.
"""

from __future__ import annotations
