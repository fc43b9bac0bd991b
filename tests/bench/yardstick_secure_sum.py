"""What a secure sum costs: bytes and time of rounds with and without, and of masks alone for a large model.

Coordinator, broker in memory and agents in one process, so CPU times are of all of them together.
``python tests/bench/yardstick_secure_sum.py`` writes examples/results/secure-sum.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "harness"))

from federation_duties import WIDE_TASK, TinyDuties, quick_params  # noqa: E402 - it is beside this folder
from federation_harness import Federation  # noqa: E402

from coordinator.config import DifferentialPrivacyConfig  # noqa: E402
from edge_agent.privacy.secure_sum.device import Participant  # noqa: E402
from edge_agent.privacy.secure_sum.server import unmasked  # noqa: E402

AGENTS = (5, 10, 20)
ROUNDS = 4
CLIENTS, NUMBERS = (10, 30), 11_200_000
"""Of the second table: clients in a sum, and numbers of a ResNet18."""


@dataclass(frozen=True)
class Rounds:
    """Per round: kB that an agent sends and receives, CPU seconds of all parties together."""

    agents: int
    is_secure: bool
    up_kb: float
    down_kb: float
    seconds: float


def rounds(agents: int, *, is_secure: bool, task: Any = WIDE_TASK, count: int = ROUNDS) -> Rounds:
    """Rounds of FedAvg with next to no training."""
    with tempfile.TemporaryDirectory() as folder:
        fed = Federation(
            Path(folder), agents=agents, task=task, tasks=TinyDuties, capture=True, cohort={"min_agents": agents}
        )
        privacy = DifferentialPrivacyConfig(secure_sum=is_secure)
        fed.config = fed.config.model_copy(update={"privacy": privacy, "evaluate_every": 0})
        with fed:
            fed.until(lambda: len(fed.coordinator.roster.present("train")) == agents)
            for number in (1, count):  # the first run imports torch
                fed.broker.captured.clear()
                fed.request("fedavg", rounds=number, seed=number, params={**quick_params("fedavg"), "lr": 1e-4})
                begin = time.process_time()
                fed.finish()
                assert fed.record.status == "finished", fed.record.end
            seconds = (time.process_time() - begin) / count
        captured = fed.broker.captured
    up = sum(len(payload) for topic, payload in captured if topic.endswith(("/up", "/ub")))
    alone = sum(len(payload) for topic, payload in captured if topic.endswith(("/dn", "/db")))
    shared = sum(len(payload) for topic, payload in captured if topic.startswith(f"{fed.topics.root}/b/"))
    each = agents * count
    return Rounds(agents, is_secure, up / each / 1e3, (alone + agents * shared) / each / 1e3, seconds)


@dataclass(frozen=True)
class Masks:
    """CPU seconds of a client for its part in a sum, and of the server for the sum, without and with 30 % dropouts."""

    clients: int
    client_s: float
    server_s: float
    dropouts_s: float


def masks(clients: int, numbers: int) -> Masks:
    """The clients' vectors are zeros, which takes as long as anything else."""
    names = [f"c{index:02d}" for index in range(clients)]
    everyone = {name: Participant(name, b"bench") for name in names}
    keys = {name: one.keys() for name, one in everyone.items()}
    sealed = {name: one.shares(keys) for name, one in everyone.items()}
    zeros = np.zeros(numbers, np.uint64)
    begin = time.process_time()
    for name, one in everyone.items():
        one.receive({sender: boxes[name] for sender, boxes in sealed.items() if sender != name})
    masked = {names[0]: everyone[names[0]].masked(zeros)}
    client_s = time.process_time() - begin
    times = []
    for gone in (0, int(0.3 * clients)):
        # Everybody's vector is the same here: what the server does with it is not.
        vectors = dict.fromkeys(names[: clients - gone], masked[names[0]])
        answers = {name: everyone[name].unmask(vectors) for name in vectors} if not times else _again(everyone, vectors)
        begin = time.process_time()
        unmasked(vectors, keys, answers, b"bench")
        times.append(time.process_time() - begin)
    return Masks(clients, client_s, *times)


def _again(everyone: dict[str, Participant], vectors: dict[str, np.ndarray]) -> dict[str, dict[str, bytes]]:
    """A second answer, which no client gives outside of a measurement."""
    for one in everyone.values():
        one._answered = None
    return {name: everyone[name].unmask(vectors) for name in vectors}


def page(of_rounds: Sequence[Rounds], of_masks: Sequence[Masks]) -> str:
    """The result as Markdown."""
    masked = {True: "yes", False: "no"}
    first = "\n".join(
        f"| {one.agents} | {masked[one.is_secure]} | {one.up_kb:.0f} | {one.down_kb:.0f} | {one.seconds:.2f} |"
        for one in of_rounds
    )
    second = "\n".join(
        f"| {row.clients} | {row.client_s:.1f} | {row.server_s:.1f} | {row.dropouts_s:.1f} |" for row in of_masks
    )
    return f"""# What a secure sum costs

A model of 131,203 numbers (0.52 MB), {ROUNDS} rounds with next to no training, and the final model. All parties are in
one process, so CPU time (Intel Xeon) is that of coordinator and agents together. kB are of each agent, all messages.

| agents | secure sum | kB up, a round | kB down, a round | CPU s, a round |
|---|---|---|---|---|
{first}

A masked number takes 8 bytes in place of 4. Keys and shares take 214 bytes up and 212 down for each agent of the round.

Masks alone, for {NUMBERS / 1e6:.1f} million numbers (ResNet18), in CPU s:

| clients | a client: shares and masks | server: sum, nobody missing | with 30 % dropouts |
|---|---|---|---|
{second}

A client makes one mask for each other one; the server takes one off for each client, and for each dropout one for each
of the others.

Made by `python tests/bench/yardstick_secure_sum.py`.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "results" / "secure-sum.md")
    place_of = parser.parse_args().out
    rows = [rounds(agents, is_secure=is_secure) for agents in AGENTS for is_secure in (False, True)]
    print(*rows, sep="\n", flush=True)
    place_of.write_text(page(rows, [masks(clients, NUMBERS) for clients in CLIENTS]), encoding="utf-8")
