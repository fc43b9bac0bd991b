"""Which class does the jobs of which purpose: a new purpose is a module of this room and a row here."""

from __future__ import annotations

from collections.abc import Mapping

from ...wire.messages.down import Job
from ...wire.messages.fields import Purpose
from .activation_ranges import ActivationRangesTask
from .batch_norm_stats import BatchNormStatsTask
from .contribute import ContributeTask
from .personalize import PersonalizeTask
from .purpose import PurposeTask
from .secure_exchanges import SecureKeysTask, SecureSharesTask, SecureUnmaskTask
from .train import TrainTask

TASKS: Mapping[Purpose, PurposeTask] = {
    "train": TrainTask(),
    "contribute": ContributeTask(),
    "personalize": PersonalizeTask(),
    "batch_norm_stats": BatchNormStatsTask(),
    "activation_ranges": ActivationRangesTask(),
    "secure_keys": SecureKeysTask(),
    "secure_shares": SecureSharesTask(),
    "secure_unmask": SecureUnmaskTask(),
}
"""Purpose of a job -> what a device does for it."""


def state_before(job: Job) -> int:
    """Return the round before which the newest client state is what a job starts from."""
    return TASKS[job.purpose].state_before(job)
