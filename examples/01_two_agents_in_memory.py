"""A whole federation in one process: a coordinator and two agents that talk over the in-memory transport.

Run it:  python examples/01_two_agents_in_memory.py        (about 5 s)

The agents are the program of a device, and the in-memory broker queues and redelivers like a real one. `simulate` is
faster, for many clients; this is for trying what coordinator and agents do together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator import CoordinatorConfig, federate

ROUNDS = 3


def run(folder: Path) -> Mapping[str, Any]:
    """Run FedPer and return the run's summary; everything is in ``folder`` afterwards."""
    task = {
        "input": {"kind": "image", "channels": 1, "height": 16, "width": 16},
        "class_names": list("0123456789"),
        "encoder": "small_cnn",
    }
    config = CoordinatorConfig.model_validate({"state": folder / "coordinator", "task": task})
    halves = {f"agent-{number}": f"digits:optdigits?client={number}&clients=2" for number in range(2)}
    return federate(config, halves, "fedper", params={"lr": 0.05, "momentum": 0.9}, rounds=ROUNDS)


def main() -> None:
    """Federate in a temporary folder and print what each agent got."""
    with tempfile.TemporaryDirectory() as folder:
        for found in run(Path(folder))["agents"]:
            print(f"{found['id']}: acc.local {found['acc']['local']:.3f}, acc.personal {found['acc']['personal']:.3f}")


if __name__ == "__main__":
    main()
