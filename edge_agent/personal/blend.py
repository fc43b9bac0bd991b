"""The better of two worlds: the best head on the encoder's features, blended with a model of the raw inputs.

Both err, but on other samples: a head where the encoder has never seen such inputs, a local model where samples are
few. Whether a blend is used is decided as between heads, by log loss on folds of the training samples (`choice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..heads._layers import minimise
from ..heads.base import softmax
from ..heads.blend import floored_logarithms, pool
from .choice import HeadChoice, Trial
from .local.validation import is_better

PULL = 0.3
"""How strongly the powers of both models are pulled to 0.5, beside the log losses of all samples.

Measured on 60 new devices of four tasks; between 0 and 1 it makes no difference beyond noise.
"""

BLEND = "blend"
"""The trial of the product of the probabilities of head and local model."""

BOTH = "both"
"""The trial of one logistic regression on the features of both."""

LOCAL = "local"
"""The trial of the local model alone, in the folds of the heads."""


@dataclass(frozen=True)
class Blending:
    """What came of comparing the best head with what also looks at the raw inputs.

    Attributes:
        choice: The choice with these trials; its ``name`` is `BLEND`, `BOTH` or still that of the head.
        share: The share of the head in a blend, 0..1.
    """

    choice: HeadChoice
    share: float


def add_blends(
    choice: HeadChoice, local: Trial, both: Trial, labels: Sequence[np.ndarray], *, only_blend: bool = False
) -> Blending:
    """Return the choice between the best head, its blend with the local model, and one head on the features of both.

    Args:
        choice: The choice between the heads, the best one first, with its answers.
        local: The local model on the same folds.
        both: The head on the features of both, on the same folds.
        labels: The labels (m,) of the tested samples of each fold.
        only_blend: Whether the blend is taken however it fares.
    """
    best = choice.trials[0]
    folds = len(best.answers)
    if not folds or len(local.answers) < folds:
        # Too few samples for folds, too many classes, or no time for the local model: nothing speaks for a blend, or
        # for a share in it.
        trials = (*choice.trials, local, both) if folds else choice.trials
        unmeasured = replace(choice, name=BLEND if only_blend else choice.name, trials=trials)
        return Blending(unmeasured, 0.5 if only_blend else 1.0)
    blend = try_blend(best, local, labels[:folds])
    share = best_share(best.answers[:folds], local.answers[:folds], labels[:folds])
    # With all of the share the head answers as it does alone, but for the floor: the local model would be of no use.
    compared = [best, both] if share == 1.0 else [best, blend, both]
    taken = blend if only_blend else _surest(compared, folds)
    others = [trial for trial in (best, blend, both, local) if trial is not taken]
    changed = replace(choice, name=taken.name, why=taken.reason(), trials=(taken, *others, *choice.trials[1:]))
    return Blending(changed, share)


def _surest(trials: Sequence[Trial], folds: int) -> Trial:
    """Return the trial with the least log loss, of those that are not less accurate than another one beyond noise."""
    complete = [trial for trial in trials if len(trial.right) >= folds]
    leader = max(complete, key=lambda trial: int(trial.right_on(folds).sum()))
    as_good = [trial for trial in complete if not is_better(leader.right_on(folds), trial.right_on(folds))]
    return min(as_good, key=lambda trial: trial.loss(folds))


def try_blend(first: Trial, second: Trial, labels: Sequence[np.ndarray]) -> Trial:
    """Return how the blend of two models fares on the folds whose ``labels`` (m,) are given.

    The share in each fold is the best one on all other folds, so that no sample takes part in its own answer. With one
    fold it is one half.
    """
    trial = Trial(BLEND, seconds=first.seconds + second.seconds)
    for number, tested in enumerate(labels):
        others = [other for other in range(len(labels)) if other != number]
        share = 0.5
        if others:
            share = best_share(
                [first.answers[other] for other in others],
                [second.answers[other] for other in others],
                [labels[other] for other in others],
            )
        trial.add(pool(first.answers[number], second.answers[number], share), tested)
    return trial


def best_share(first: Sequence[np.ndarray], second: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> float:
    """Return the share of the first model, 0..1, in the blend with the least log loss.

    The loss of the product p^a q^b is convex in both powers, so the optimum is unique. The share is a / (a + b), and
    the sum of the powers is a matter of the temperature. A small pull to equal powers decides where samples are few.

    Args:
        first: The probabilities (m, K) p of the first model, fold by fold.
        second: Those of the second model, q.
        labels: The right classes (m,).
    """
    right_classes = np.concatenate(labels)
    rows = np.arange(len(right_classes))
    logarithms = np.stack([floored_logarithms(np.concatenate(answers)) for answers in (first, second)])

    def objective(powers: np.ndarray) -> tuple[float, np.ndarray]:
        probabilities = softmax(np.tensordot(powers, logarithms, 1))
        losses = -np.log(np.maximum(probabilities[rows, right_classes], 1e-300))
        probabilities[rows, right_classes] -= 1.0
        gradient = np.tensordot(logarithms, probabilities, 2)
        pull = powers - 0.5
        value = float(losses.sum()) + PULL * float(pull @ pull)
        return value / len(rows), (gradient + 2.0 * PULL * pull) / len(rows)

    powers = minimise(objective, np.array([0.5, 0.5]), max_iterations=50, tolerance=1e-5)
    if powers.max() <= 0.0:  # the answers of both are worse than none
        return 1.0
    first_power, second_power = np.maximum(powers, 0.0).tolist()
    return float(first_power / (first_power + second_power))
