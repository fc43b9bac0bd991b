"""The forms of the updates of a run: which tensors agents send, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_agent.wire.tensors import Spec


@dataclass(frozen=True)
class UpdateForms:
    """The tensors that agents of a run send, by name."""

    update: Mapping[str, Spec] = field(default_factory=dict)
    """The tensors in the update of an agent that trains."""

    extras: Mapping[str, Spec] = field(default_factory=dict)
    """The tensors in the update of a device without torch, a subset of ``update``."""

    kept_norm: Mapping[str, Spec] = field(default_factory=dict)
    """Batch norm tensors of the encoder, which stay on devices and are asked for once, to be pooled."""
