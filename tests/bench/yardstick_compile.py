"""Whether `torch.compile` pays in local training: seconds until it is compiled, and steps until they are saved again.

``python tests/bench/yardstick_compile.py`` prints the table of examples/results/speed.md: one thread, processor time of
this process and its children, for the encoder with cross entropy and SGD, eager and compiled steps in turns.
"""

from __future__ import annotations

import argparse
import copy
import resource
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from edge_agent.core.limits import keep_freed_memory
from edge_agent.core.task import ImageInput, Task
from edge_agent.training.parts import encoder_and_head

CASES = {"fedpac_cnn": (1, 28, 50), "small_cnn": (3, 32, 32)}
"""Encoder -> channels, pixels of a side, samples of a batch."""

TURNS = 15


def cpu_s() -> float:
    """Return the processor seconds of this process and of children that have ended."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def step_of(
    model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor
) -> Callable[[], None]:
    """Return one step of training on the same batch again and again."""
    labels = torch.arange(len(inputs)) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def row(name: str) -> str:
    """Return a line of the table."""
    channels, side, batch = CASES[name]
    image = ImageInput(channels=channels, height=side, width=side)
    model = encoder_and_head(Task(input=image, class_names=tuple("0123456789"), encoder=name)).train()
    twin = copy.deepcopy(model)
    inputs = torch.randn(batch, channels, side, side)
    eager = step_of(model, model, inputs)
    compiled = step_of(twin, torch.compile(twin), inputs)
    eager()
    begin = cpu_s()
    compiled()
    compile_s = cpu_s() - begin
    seconds: dict[str, list[float]] = {"eager": [], "compiled": []}
    for number in range(TURNS):
        sides = [("eager", eager), ("compiled", compiled)]
        if number % 2:
            sides.reverse()
        for side_name, step in sides:
            begin = cpu_s()
            step()
            seconds[side_name].append(cpu_s() - begin)
    eager_s = median(seconds["eager"])
    ratio = median(c / e for c, e in zip(seconds["compiled"], seconds["eager"], strict=True))
    saved_s = eager_s * (1 - ratio)
    pays = f"{compile_s / saved_s:,.0f}" if saved_s > 0 else "never"
    return f"| {name} | {1000 * eager_s:.1f} | {ratio:.2f} × | {compile_s:.1f} | {pays} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    print("| encoder | a step, ms | compiled | compiling, s | steps until that is saved |\n|---|---|---|---|---|")
    for name in CASES:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
