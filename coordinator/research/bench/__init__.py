"""Measurements of this machine: whole rounds, simulated rounds, a fleet's messages, answers, and a device's footprint.

Everything measured runs in a separate process, as in service; this package starts them, reads what the kernel
reports about them, and collects the figures. Times of two machines, or of a busy one, cannot be compared.
"""

from __future__ import annotations
