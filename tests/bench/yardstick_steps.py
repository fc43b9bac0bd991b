"""Which step pays: devices alone, a head on the starter encoder, one round of AFL, full training from the starter.

``python tests/bench/yardstick_steps.py --folder DIR --packages DIR`` writes photos of ten things for each seed, divides
them among four devices as unevenly as photos of several people are (Dirichlet, alpha 0.5), and runs each step as a user
does, by ``headwater simulate``. Half of each device's photos are held out. ``--packages`` is that of
yardstick_starter.py; tuxpaint-stamps-default and gnome-backgrounds are enough. It prints the table of
examples/guides/photos-together.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import yardstick_starter as starter
from PIL import Image
from scipy.stats import t as student

EACH = (10, 40)
"""Photos of each thing that all devices have together; half of them are held out."""

FULL = ("--rounds", "10", "--evaluate-every", "10", "-p", "lr=0.05", "-p", "momentum=0.9", "-p", "local_epochs=4")
STEPS: dict[str, tuple[str, ...]] = {
    "linear_probe": ("--method", "linear_probe", "--rounds", "1"),
    "afl": ("--method", "afl", "--rounds", "1", "--head-clients", "4", "--head", "auto"),
    "fedavg_ft": ("--method", "fedavg_ft", *FULL),
}
NAMES = {
    "alone": "alone: the best model without an encoder",
    "linear_probe": "a head on the starter encoder, nothing shared",
    "afl": "one round of `afl`, then a head on each device",
    "fedavg_ft": "ten rounds of `fedavg_ft` from the starter",
}


def write_photos(folder: Path, packages: Path, seed: int, each: int) -> None:
    """Write photos of ten things, one folder for each thing."""
    pictures = starter.things(seed, packages)
    for label in np.unique(pictures.train_labels):
        place = folder / f"thing{label}"
        place.mkdir(parents=True, exist_ok=True)
        for number, row in enumerate(np.flatnonzero(pictures.train_labels == label)[:each]):
            Image.fromarray(pictures.train[row]).save(place / f"{number}.png")


def run_step(step: str, photos: Path, folder: Path, seed: int) -> dict[str, float]:
    """Return the mean accuracies over devices, 0..1, and the mean MB of a device, after one step."""
    common = ("--data", f"images:{photos}", "--clients", "4", "--partition", "dirichlet", "--alpha", "0.5")
    options = (*common, "--test-fraction", "0.5", "--from", "starter", "--seed", str(seed), "--out", str(folder))
    subprocess.run(
        [sys.executable, "-m", "coordinator", "simulate", *STEPS[step], *options], check=True, capture_output=True
    )
    shown = subprocess.run(
        [sys.executable, "-m", "coordinator", "gains", "--json", str(folder)], check=True, capture_output=True
    )
    alone, reached = json.loads(shown.stdout)["steps"]
    return {"alone": alone["accuracy"], step: reached["accuracy"], f"{step} MB": reached["bytes_each"] / 1e6}


def measure(each: int, seed: int, folder: Path, packages: Path) -> dict[str, float]:
    """Return the accuracies of all steps with one seed; those that are in the folder already are not run again."""
    path = folder / f"row-{each}-{seed}.json"
    row: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    photos = folder / f"photos-{each}-{seed}"
    if not photos.exists():
        write_photos(photos, packages, seed, each)
    for step in STEPS:
        if step not in row:
            row |= run_step(step, photos, folder / f"{step}-{each}-{seed}", seed)
            path.write_text(json.dumps(row))
    return row


def table(rows: dict[int, list[dict[str, float]]]) -> list[str]:
    """Return the lines of the table, Markdown: mean and deviation over seeds, and gains with 95 % intervals."""
    heads = [f"{each // 2} photos of each, gain" for each in rows]
    lines = [f"| step | MB for each device | {' | '.join(heads)} |", "|---|---|" + "---|" * len(rows)]
    names = list(NAMES)
    for before, name in zip([None, *names], names, strict=False):
        traffic = np.mean([row.get(f"{name} MB", 0.0) for row in next(iter(rows.values()))])
        cells = [_cell(seeds, name, before) for seeds in rows.values()]
        lines.append(f"| {NAMES[name]} | {traffic:.1f} | {' | '.join(cells)} |")
    return lines


def _cell(seeds: list[dict[str, float]], name: str, before: str | None) -> str:
    """Return mean and standard deviation of a step's accuracy, %, and its gain over the step before, points."""
    reached = np.array([100 * row[name] for row in seeds])
    shown = f"{reached.mean():.1f} ± {reached.std(ddof=1):.1f}"
    if before is None:
        return shown
    gains = reached - np.array([100 * row[before] for row in seeds])
    half = student.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / np.sqrt(len(gains))
    return f"{shown}; {gains.mean():+.1f} ({gains.mean() - half:+.1f} to {gains.mean() + half:+.1f})"


def main() -> None:
    """Run what is not in the folder yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    rows = {
        each: [measure(each, seed, arguments.folder, arguments.packages) for seed in arguments.seeds] for each in EACH
    }
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
