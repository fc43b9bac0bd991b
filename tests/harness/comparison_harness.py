"""Comparisons made up of plain numbers, for what shows them."""

from __future__ import annotations

import numpy as np

from coordinator.research.compare.records import ClientScore, Comparison, MethodRecord, SeedRun, Trial

SAMPLES = 20


def run_of(seed, accuracies, samples=SAMPLES, *, clients=None, **fields):
    """A run whose clients have these accuracies; ``samples`` is a number for all, or one for each."""
    counts = [samples] * len(accuracies) if isinstance(samples, int) else samples
    names = clients or [f"c{index:02}" for index in range(len(accuracies))]
    scores = [ClientScore(id=name, samples=count, accuracy=accuracy)
              for name, count, accuracy in zip(names, counts, accuracies, strict=True)]  # fmt: skip
    return SeedRun(seed=seed, clients=tuple(scores), **fields)


def row_of(name, runs, **fields):
    """A row of a table; its method has the same name."""
    return MethodRecord(**{"name": name, "method": name, "runs": tuple(runs), **fields})


def comparison_of(*rows, **fields):
    """A comparison of these rows, with the seeds that they have."""
    seeds = sorted({run.seed for row in rows for run in row.runs})
    settings = {
        "title": "Three methods on digits", "data": ("digits",), "partition": "dirichlet",
        "partition_settings": {"alpha": 0.1}, "clients": 4, "rounds": 5, "seeds": tuple(seeds), "trials": 0,
    }  # fmt: skip
    return Comparison(**{**settings, "methods": rows, **fields})


def trials_of(scores):
    """A trial for each score; None: one that failed."""
    return tuple(
        Trial(number=number, rounds=5, score=score, cpu_s=36.0, failure="" if score is not None else "loss is nan")
        for number, score in enumerate(scores)
    )


NAMES = ("local", "fedavg", "fedavg-ft", "fedrep", "fedpac", "dualfed", "apfl", "ditto", "fedbabu", "afl_α")


def made_up(methods=6, clients=20, seeds=6, rounds=20):
    """A comparison with everything in it: runs with defaults, a failed trial, a missing seed, a deviating footing."""
    generator = np.random.default_rng(0)
    difficulty = generator.normal(0, 0.06, clients)
    rows = []
    for index, name in enumerate(NAMES[:methods]):
        scores = [0.6 + 0.02 * index + float(generator.normal(0, 0.02)) for _ in range(12)]
        if index == 2:
            scores[5] = None
        chosen = max((score, number) for number, score in enumerate(scores) if score is not None)[1]
        footing = {"optimizer": "SGD, lr 0.1", "passes": "1 a round"}
        if index == 3:
            footing = {"optimizer": "SGD, lr 0.1, momentum 0.9", "passes": "10 head, 1 encoder"}
        count = seeds - 1 if index == 4 else seeds
        level = 0.7 + 0.02 * index
        rows.append(
            row_of(
                name,
                [
                    _made_up_run(generator, seed, difficulty + level + 0.03, rounds, {"lr": 0.05})
                    for seed in range(count)
                ],
                untuned=[_made_up_run(generator, seed, difficulty + level, rounds, {}) for seed in range(seeds)],
                trials=trials_of(scores),
                chosen=chosen,
                footing=footing,
            )
        )
    return comparison_of(
        *rows, clients=clients, rounds=rounds, trials=12, search="random", title="Methods on digits, Dirichlet 0.1",
        command="headwater compare local,fedavg --data digits --seeds 0:6 --tune 12",
    )  # fmt: skip


def _made_up_run(generator, seed, levels, rounds, params):
    """A run whose clients have these accuracies but for noise, and a curve that leads there."""
    accuracies = np.clip(levels + generator.normal(0, 0.01) + generator.normal(0, 0.02, len(levels)), 0, 1).round(3)
    mean = float(accuracies.mean())
    noise = generator.normal(0, 0.005, rounds)
    curve = [(done, mean * (1 - 0.7 * np.exp(-done / 5)) + float(noise[done])) for done in range(rounds)]
    curve.append((rounds, mean))
    return run_of(seed, accuracies.tolist(), 25, curve=tuple(curve), params=params, bytes_up=2_000_000,
                  bytes_down=2_100_000, cpu_s=120.0)  # fmt: skip
