"""The best head for a device: cross-validated on its training samples, within a budget of time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import HeadwaterError
from ..heads import Head
from ..heads._time import time_limit
from .confidence import log_losses
from .local.validation import Fold, interval, is_better

BUDGET_S = 5.0
"""Seconds in which the comparison and a fit of the head that it finds are to end."""

LONGEST_FIT_S = 30.0
"""A single fit of the comparison that takes longer is given up: the bundle suggests its parameters.

It is above the budget, so that a slow device tries all heads once: `dualfed` on 800 samples of 512 features takes 1 s
on one thread of an x86 server, and several times as long on small boards.
"""

TEMPERATURES = tuple(10.0 ** (step / 6) for step in range(-6, 7))
"""From 0.1 to 10: a head's answers are compared with the one of these that suits them best."""

FOLDS = 5
MOST_ROWS = 1000
"""Of larger training sets this many samples are compared on, so that time does not grow with what was collected."""

BASELINES = ("shared_classifier", "prototype", "tuned", "ridge", "lr", "svm", "knn")
"""What is tried for every bundle, the simplest first."""

MOST_CLASSES = 1000
"""Answers over more classes than these are not kept, so that no blend is measured.

Those to 1,000 samples of 10,000 classes are 80 MB for each head, and a share is found in 9 s instead of 0.1 s.
"""

_OF_SHARED = ("shared_classifier", "tuned")

Fit = Callable[[str, np.ndarray], Head]
"""Name of a head, and the rows to learn from -> the fitted head."""


@dataclass
class Trial:
    """One head in cross-validation.

    Attributes:
        name: The name of the head, or of a blend.
        right: Whether it is right on each tested sample, (m,) bool for each fold.
        losses: Its log losses there, (m, T) for each of `TEMPERATURES`.
        seconds: The time of all its fits and answers.
        dropped: Why it was not tried on all folds; empty where it was.
        answers: Its probabilities (m, K) float64 for the tested samples of each fold; none once it was dropped, and
            none of more than `MOST_CLASSES` classes.
    """

    name: str
    right: list[np.ndarray] = field(default_factory=list)
    losses: list[np.ndarray] = field(default_factory=list)
    seconds: float = 0.0
    dropped: str = ""
    answers: list[np.ndarray] = field(default_factory=list)

    def add(self, answers: np.ndarray, labels: np.ndarray) -> None:
        """Note the answers of one more fold.

        Args:
            answers: The probabilities (m, K) for the tested samples.
            labels: Their right classes (m,).
        """
        if answers.shape[1] <= MOST_CLASSES:
            self.answers.append(answers)
        self.right.append(answers.argmax(axis=1) == labels)
        losses = [log_losses(answers, labels, temperature) for temperature in TEMPERATURES]
        self.losses.append(np.stack(losses, axis=1))

    def drop(self, reason: str) -> None:
        """Note why it is not tried any more, and forget its answers, which are large where classes are many."""
        self.dropped = reason
        self.answers.clear()

    def right_on(self, folds: int) -> np.ndarray:
        """Return whether it is right (m,) bool on the samples of the first ``folds`` folds."""
        return np.concatenate(self.right[:folds]) if self.right else np.zeros(0, bool)

    @property
    def all_right(self) -> np.ndarray:
        """Whether it is right (m,) bool on all samples that were tested."""
        return self.right_on(len(self.right))

    @property
    def accuracy(self) -> float | None:
        """Share of right answers, 0..1, on what was tested; None before the first fold."""
        return float(self.all_right.mean()) if self.right else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the accuracies of the folds; None before the first."""
        return float(np.std([right.mean() for right in self.right])) if self.right else None

    def each_loss(self, folds: int) -> np.ndarray:
        """Log loss (m,) >= 0 of its answers in the first ``folds`` folds, at the temperature that suits them best."""
        losses = np.concatenate(self.losses[:folds])
        return np.asarray(losses[:, losses.mean(axis=0).argmin()])

    def loss(self, folds: int) -> float:
        """Return the mean of `each_loss`."""
        return float(self.each_loss(folds).mean())

    def is_surer_than(self, other_trial: Trial) -> bool:
        """Return whether its log loss on all folds is smaller, and it is not less accurate beyond noise."""
        if self.dropped or other_trial.dropped or not self.right or not other_trial.right:
            return False
        folds = len(self.right)
        return self.loss(folds) < other_trial.loss(folds) and not is_better(other_trial.all_right, self.all_right)

    def reason(self) -> str:
        """Return its accuracy with what it is of, for people; it was tried on one fold at least."""
        low, high = interval(int(self.all_right.sum()), len(self.all_right))
        folds = len(self.right)
        return f"{self.accuracy:.3f} on {folds} folds of its training samples (95 %: {low:.3f} to {high:.3f})"

    def as_json(self) -> dict[str, Any]:
        """Return accuracy, its interval and spread (0..1 or None), log loss, folds, seconds and why it was dropped."""
        low, high = interval(int(self.all_right.sum()), len(self.all_right)) if self.right else (None, None)
        return {
            "head": self.name,
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "spread": self.spread,
            "log_loss": round(self.loss(len(self.right)), 4) if self.right else None,
            "folds": len(self.right),
            "seconds": round(self.seconds, 3),
            "dropped": self.dropped,
        }


@dataclass(frozen=True)
class HeadChoice:
    """The chosen head, and how all of them fared: best first, those that were tried on most folds before others.

    ``same_sitting``: share, 0..1, of the tested windows whose recording is learned from, too; None without recordings.
    """

    name: str
    trials: tuple[Trial, ...]
    why: str
    same_sitting: float | None = None

    def metrics(self) -> dict[str, float | int | str | None]:
        """Return ``choice``, its reason, and ``cv.<head>``, accuracy 0..1 in cross-validation, of each head."""
        tried = {f"cv.{trial.name}": round(trial.accuracy, 4) for trial in self.trials if trial.accuracy is not None}
        return {"choice": self.why, **tried}


def candidates(offered: Iterable[str], *, has_shared: bool) -> tuple[str, ...]:
    """Return `BASELINES`, then those of the bundle's heads (``offered``) that are not among them.

    Not ``has_shared``: without those that are nothing without a shared classifier for the device's classes.
    """
    names = dict.fromkeys([*BASELINES, *offered])
    return tuple(name for name in names if has_shared or name not in _OF_SHARED)


def thin_out(labels: np.ndarray, divisions: Sequence[Fold], rng: np.random.Generator) -> list[Fold]:
    """Return the divisions of at most `MOST_ROWS` of the samples with these labels (n,), drawn at random."""
    if len(labels) <= MOST_ROWS:
        return list(divisions)
    is_chosen = np.zeros(len(labels), bool)
    is_chosen[rng.permutation(len(labels))[:MOST_ROWS]] = True
    parts = [Fold(fold.train[is_chosen[fold.train]], fold.test[is_chosen[fold.test]]) for fold in divisions]
    return [part for part in parts if len(part.train) and len(part.test)]


def choose(
    names: Sequence[str],
    fit: Fit,
    features: np.ndarray,
    labels: np.ndarray,
    divisions: Sequence[Fold],
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.process_time,
) -> HeadChoice:
    """Choose the head with the least log loss in cross-validation, of those not worse than the best beyond noise.

    Few samples leave many heads with equally many right answers; how sure the answers are tells more. One temperature
    for all answers of a head makes up for answers that are too sure or not sure enough. Measured on 55 new devices of
    four tasks: 0.5 points above the simplest of the heads within noise of the most accurate one.

    ``features`` (n, d) and ``labels`` (n,) of the training samples; ``fit`` gets rows of them.
    ``names`` from the simplest head to the most costly one, which decides between equal ones. All are tried on the
    first fold; afterwards those that are worse than the best one beyond noise are dropped. Those for which there is no
    time, because a fit on all samples has to be possible after the fold, are compared with the others on the folds that
    they were tried on, and have to be better there by more than two standard errors. A single fit that takes more than
    `LONGEST_FIT_S` is given up, whatever parameters the bundle suggests.
    Without folds (one sample of each class) the first one that can be fitted is taken.
    """
    trials = [Trial(name) for name in names]
    comparison = _CrossValidation(fit, features, labels, divisions, clock)
    # 1. Without folds, or where none can be fitted on them, the simplest head that works is taken.
    if not divisions:
        return HeadChoice(comparison.first_that_fits(trials), tuple(trials), "too few samples to compare heads")
    running, slow = comparison.race(trials, budget_s)
    if not running and not slow:
        return HeadChoice(comparison.first_that_fits(trials), tuple(trials), "no head could be cross-validated")
    # 2. The surest of the heads that were tried on all folds.
    best = min(running, key=lambda trial: trial.loss(len(trial.right))) if running else slow.pop(0)
    # 3. A slow head is compared on fewer folds, so it has to be better by more than chance.
    for trial in slow:
        common_folds = min(len(trial.right), len(best.right))
        gains = best.each_loss(common_folds) - trial.each_loss(common_folds)
        if gains.mean() > 2 * gains.std() / math.sqrt(len(gains)):
            best = trial
    other_trials = [trial for trial in trials if trial is not best]
    other_trials.sort(key=lambda trial: (-len(trial.right), -(trial.accuracy or 0.0)))
    for trial in other_trials:
        trial.answers.clear()
    return HeadChoice(best.name, (best, *other_trials), best.reason())


def cross_validate(
    name: str,
    fit: Fit,
    features: np.ndarray,
    labels: np.ndarray,
    divisions: Sequence[Fold],
    *,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.process_time,
) -> Trial:
    """Return how one head fares on all folds; ``dropped`` says why where a fit fails. Arguments as for `choose`."""
    trial = Trial(name)
    comparison = _CrossValidation(fit, features, labels, divisions, clock)
    for number, fold in enumerate(divisions):
        cost = trial.seconds / number if number else 0.0
        if trial.seconds + cost > budget_s:
            trial.dropped = f"no time for more than {number} of {len(divisions)} folds"
            break
        if not comparison.try_fold(trial, fold):
            break
    return trial


@dataclass(frozen=True)
class _CrossValidation:
    """A comparison of heads on features (n, d), labels (n,) and their divisions; ``clock`` gives seconds."""

    fit: Fit
    features: np.ndarray
    labels: np.ndarray
    divisions: Sequence[Fold]
    clock: Callable[[], float]

    def race(self, trials: Sequence[Trial], budget_s: float) -> tuple[list[Trial], list[Trial]]:
        """Try all heads fold by fold, and drop those that are worse than the best one beyond noise.

        Returns:
            The heads that were tried on all folds that there was time for, in their order, and those too slow for it.
        """
        started_at = self.clock()
        running = list(trials)
        slow = list[Trial]()
        folds = len(self.divisions)
        for number, fold in enumerate(self.divisions):
            for trial in list(running):
                # Time has to be left for this fold and for the fit on all samples, which are more by a quarter.
                cost = trial.seconds / number if number else 0.0
                if number and self.clock() - started_at + 2.25 * cost > budget_s:
                    if len(running) == 1:
                        return running, slow
                    trial.dropped = f"no time for more than {number} of {folds} folds"  # its answers may be needed
                    slow.append(trial)
                    running.remove(trial)
                elif not self.try_fold(trial, fold):
                    running.remove(trial)
            if not running:
                break
            # After each fold those leave that chance alone would not have put so far behind.
            leader = max(running, key=lambda trial: int(trial.all_right.sum()))
            for trial in [trial for trial in running if is_better(leader.all_right, trial.all_right)]:
                trial.drop(f"worse than {leader.name} after {number + 1} of {folds} folds")
                running.remove(trial)
        return running, slow

    def try_fold(self, trial: Trial, fold: Fold) -> bool:
        """Try a head on one fold and return whether it could be fitted; ``trial.dropped`` has the reason if not."""
        started_at = self.clock()
        labels = self.labels[fold.test]
        try:
            with time_limit(LONGEST_FIT_S, self.clock):
                answers = self.fit(trial.name, fold.train).predict_proba(self.features[fold.test])
        except HeadwaterError as error:
            trial.drop(str(error))
            return False
        if not np.isfinite(answers).all():
            # Comparisons with NaN are always false, so such a head could be taken for the best one.
            trial.drop("its answers hold NaN or infinity")
            return False
        trial.add(answers, labels)
        trial.seconds += self.clock() - started_at
        return True

    def first_that_fits(self, trials: Sequence[Trial]) -> str:
        """Return the name of the first head that can be fitted on all samples.

        Raises:
            HeadwaterError: No head can be fitted; all reasons are listed.
        """
        for trial in trials:
            try:
                with time_limit(LONGEST_FIT_S, self.clock):
                    self.fit(trial.name, np.arange(len(self.labels)))
            except HeadwaterError as error:
                trial.dropped = str(error)
                continue
            return trial.name
        raise HeadwaterError("; ".join(f"head '{trial.name}': {trial.dropped}" for trial in trials))
