"""What may leave this device: jobs that ask for more are refused, figures that may not leave are left out.

The ledger on its disk has what its updates have cost in differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..accountant import cost, epsilon_of
from ..config import AgentConfig, PrivacyConfig
from ..errors import PrivacyRefused, StateError, UnknownName
from ..storage import read_json, write_json
from ..task import RUNNING_STATISTICS
from ..wire.messages import EXCHANGES, OUTSIDE_ROUNDS, Job, Report

CLASS_COUNT = "min_class_count"
"""The parameter of methods whose updates carry statistics of classes: of how many samples such a class is at least."""

LEDGER_FILE = "privacy.json"
"""In the state folder: what all updates of this device with noise have cost so far, and how many had none."""

_COUNTED = ("cost", "updates", "without_noise")

_SCORES = ("acc.local", "acc.global", "acc.personal")


def check_job(policy: PrivacyConfig, job: Job, least: int | None) -> None:
    """Return quietly when the policy allows what the job asks for.

    ``least``: as `edge_agent.methods.base.Method.least_class_count` of the job's method.

    Raises:
        PrivacyRefused: it does not; all reasons are listed.
    """
    reasons = objections(policy, job.method, least)
    if job.purpose in OUTSIDE_ROUNDS and not getattr(policy, job.purpose):
        reasons.append(f"privacy.{job.purpose} is false: they stay here")
    is_masked = bool(job.session) and job.purpose in {*EXCHANGES, "train"}
    if policy.secure_sum == "required" and not is_masked and job.purpose != "personalize":
        reasons.append(
            "privacy.secure_sum is 'required', and the run would see the single update; it can set "
            "privacy.secure_sum = true"
        )
    if (policy.wants_noise or job.privacy is not None) and job.purpose in {*OUTSIDE_ROUNDS, "contribute"}:
        reasons.append(f"the update of a job '{job.purpose}' would leave without the noise of differential privacy")
    if reasons:
        raise PrivacyRefused("; ".join(reasons), is_public=True)


def check_policy(policy: PrivacyConfig) -> str:
    """What is to be known of a policy before any run; empty: nothing.

    Raises:
        UnknownName: it names a method that there is not.
    """
    from .. import methods

    if unknown := [name for name in policy.methods or () if name not in methods.names()]:
        raise UnknownName("method", unknown[0], methods.names())
    if policy.clip is None and policy.wants_noise:
        return (
            "privacy.noise or privacy.epsilon without privacy.clip: runs are refused whose coordinator has no clip in "
            "its own [privacy]; set privacy.clip as well"
        )
    return ""


def objections(policy: PrivacyConfig, method: str, least: int | None) -> list[str]:
    """Why the policy allows no training by this method; ``least`` as in `check_job`."""
    reasons = []
    if policy.methods is not None and method not in policy.methods:
        reasons.append(f"method is '{method}', privacy.methods allows {', '.join(policy.methods) or 'none'}")
    if least is not None and least < policy.min_class_count:
        reasons.append(
            f"{CLASS_COUNT} of the run is {least}, privacy.{CLASS_COUNT} asks for {policy.min_class_count} or more "
            f"(headwater run -p {CLASS_COUNT}={policy.min_class_count})"
        )
    if least is not None and policy.samples == "rounded":
        reasons.append(
            f"updates of '{method}' carry statistics of classes, which tell their sample counts, and "
            "privacy.samples is 'rounded'"
        )
    return reasons


def check_tensors(policy: PrivacyConfig, names: Iterable[str]) -> None:
    """Return quietly when the policy allows tensors of these names in an update.

    Raises:
        PrivacyRefused: it does not.
    """
    statistics = sorted(name for name in names if name.endswith(RUNNING_STATISTICS))
    if statistics and not policy.batch_norm_stats:
        raise PrivacyRefused(
            f"an update would carry '{statistics[0]}', privacy.batch_norm_stats is false; the run's norm can be "
            "'local_stats'",
            is_public=True,
        )


def sample_count(policy: PrivacyConfig, exact: int) -> int:
    """The count as it leaves: itself, or the power of two that is nearest by ratio (0 stays 0)."""
    if policy.samples == "exact" or exact < 1:
        return exact
    below = 1 << (exact.bit_length() - 1)
    return below if exact * exact < 2 * below * below else 2 * below


def allows_metric(policy: PrivacyConfig, name: str) -> bool:
    """Whether a metric of this name may leave."""
    return any(fnmatchcase(name, pattern) for pattern in policy.metrics)


def without_withheld(policy: PrivacyConfig, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that may leave."""
    return {name: value for name, value in metrics.items() if allows_metric(policy, name)}


def public_report(policy: PrivacyConfig, report: Report) -> Report:
    """The report as it leaves."""
    kept = [name for name in _SCORES if allows_metric(policy, name)]
    return report.model_copy(
        update={
            **{name.replace(".", "_"): None for name in _SCORES if name not in kept},
            "local_model": report.local_model if "acc.local" in kept else "",
            "samples": sample_count(policy, report.samples),
            "support": sample_count(policy, report.support),
            "one_class": report.one_class and allows_metric(policy, "one_class"),
            "better_alone": report.better_alone and len(kept) == len(_SCORES),
            "metrics": {name: v for name, v in report.metrics.items() if allows_metric(policy, name)},
        }
    )


class Ledger:
    """What the updates of this device have cost, on its disk, over all runs."""

    def __init__(self, folder: Path, policy: PrivacyConfig) -> None:
        self._path, self._policy = folder / LEDGER_FILE, policy

    def check(self, noise: float) -> None:
        """Return quietly when one more update with this noise multiplier is within the budget.

        Raises:
            PrivacyRefused: it is not.
            StateError: the file is damaged; nothing leaves before that is repaired.
        """
        limit, delta = self._policy.epsilon, self._policy.delta
        if limit is None:
            return
        after = epsilon_of(self.spent() + cost(noise), delta)
        if after > limit:
            now = epsilon_of(self.spent(), delta)
            raise PrivacyRefused(
                f"the privacy budget is spent: epsilon is {now:.3f} and would be {after:.3f} after this update, "
                f"privacy.epsilon allows {limit:g} (delta {delta:g})",
                is_public=True,
            )

    def spend(self, noise: float) -> dict[str, float]:
        """Note one more update, on disk before it leaves; returns what is spent as metrics.

        Raises:
            PrivacyRefused: it is beyond the budget.
        """
        self.check(noise)
        if noise == 0:
            return {}
        before = self._read()
        self._write({**before, "cost": before["cost"] + cost(noise), "updates": before["updates"] + 1})
        figures = {name: self.figures()[name] for name in ("epsilon", "epsilon_left")}
        return {name: value for name, value in figures.items() if value is not None}

    def note_without_noise(self) -> None:
        """Count an update that leaves without noise, which no epsilon covers."""
        before = self._read()
        self._write({**before, "without_noise": before["without_noise"] + 1})

    def spent(self) -> float:
        """The cost of all updates with noise so far."""
        return float(self._read()["cost"])

    def figures(self) -> dict[str, float | None]:
        """``epsilon`` spent (None: infinite), the ``epsilon_left`` of the budget (None: no limit), and ``delta``.

        Epsilon does not cover the ``updates_without_noise``.
        """
        limit, delta = self._policy.epsilon, self._policy.delta
        epsilon = epsilon_of(self.spent(), delta)
        return {
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "epsilon_left": None if limit is None else max(0.0, limit - epsilon),
            "delta": delta,
            "updates_without_noise": self._read()["without_noise"],
        }

    def _write(self, content: Mapping[str, float]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, content)

    def _read(self) -> dict[str, float]:
        if (read := read_json(self._path)) is None:
            return dict.fromkeys(_COUNTED, 0)
        known: dict[str, Any] = {name: read.get(name, 0 if name == "without_noise" else None) for name in _COUNTED}
        if not all(isinstance(one, int | float) and 0 <= one < math.inf for one in known.values()):
            raise StateError(
                f"{self._path}: holds {str(read)[:80]}, expected {', '.join(_COUNTED)} of 0 or more; put an older copy "
                "back, because without it nobody knows what this device has spent"
            )
        return known


def spent(config: AgentConfig) -> dict[str, Any] | None:
    """What the updates of this device have cost of its privacy budget, as JSON; None where none of them had noise."""
    ledger = Ledger(config.state, config.privacy)
    try:
        return ledger.figures() if ledger.spent() else None
    except StateError as error:
        return {"error": str(error)}
