"""Differential privacy of a device's updates: the change is clipped, and Gaussian noise is added.

What is protected: all data of the device together, against everybody who sees its updates, the coordinator included. An
update is indistinguishable, within (epsilon, delta), from that of a device whose training changed nothing. For another
device's data in the place of these, count with half of the noise multiplier. Metrics, sample counts outside of updates,
and reports are not covered: ``privacy.metrics`` and ``privacy.samples`` withhold them.

Noise is float64 and then rounded to the tensors' float32; its random numbers come from the system, not from the run's
seed, which the coordinator knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.config import PrivacyConfig
from ..core.errors import PrivacyRefused, TrainingFailed

if TYPE_CHECKING:
    import numpy as np

    from ..core.task import Tensors
    from ..methods.base import Method
    from ..wire.messages.down import Noise


@dataclass(frozen=True)
class Mechanism:
    """The Gaussian mechanism that an update passes before it leaves.

    Attributes:
        clip: Largest L2 norm of the change of all shared tensors together.
        clip_statistics: Largest L2 norm of all other arrays together.
        noise: The noise multiplier: the standard deviation of the noise over the clip, in both groups of arrays.
    """

    clip: float
    clip_statistics: float
    noise: float

    @classmethod
    def of(cls, policy: PrivacyConfig, asked: Noise | None) -> Mechanism | None:
        """Return the stricter of the mechanisms of the device's policy and of the run; None where neither has one.

        Raises:
            PrivacyRefused: The policy asks for noise, and neither side sets the norm to which changes are clipped.
        """
        if asked is None:
            if policy.clip is not None:
                return cls(policy.clip, policy.clip, max(policy.noise, 0.0))
            if policy.noise or policy.epsilon is not None:
                raise PrivacyRefused(
                    "privacy.noise or privacy.epsilon is set, and the run clips nothing; set privacy.clip as well, or "
                    "[privacy] at the coordinator",
                    is_public=True,
                )
            return None
        clip = asked.clip
        statistics = asked.clip_statistics
        if policy.clip is not None:
            clip = min(policy.clip, clip)
            statistics = min(policy.clip, statistics)
        # The others of the round count on noise of the run's size, whatever this device clips to.
        of_run = asked.noise * max(asked.clip / clip, asked.clip_statistics / statistics)
        return cls(clip, statistics, max(policy.noise, of_run))

    def apply(self, method: Method, update: Tensors, received: Tensors, rng: np.random.Generator) -> Tensors:
        """Return an update that is clipped and has noise, with the same names, shapes and dtypes.

        Args:
            method: The run's method.
            update: The update after local training.
            received: The tensors from which the training began.
            rng: The source of the noise.

        Raises:
            PrivacyRefused: The method sends arrays to which noise cannot be added.
            TrainingFailed: The update holds NaN or infinity.
        """
        import numpy as np

        # 1. Two groups of arrays: of the shared tensors the change is protected, of all others the values.
        shared = {name: array for name, array in update.items() if not name.startswith("extra.")}
        extras = {name: array for name, array in update.items() if name not in shared}
        changes = _changes_of(method, shared, received)
        statistics = method.to_noise(extras)
        if statistics is None:
            more = f" and {len(extras) - 1} more arrays" if len(extras) > 1 else ""
            raise PrivacyRefused(
                f"method '{method.name}' sends '{min(extras)}'{more}, for which no noise is defined; use another "
                "method, or no differential privacy",
                is_public=True,
            )
        groups = [(changes, self.clip), (statistics, self.clip_statistics)]
        groups = [(arrays, clip) for arrays, clip in groups if arrays]
        # 2. Each group is clipped and gets noise. Each may move by its clip: together sqrt(2), in units of the clips.
        share = math.sqrt(len(groups))
        noisy: Tensors = {}
        for arrays, clip in groups:
            norm = norm_of(arrays.values())
            if not math.isfinite(norm):  # it could not be clipped, and its finite numbers would leave unchanged
                raise TrainingFailed("the update holds NaN or infinity, which cannot be clipped; nothing of it leaves")
            scale = min(1.0, clip / max(norm, 1e-300))
            std = self.noise * clip * share
            for name, array in sorted(arrays.items()):
                noisy[name] = scale * array + std * rng.standard_normal(array.shape)
        # 3. Back to the form of the update. Computing with noisy numbers alone costs no privacy.
        result: Tensors = {}
        for name, array in shared.items():
            moved = (received[name] + noisy[name]).astype(array.dtype)
            if name.endswith(".running_var"):
                moved = np.maximum(moved, 0)
            result[name] = moved
        restored = method.from_noise({name: noisy[name] for name in statistics})
        for name, array in restored.items():
            result[name] = array.astype(extras[name].dtype)
        return result


def _changes_of(method: Method, shared: Tensors, received: Tensors) -> Tensors:
    """Return the changes of shared tensors by local training, as float64.

    Raises:
        PrivacyRefused: A tensor is of integers, or was not received.
    """
    import numpy as np

    for name, array in shared.items():
        if array.dtype.kind != "f":
            raise PrivacyRefused(
                f"'{name}' of method '{method.name}' is counted, no noise is defined for it", is_public=True
            )
    missing = sorted(shared.keys() - received.keys())
    if missing:
        raise PrivacyRefused(
            f"'{missing[0]}' of the update was not received, so it has no change to clip", is_public=True
        )
    return {name: array.astype(np.float64) - received[name] for name, array in shared.items()}


def objection(method: Method) -> str:
    """Return why noise is not defined for the arrays that a method sends; empty where it is. It needs torch."""
    import numpy as np

    from .disclosure import example

    round_example = example(method)
    mechanism = Mechanism(clip=1.0, clip_statistics=1.0, noise=1.0)
    try:
        mechanism.apply(method, round_example.update, round_example.received, np.random.default_rng(0))
    except PrivacyRefused as error:
        return str(error)
    return ""


def norm_of(arrays: Iterable[np.ndarray]) -> float:
    """Return the L2 norm of all numbers of the arrays together."""
    return math.sqrt(sum(float((array.astype(float) ** 2).sum()) for array in arrays))
