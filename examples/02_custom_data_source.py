"""Your own data source, in two ways. No torch is imported.

Run it:  python examples/02_custom_data_source.py        (about 1 s)

1. A function: ``python:my_module:my_function?option=value`` in an agent's configuration calls it with the options as
   text. That is all that most devices need.
2. A kind, with checked options: ``waves:calm?n=40``. Here it is registered for this process; a package of yours would
   name it in its entry points: [project.entry-points."headwater.data"]  waves = "my_package.waves:SOURCE"
"""

from __future__ import annotations

import sys

import numpy as np
from pydantic import Field

from edge_agent import data, heads
from edge_agent.core.errors import HeadwaterError
from edge_agent.core.task import WindowInput
from edge_agent.data import Raw, Samples
from edge_agent.heads import FitData

CLASSES = ("slow", "fast")
INPUT = WindowInput(channels=1, length=32, stride=32)


def waves(n: str = "60", noise: str = "0.3") -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Way 1: windows (n, 1, 32), labels (n,), and the names of the classes."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 2, int(n))
    time = np.arange(32) / 32
    begin = rng.uniform(0, 1, (len(labels), 1))
    pure = np.sin(2 * np.pi * ((2 + 3 * labels)[:, None] * time + begin))
    return (pure + rng.normal(0, float(noise), pure.shape))[:, None].astype(np.float32), labels, CLASSES


class Options(data.Options):
    """Way 2: options are checked before anything is read; a typo gets the nearest name."""

    n: int = Field(60, ge=2, description="windows")


def read(where: str, options: Options) -> Raw:
    """The windows; ``where`` is the text between ':' and '?'."""
    inputs, labels, names = waves(str(options.n), noise={"calm": "0.3", "stormy": "1.5"}[where])
    return Raw("window", list(inputs), labels, names)


SOURCE = data.DataSource(Options, read)


def score(samples: Samples) -> float:
    """Accuracy of a head on the spectra of the windows."""
    spectra = np.abs(np.fft.rfft(samples.inputs[:, 0])).astype(np.float32)
    train, test = data.split(Samples(spectra, samples.labels, CLASSES, INPUT), 0.5, seed=0)
    head = heads.create("lr")
    head.fit(FitData(train.inputs, train.labels, len(CLASSES)), np.random.default_rng(0))
    return float(np.mean(head.predict_proba(test.inputs).argmax(axis=1) == test.labels))


def main() -> None:
    """Load from both, and show what a typo gets."""
    data.registry.add("waves", SOURCE)
    module = "__main__" if sys.modules.get("__main__") is sys.modules.get(__name__) else __name__
    for source in (f"python:{module}:waves?n=200", "waves:calm?n=200", "waves:stormy?n=200"):
        samples = data.load(source, INPUT, CLASSES)
        print(f"{source:30} {samples.inputs.shape} acc.personal {score(samples):.3f}")
    try:
        data.load("waves:calm?m=200", INPUT, CLASSES)
    except HeadwaterError as error:
        print(f"a typo: {error}")


if __name__ == "__main__":
    main()
