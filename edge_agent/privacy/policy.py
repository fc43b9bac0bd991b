"""The privacy policy of a device: jobs that ask for more than may leave are refused, and withheld figures left out.

The ledger on its disk notes what its updates have cost in differential privacy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import AgentConfig, PrivacyConfig
from ..core.errors import PrivacyRefused, StateError, UnknownName
from ..core.storage import read_json, write_json
from ..core.task import RUNNING_STATISTICS, Tensors
from ..wire.messages.down import Job
from ..wire.messages.fields import EXCHANGES, OUTSIDE_ROUNDS
from ..wire.messages.up import Report
from .accountant import cost, epsilon_of

if TYPE_CHECKING:
    import numpy as np

CLASS_COUNT = "min_class_count"
"""The parameter of methods whose updates carry statistics of classes: the least samples of a class that has any."""

LEDGER_FILE = "privacy.json"
"""The file in the state folder that notes the cost of all updates with noise, and the number of those without."""

_COUNTED = ("cost", "updates", "without_noise")
"""The keys of the ledger's file."""

_SCORES = ("acc.local", "acc.global", "acc.personal")
"""The accuracies of a report that a device may withhold."""


def check_job(policy: PrivacyConfig, job: Job, least: int | None) -> None:
    """Require that the policy allows what the job asks for.

    ``least`` is the `edge_agent.methods.base.Method.least_class_count` of the job's method.

    Raises:
        PrivacyRefused: The job asks for more than the policy allows; all reasons are listed.
    """
    reasons = objections(policy, job.method, least)
    if job.purpose in OUTSIDE_ROUNDS and not getattr(policy, job.purpose):
        reasons.append(f"privacy.{job.purpose} is false: they stay here")
    # A personal head stays on the device, so nothing of it can be seen.
    is_masked = bool(job.session) and job.purpose in {*EXCHANGES, "train", "contribute"}
    is_visible = not is_masked and job.purpose != "personalize"
    if policy.secure_sum == "required" and is_visible:
        reasons.append(
            "privacy.secure_sum is 'required', and the coordinator would see the single update; the run can set "
            "privacy.secure_sum = true"
        )
    # Noise is added to the updates of rounds alone.
    wants_noise = policy.wants_noise or job.privacy is not None
    if wants_noise and job.purpose in {*OUTSIDE_ROUNDS, "contribute"}:
        reasons.append(f"the update of a job '{job.purpose}' would leave without the noise of differential privacy")
    if reasons:
        raise PrivacyRefused("; ".join(reasons), is_public=True)


def check_policy(policy: PrivacyConfig, own: Iterable[str] = ()) -> str:
    """Check a policy before any run, and return a warning about it, or empty text.

    ``own`` are the names of the methods in files of this device.

    Raises:
        UnknownName: The policy names a method that does not exist.
    """
    from .. import methods

    names = (*methods.names(), *own)
    for name in policy.methods or ():
        if name not in names:
            raise UnknownName("method", name, names)
    if policy.clip is None and policy.wants_noise:
        return (
            "privacy.noise or privacy.epsilon without privacy.clip: runs are refused whose coordinator has no clip in "
            "its own [privacy]; set privacy.clip as well"
        )
    return ""


def objections(policy: PrivacyConfig, method: str, least: int | None) -> list[str]:
    """Return the reasons why the policy allows no training by this method; for ``least`` see `check_job`."""
    reasons = []
    if policy.methods is not None and method not in policy.methods:
        reasons.append(f"method is '{method}', privacy.methods allows {', '.join(policy.methods) or 'none'}")
    if least is not None and least < policy.min_class_count:
        reasons.append(
            f"{CLASS_COUNT} of the run is {least}, privacy.{CLASS_COUNT} requires at least {policy.min_class_count} "
            f"(headwater run -p {CLASS_COUNT}={policy.min_class_count})"
        )
    if least is not None and policy.samples == "rounded":
        reasons.append(
            f"updates of '{method}' carry statistics of classes, which tell their sample counts, and "
            "privacy.samples is 'rounded'"
        )
    return reasons


def check_tensors(policy: PrivacyConfig, names: Iterable[str]) -> None:
    """Require that the policy allows tensors of these names in an update.

    Raises:
        PrivacyRefused: The policy does not allow a tensor of such a name.
    """
    statistics = sorted(name for name in names if name.endswith(RUNNING_STATISTICS))
    if statistics and not policy.batch_norm_stats:
        raise PrivacyRefused(
            f"an update would carry '{statistics[0]}', privacy.batch_norm_stats is false; the run's norm can be "
            "'local_stats'",
            is_public=True,
        )


EXTRA = "extra."
"""Prefix of the names of arrays that are not tensors of the model."""


class Content(Enum):
    """The kind of an array in an update, by its name, its shape and its dtype."""

    MODEL = "a tensor of the model"
    CLASSES = "statistics of classes"
    OTHER = "other statistics"


@dataclass(frozen=True)
class UpdateFacts:
    """The facts by which the arrays of one update are checked.

    Attributes:
        method: Name of the run's method.
        is_shipped: Whether that method ships with Headwater.
        declared_least: The run's ``min_class_count``; None where its method has no such parameter.
        shared: Names of the tensors of the model that may leave as they are.
        buffers: Those of them that no gradient moves, and that are not batch norm's: a method may put statistics there.
        received: What the device received for the round; a buffer that is as it was received tells nothing.
        model_shapes: Shape of each tensor of the model that this device knows, by name.
        features: Number of the encoder's features, d.
        class_counts: Training samples of each class on this device, (K,) int64.
    """

    method: str
    is_shipped: bool
    declared_least: int | None
    shared: frozenset[str]
    model_shapes: Mapping[str, tuple[int, ...]]
    features: int
    class_counts: np.ndarray
    buffers: frozenset[str] = frozenset()
    received: Tensors = field(default_factory=dict)


def content_of(name: str, array: np.ndarray, facts: UpdateFacts) -> Content:
    """Return the kind of an array in an update.

    A tensor of the model is one that is shared and trained, or a copy or a change of one, which is named ``extra.*.``
    and then as the tensor, in its shape. Statistics of classes are counts (K,) of integers, and what has one vector of
    features for each class: (K, d) or (d, K).
    """
    shape = array.shape
    is_shared = name in facts.shared and facts.model_shapes.get(name) == shape
    if is_shared:
        # A buffer that training does not move could carry anything, unless it is as it was received.
        if name not in facts.buffers or _is_as_received(name, array, facts.received):
            return Content.MODEL
    elif not name.startswith(EXTRA):
        return Content.OTHER
    elif _is_copy_of_tensor(name, shape, facts.model_shapes):
        return Content.MODEL
    classes = len(facts.class_counts)
    if shape == (classes,) and array.dtype.kind in "iu":
        return Content.CLASSES
    if shape in {(classes, facts.features), (facts.features, classes)}:
        return Content.CLASSES
    return Content.OTHER


def _is_copy_of_tensor(name: str, shape: tuple[int, ...], model_shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the name of an extra array ends in that of a tensor of the model, and has its shape."""
    parts = name.removeprefix(EXTRA).split(".")
    tails = (".".join(parts[begin:]) for begin in range(len(parts)))
    return any(model_shapes.get(tail) == shape for tail in tails)


def _is_as_received(name: str, array: np.ndarray, received: Tensors) -> bool:
    """Return whether an array equals the one that the device received under this name."""
    import numpy as np

    return name in received and np.array_equal(array, received[name])


def check_update(policy: PrivacyConfig, update: Tensors, facts: UpdateFacts) -> None:
    """Require that the policy allows every array of an update, by its content; both tiers call this.

    Tensors of the model may leave. Statistics of classes may leave if the method has a least number of samples of a
    class, and if they are zero for classes of fewer samples on this device. Every other array of a method that does not
    ship with Headwater needs an entry in ``privacy.statistics``; the arrays of methods that ship are on the page "What
    leaves a device". Before the training, the check takes an update of zeros with the names and shapes of a method.

    Raises:
        PrivacyRefused: The update holds an array that the policy does not allow; all reasons are listed.
    """
    check_tensors(policy, update)
    unchecked: dict[str, np.ndarray] = {}
    reasons: list[str] = []
    for name, array in sorted(update.items()):
        content = content_of(name, array, facts)
        if content is Content.MODEL or allows_statistics(policy, name):
            continue
        if content is Content.CLASSES and _has_known_classes(array, facts):
            reasons += _objections_to_classes(policy, name, array, facts)
        elif not facts.is_shipped:
            unchecked[name] = array
    if unchecked:
        reasons.append(_objection_to_unchecked(unchecked, facts))
    if reasons:
        raise PrivacyRefused("; ".join(reasons), is_public=True)


def _has_known_classes(array: np.ndarray, facts: UpdateFacts) -> bool:
    """Return whether the rows of an array in the shape of statistics of classes are certain to be its classes.

    A method that does not ship must have declared that it sends such statistics. With as many features as classes, rows
    cannot be told from columns, nor sums by class from X^T X.
    """
    if facts.is_shipped:
        return True
    is_square = array.ndim == 2 and array.shape[0] == array.shape[1]
    return facts.declared_least is not None and not is_square


def allows_statistics(policy: PrivacyConfig, name: str) -> bool:
    """Return whether the owner lets an array of this name leave, whatever its content."""
    return any(fnmatchcase(name, pattern) for pattern in policy.statistics)


def declared_least(params: Mapping[str, Any]) -> int | None:
    """Return the ``min_class_count`` among the parameters of a run; None where its method has no such parameter."""
    least = params.get(CLASS_COUNT)
    return least if isinstance(least, int) and not isinstance(least, bool) else None


def _objections_to_classes(policy: PrivacyConfig, name: str, array: np.ndarray, facts: UpdateFacts) -> list[str]:
    """Return the reasons why these statistics of classes may not leave; empty: they may."""
    import numpy as np

    if policy.samples == "rounded":
        return [f"'{name}' holds statistics of classes, which tell their sample counts; privacy.samples is 'rounded'"]
    # Of a class of one sample the "mean" is that sample's own features. Classes that are absent here tell nothing.
    least = max(policy.min_class_count, facts.declared_least or 1)
    counts = facts.class_counts
    is_small = (counts > 0) & (counts < least)
    is_class_first = array.shape[0] == len(counts)
    rows = array if is_class_first else array.T
    has_values = rows.reshape(len(counts), -1).any(axis=1)
    revealed = np.flatnonzero(is_small & has_values)
    if not revealed.size:
        return []
    fewest = int(counts[revealed].min())
    reason = (
        f"'{name}' of method '{facts.method}' holds values of {revealed.size} of {len(counts)} classes that have fewer "
        f"than {least} training samples here, the smallest {fewest}; the method has to leave zeros in their place"
    )
    return [reason]


def _objection_to_unchecked(arrays: Mapping[str, np.ndarray], facts: UpdateFacts) -> str:
    """Return a reason that names the arrays which the owner would have to allow, and how."""
    forms = [f"'{name}' {array.dtype} {[*array.shape]}" for name, array in arrays.items()]
    listed = ", ".join(forms[:_SHOWN_ARRAYS])
    if len(forms) > _SHOWN_ARRAYS:
        listed += f" and {len(forms) - _SHOWN_ARRAYS} more"
    reason = (
        f"method '{facts.method}' sends {listed}, and this device cannot tell what they say of single samples; "
        f"its owner may allow them by privacy.statistics = {json.dumps([*arrays][:_SHOWN_ARRAYS])}"
    )
    has_classes = any(content_of(name, array, facts) is Content.CLASSES for name, array in arrays.items())
    if has_classes:
        reason += (
            f" (statistics of classes do not need that once the method has a parameter {CLASS_COUNT}, and leaves "
            "zeros for classes of fewer samples)"
        )
    return reason


_SHOWN_ARRAYS = 4
"""The number of arrays that a reason names, because a message holds 1,000 characters."""


def sample_count(policy: PrivacyConfig, exact: int) -> int:
    """Return the sample count that leaves: the exact one, or the power of two that is nearest by ratio (0 stays 0)."""
    if policy.samples == "exact" or exact < 1:
        return exact
    below = 1 << (exact.bit_length() - 1)
    return below if exact * exact < 2 * below * below else 2 * below


def allows_metric(policy: PrivacyConfig, name: str) -> bool:
    """Return whether a metric of this name may leave."""
    return any(fnmatchcase(name, pattern) for pattern in policy.metrics)


def without_withheld(policy: PrivacyConfig, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that may leave."""
    return {name: value for name, value in metrics.items() if allows_metric(policy, name)}


def public_report(policy: PrivacyConfig, report: Report) -> Report:
    """Return a report without the figures that may not leave, and with its sample counts as they may."""
    allowed = [name for name in _SCORES if allows_metric(policy, name)]
    changes: dict[str, Any] = {name.replace(".", "_"): None for name in _SCORES if name not in allowed}
    if "acc.local" not in allowed:
        changes["local_model"] = ""
    changes["samples"] = sample_count(policy, report.samples)
    changes["support"] = sample_count(policy, report.support)
    changes["one_class"] = report.one_class and allows_metric(policy, "one_class")
    # It follows from all three accuracies, and would tell something of each.
    changes["better_alone"] = report.better_alone and len(allowed) == len(_SCORES)
    changes["metrics"] = {name: value for name, value in report.metrics.items() if allows_metric(policy, name)}
    return report.model_copy(update=changes)


class Ledger:
    """The cost in privacy of all updates of this device, over all runs, in a file on its disk."""

    def __init__(self, folder: Path, policy: PrivacyConfig) -> None:
        self._path = folder / LEDGER_FILE
        self._policy = policy

    def check(self, noise: float) -> None:
        """Require that one more update with this noise multiplier is within the budget.

        Raises:
            PrivacyRefused: The update would exceed the budget.
            StateError: The file is damaged; nothing leaves until it is repaired.
        """
        limit = self._policy.epsilon
        delta = self._policy.delta
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
        """Note one more update on disk, before it leaves, and return ``epsilon`` and ``epsilon_left`` as metrics.

        Raises:
            PrivacyRefused: The update would exceed the budget.
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
        """Return the cost of all updates with noise so far."""
        return float(self._read()["cost"])

    def figures(self) -> dict[str, float | None]:
        """Return the figures of the budget.

        Returns:
            ``epsilon`` that is spent (None: infinite), ``epsilon_left`` (None: there is no limit), ``delta``, and the
            number of ``updates_without_noise``, which epsilon does not cover.
        """
        limit = self._policy.epsilon
        delta = self._policy.delta
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
        """Return the numbers in the file, zeros where there is none.

        Raises:
            StateError: The file is damaged.
        """
        content = read_json(self._path)
        if content is None:
            return dict.fromkeys(_COUNTED, 0)
        # Earlier versions did not count the updates without noise.
        counts: dict[str, Any] = {"without_noise": 0, **content}
        numbers = {name: counts.get(name) for name in _COUNTED}
        if not all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers.values()):
            raise StateError(
                f"{self._path}: holds {str(content)[:80]}, expected {', '.join(_COUNTED)} of 0 or more; restore an "
                "older copy, because without the file nobody knows what this device has spent"
            )
        return {name: counts[name] for name in _COUNTED}


def spent(config: AgentConfig) -> dict[str, Any] | None:
    """Return what this device has spent of its privacy budget, as JSON; None where no update had noise."""
    ledger = Ledger(config.state, config.privacy)
    try:
        return ledger.figures() if ledger.spent() else None
    except StateError as error:
        return {"error": str(error)}
