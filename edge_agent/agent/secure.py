"""A device's part in secure sums: keys, shares, its masked update, and shares of others, one attempt after the other.

The secrets of an attempt are in memory alone: an agent that is restarted has dropped out of it.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np

from .. import secure_tensors as layout
from ..errors import PrivacyRefused, UpdateRejected
from ..secure_sum import SHARE_BYTES, Entropy, Participant
from ..storage import read_json, sha256_of, write_json
from ..task import Tensors
from ..wire.messages import Job, run_name
from ..wire.tensors import specs_of

SUMS_FILE = "sums.json"
"""In the folder of a run: SHA-256 of the names of the clients in each round's sum."""


class SecureSums:
    """The sum that this device takes part in now; a new attempt replaces the one before."""

    def __init__(self, agent: str, entropy: Entropy = secrets.token_bytes) -> None:
        self._agent, self._entropy = agent, entropy
        self._attempt: tuple[bytes, Participant] | None = None

    def begin(self, job: Job) -> Tensors:
        """The public keys for the attempt of ``job``."""
        context = _context(job)
        if self._attempt is None or self._attempt[0] != context:
            self._attempt = context, Participant(self._agent, context, self._entropy)
        return {layout.KEYS: layout.keys_as_bytes(self._attempt[1].keys())}

    def shares(self, job: Job, received: Tensors) -> Tensors:
        """Shares of its secrets, encrypted for each client whose keys were received.

        Raises:
            UpdateRejected: the agent has begun anew since it sent its keys.
            PrivacyRefused: as `Participant.shares`.
            CodecError: what was received is not of that form.
        """
        one, members = self.of(job), layout.members_of(received)
        rows = layout.taken(received, layout.KEYS, np.uint8, (len(members), layout.KEY_BYTES))
        sealed = one.shares({member: layout.keys_of(row) for member, row in zip(members, rows, strict=True)})
        return {layout.SHARES: layout.table(sealed, members, layout.SEALED_BYTES)}

    def masked(self, job: Job, received: Tensors, update: Tensors, weight: float) -> Tensors:
        """The update under masks; only those can be removed whose clients' shares were received.

        Raises:
            UpdateRejected: the agent has begun anew since it sent its keys.
            TrainingFailed: a number is too large for the sum.
            PrivacyRefused: as `Participant.receive` and `Participant.masked`.
            CodecError: what was received is not of that form.
        """
        one = self.of(job)
        count = len(one.clients)
        sharers = layout.taken(received, layout.SHARERS, np.bool_, (count,))
        rows = layout.taken(received, layout.SHARES, np.uint8, (count, layout.SEALED_BYTES))
        of_members = zip(one.clients, sharers, rows, strict=True)
        one.receive({who: row.tobytes() for who, has, row in of_members if has and who != self._agent})
        integers = layout.as_integers(update, specs_of(update), weight, count)
        return {layout.MASKED: one.masked(integers).view(np.int64)}

    def unmask(self, job: Job, received: Tensors, folder: Path) -> Tensors:
        """For each client a share of its own mask where its update was delivered, else of its key.

        A round that begins again has the same updates: of two sums over different clients the difference would be
        single updates. So whose sum it is, is noted in ``folder``, that of the run, before anything is revealed.

        Raises:
            UpdateRejected: the agent has begun anew since it sent its keys.
            PrivacyRefused: as `Participant.unmask`, or the round's sum was one of other clients before.
            StateError: the note is damaged.
            CodecError: what was received is not of that form.
        """
        one = self.of(job)
        delivered = layout.taken(received, layout.DELIVERED, np.bool_, (len(one.clients),))
        terms = [who for who, has in zip(one.clients, delivered, strict=True) if has]
        answer = one.unmask(terms)
        _note_sum(folder / SUMS_FILE, job.round, terms)
        return {layout.REVEALED: layout.table(answer, one.clients, SHARE_BYTES)}

    def of(self, job: Job) -> Participant:
        """This device's secrets for the attempt of ``job``.

        Raises:
            UpdateRejected: the agent has begun anew since it sent its keys.
        """
        if self._attempt is None or self._attempt[0] != _context(job):
            raise UpdateRejected(
                "the keys of this secure sum are gone, because the agent was restarted; it takes part in the next one",
                is_public=True,
            )
        return self._attempt[1]


def _note_sum(path: Path, number: int, terms: list[str]) -> None:
    """Note of which clients a round's sum is.

    Raises:
        PrivacyRefused: it was of others before.
        StateError: the file is damaged.
    """
    known, digest = dict(read_json(path) or {}), sha256_of("\n".join(terms).encode())
    if known.get(str(number), digest) != digest:
        raise PrivacyRefused(
            f"the masks of round {number} were taken off a sum of other devices before; the difference of two sums "
            "would bare single updates",
            is_public=True,
        )
    if str(number) not in known:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**known, str(number): digest})


def _context(job: Job) -> bytes:
    """What the secrets are for, and nothing else."""
    return layout.context_of(run_name(job.run), job.round, job.session)
