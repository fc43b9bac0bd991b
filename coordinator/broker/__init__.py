"""MQTT brokers that this machine can run: the embedded one, and mosquitto where it is installed.

Both live in a process of their own that is restarted when it dies and goes when its parent goes. Federations that
outgrow one host use a broker of their own and name it in ``[broker]``.
"""

from __future__ import annotations

from .access import COORDINATOR_USER, Rules, mosquitto_acl, read_passwords, set_password
from .embedded import EmbeddedBroker
from .mosquitto import MosquittoBroker, find_mosquitto

__all__ = [
    "COORDINATOR_USER",
    "EmbeddedBroker",
    "MosquittoBroker",
    "Rules",
    "find_mosquitto",
    "mosquitto_acl",
    "read_passwords",
    "set_password",
]
