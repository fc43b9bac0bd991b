"""Whether training steps in bfloat16 are worth it here: one step timed in both precisions before the first real one.

On processors with instructions for bfloat16 a step takes half to three quarters of the time; on others up to nine
times as long, with coarser numbers on top.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.config import Precision
from .parts import Parts

_log = logging.getLogger(__name__)

TURNS = 3
BUDGET_S = 2.0
"""After so many seconds no further turn begins; a slow step needs no second opinion."""

_ORDER: tuple[Precision, ...] = ("float32", "bfloat16", "bfloat16", "float32")


@dataclass(frozen=True)
class StepTimes:
    """The seconds of one training step in each precision, and the precision to train in."""

    float32_s: float
    bfloat16_s: float

    @property
    def chosen(self) -> Precision:
        """bfloat16 where its step is quicker: float32 has the better numbers."""
        return "bfloat16" if self.bfloat16_s < self.float32_s else "float32"

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object, to be saved."""
        return {"precision": self.chosen, "float32_s": self.float32_s, "bfloat16_s": self.bfloat16_s}

    def log(self) -> None:
        """Log a line if bfloat16 was requested and is not used."""
        if self.chosen == "float32":
            _log.warning(
                "precision_not_used precision=bfloat16 float32_ms=%.2f bfloat16_ms=%.2f: a training step is not faster "
                "in bfloat16 here; training in float32",
                1000 * self.float32_s,
                1000 * self.bfloat16_s,
            )


def time_steps(model: Parts, inputs: torch.Tensor, *, clock: Callable[[], float] = time.perf_counter) -> StepTimes:
    """Return the least seconds of a forward and backward step of the encoder on ``inputs`` (b, ...) in each precision.

    Both are warmed up, then timed in turns whose order is balanced. A copy of the model works: model, statistics of
    batch norm and random generators stay as they are.
    """
    if len(inputs) == 1:
        inputs = torch.cat([inputs, inputs])  # batch norm cannot learn from one sample
    twin = copy.deepcopy(model).train()
    device = inputs.device
    seconds: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for precision in _ORDER[:2]:
            _step(twin, inputs, precision)
        spent = 0.0
        for _ in range(TURNS):
            for precision in _ORDER:
                begin = clock()
                _step(twin, inputs, precision)
                seconds[precision].append(clock() - begin)
                spent += seconds[precision][-1]
            if spent >= BUDGET_S:
                break
    return StepTimes(min(seconds["float32"]), min(seconds["bfloat16"]))


def _step(model: Parts, inputs: torch.Tensor, precision: Precision) -> None:
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        loss = model.features(inputs).square().mean()
    if loss.requires_grad:  # an encoder without weights has nothing to learn
        loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    if inputs.device.type == "cuda":
        torch.cuda.synchronize(inputs.device)
