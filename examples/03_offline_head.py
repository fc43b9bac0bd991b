"""From a trained encoder to a personal head on a device that is offline: bundle, fit, evaluate, predict.

Run it:  python examples/03_offline_head.py        (about 10 s)

The upper half needs torch and stands for the data center; it trains a small encoder on digits of two styles. The lower
half is what a device does with the one file that it gets, by the commands that it would type, without torch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from coordinator import simulate
from edge_agent.cli import main as edge_agent

EPOCHS = 3


def make_bundle(path: Path) -> None:
    """Train on two styles, and export the encoder with an int8 variant."""
    result = simulate(
        "fedavg",
        data=("digits:inverted?client=0&clients=3", "digits:photo?client=1&clients=3"),
        partition="domains",
        rounds=2,
        params={"lr": 0.05, "momentum": 0.9, "batch_size": 32, "local_epochs": EPOCHS},
        engine="serial",
    )
    print(f"bundle of {result.export(path).stat().st_size // 1000} kB\n")


def main() -> None:
    """Make a bundle, and use it."""
    with tempfile.TemporaryDirectory() as folder:
        bundle, head, cache = (str(Path(folder) / name) for name in ("encoder.hwb", "my-head", "cache"))
        make_bundle(Path(bundle))
        source = "digits:slanted?client=2&clients=3"  # a style and writers that the encoder has never seen
        common = ["--bundle", bundle, "--cache", cache]
        run("fit", *common, "--data", source, "--head", "lr", "--out", head)
        run("evaluate", *common, "--data", source)
        run("predict", *common, "--data", f"{source}&n=3", "--head", head)


def run(*words: str) -> None:
    """What typing ``edge-agent …`` does."""
    print(f"$ edge-agent {words[0]} …", flush=True)
    if edge_agent(words):
        raise SystemExit(1)
    print()


if __name__ == "__main__":
    main()
