"""What may leave this device: jobs that ask for more are refused, figures that may not leave are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ..config import PrivacyConfig
from ..errors import PrivacyRefused
from ..wire.messages import OUTSIDE_ROUNDS, Job, Report

CLASS_COUNT = "min_class_count"
"""The parameter of methods whose updates carry statistics of classes: of how many samples such a class is at least."""

_SCORES = ("acc.local", "acc.global", "acc.personal")
_STATISTICS = (".running_mean", ".running_var", ".num_batches_tracked")


def check_job(policy: PrivacyConfig, job: Job, least: int | None) -> None:
    """Return quietly when the policy allows what the job asks for.

    ``least``: as `edge_agent.methods.base.Method.least_class_count` of the job's method.

    Raises:
        PrivacyRefused: it does not; all reasons are listed.
    """
    reasons = []
    if policy.methods and job.method not in policy.methods:
        reasons.append(f"method is '{job.method}', privacy.methods allows {', '.join(policy.methods)}")
    if least is not None and least < policy.min_class_count:
        reasons.append(
            f"{CLASS_COUNT} of the run is {least}, privacy.{CLASS_COUNT} asks for {policy.min_class_count} or more"
        )
    if least is not None and policy.samples == "rounded":
        reasons.append(
            f"updates of '{job.method}' carry statistics of classes, which tell their sample counts, and "
            "privacy.samples is 'rounded'"
        )
    if job.purpose in OUTSIDE_ROUNDS and not getattr(policy, job.purpose):
        reasons.append(f"privacy.{job.purpose} is false: they stay here")
    if policy.secure_sum == "required" and not job.session and job.purpose != "personalize":
        reasons.append(
            "privacy.secure_sum is 'required', and the run would see the single update; it can set "
            "privacy.secure_sum = true"
        )
    if (policy.wants_noise or job.privacy is not None) and job.purpose in {*OUTSIDE_ROUNDS, "contribute"}:
        reasons.append(f"the update of a job '{job.purpose}' would leave without the noise of differential privacy")
    if reasons:
        raise PrivacyRefused("; ".join(reasons), is_public=True)


def check_tensors(policy: PrivacyConfig, names: Iterable[str]) -> None:
    """Return quietly when the policy allows tensors of these names in an update.

    Raises:
        PrivacyRefused: it does not.
    """
    statistics = sorted(name for name in names if name.endswith(_STATISTICS))
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
