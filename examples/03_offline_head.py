"""From a trained encoder to a personal head on a device that is offline: bundle, fit, evaluate, predict.

Run it:  python examples/03_offline_head.py [FOLDER]        (about 20 s; FOLDER, by default offline, keeps all files)

The upper half needs torch and stands for the data center; it trains a small encoder on digits of four styles. The lower
half is what a device does with the one file that it gets, by the commands that it would type, without torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from coordinator import simulate
from edge_agent.cli import main as edge_agent

ROUNDS = 10


def make_bundle(path: Path) -> None:
    """Train on four styles, and export the encoder with an int8 variant."""
    result = simulate(
        "fedavg",
        data=(
            "digits:optdigits?client=0&clients=3",
            "digits:inverted?client=0&clients=3",
            "digits:photo?client=1&clients=3",
            "digits:rendered?n=500",
        ),
        partition="domains",
        rounds=ROUNDS,
        params={"lr": 0.05, "momentum": 0.9, "batch_size": 32, "local_epochs": 3},
        engine="serial",
    )
    print(f"bundle of {result.export(path).stat().st_size // 1000} kB\n")


def main(folder: Path) -> None:
    """Make a bundle, use it, and say where it is."""
    bundle, head, cache = (str(folder / name) for name in ("encoder.hwb", "my-head", "cache"))
    make_bundle(Path(bundle))
    source = "digits:slanted?client=2&clients=3"  # a style and writers that the encoder has never seen
    common = ["--bundle", bundle, "--cache", cache]
    run("fit", *common, "--data", f"{source}&n=160", "--out", head)
    run("evaluate", *common, "--data", f"{source}&n=160", "--heads", "lr,prototype")
    run("predict", *common, "--data", f"{source}&n=3&seed=1", "--head", head)
    print(f"On your own images of digits: edge-agent fit --bundle {bundle} --data images:photos --out photos-head")


def run(*words: str) -> None:
    """What typing ``edge-agent …`` does."""
    print(f"$ edge-agent {words[0]} …", flush=True)
    if edge_agent(words):
        raise SystemExit(1)
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "offline"))
