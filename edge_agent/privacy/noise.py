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
    """What is done to an update. ``noise`` is the multiplier: standard deviation over clip, in both groups of numbers.

    ``clip`` bounds the L2 norm of the change of all shared tensors together, ``clip_statistics`` that of all other
    arrays together.
    """

    clip: float
    clip_statistics: float
    noise: float

    @classmethod
    def of(cls, policy: PrivacyConfig, asked: Noise | None) -> Mechanism | None:
        """Return the stricter of what the device's policy and the run ask for; None where neither asks for anything.

        Raises:
            PrivacyRefused: The policy asks for noise, and neither side sets the norm to which changes are clipped.
        """
        clips = [clip for clip in (policy.clip, asked.clip if asked else None) if clip is not None]
        if not clips:
            if policy.noise or policy.epsilon is not None:
                raise PrivacyRefused(
                    "privacy.noise or privacy.epsilon is set, and the run clips nothing; set privacy.clip as well, or "
                    "[privacy] at the coordinator",
                    is_public=True,
                )
            return None
        clip = min(clips)
        statistics = min(x for x in (policy.clip, asked.clip_statistics if asked else None) if x is not None)
        # The others of the round count on noise of the run's size, whatever this device clips to.
        of_run = 0.0 if asked is None else asked.noise * max(asked.clip / clip, asked.clip_statistics / statistics)
        return cls(clip, statistics, max(policy.noise, of_run))

    def apply(self, method: Method, update: Tensors, received: Tensors, rng: np.random.Generator) -> Tensors:
        """Return the update as it leaves: same names, shapes and dtypes.

        Raises:
            PrivacyRefused: The method sends arrays to which noise cannot be added.
            TrainingFailed: The update holds NaN or infinity.
        """
        import numpy as np

        if counted := [name for name, a in update.items() if a.dtype.kind != "f" and not name.startswith("extra.")]:
            raise PrivacyRefused(
                f"'{counted[0]}' of method '{method.name}' is counted, no noise is defined for it", is_public=True
            )
        shared = {name: array for name, array in update.items() if not name.startswith("extra.")}
        extras = {name: array for name, array in update.items() if name not in shared}
        if missing := sorted(shared.keys() - received.keys()):
            raise PrivacyRefused(
                f"'{missing[0]}' of the update was not received, so it has no change to clip", is_public=True
            )
        statistics = method.to_noise(extras)
        if statistics is None:
            more = f" and {len(extras) - 1} more arrays" if len(extras) > 1 else ""
            raise PrivacyRefused(
                f"method '{method.name}' sends '{min(extras)}'{more}, for which no noise is defined; use another "
                "method, or no differential privacy",
                is_public=True,
            )
        changes = {name: array.astype(np.float64) - received[name] for name, array in shared.items()}
        groups = [(changes, self.clip), (statistics, self.clip_statistics)]
        groups = [(arrays, clip) for arrays, clip in groups if arrays]
        share = math.sqrt(len(groups))  # each group may move by its clip: together sqrt(2), in units of the clips
        noisy: Tensors = {}
        for arrays, clip in groups:
            norm = norm_of(arrays.values())
            if not math.isfinite(norm):  # it could not be clipped, and what is finite of it would leave as it is
                raise TrainingFailed("the update holds NaN or infinity, which cannot be clipped; nothing of it leaves")
            scale = min(1.0, clip / max(norm, 1e-300))
            std = self.noise * clip * share
            noisy |= {name: scale * a + std * rng.standard_normal(a.shape) for name, a in sorted(arrays.items())}
        result: Tensors = {}
        for name, array in shared.items():
            moved = (received[name] + noisy[name]).astype(array.dtype)
            # What follows from noisy numbers alone costs nothing: a variance below 0 is none.
            result[name] = np.maximum(moved, 0) if name.endswith(".running_var") else moved
        made = method.from_noise({name: noisy[name] for name in statistics})
        return result | {name: array.astype(extras[name].dtype) for name, array in made.items()}


def objection(method: Method) -> str:
    """Why noise is not defined for what a method sends; empty where it is. Needs torch."""
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
    """L2 norm of all numbers together."""
    return math.sqrt(sum(float((array.astype(float) ** 2).sum()) for array in arrays))
