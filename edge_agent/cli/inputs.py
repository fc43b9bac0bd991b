"""What several commands open: a bundle (file, folder or state folder), its encoder, and local data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..bundle import Bundle, EncoderPrecision
    from ..data import Samples
    from ..encoder import Encoder

SOURCES = """data sources (kind:where?option=value&option=value):
  images:DIR                     one sub-folder of image files for each class
  npz:FILE?inputs=x&labels=y     arrays in a NumPy archive
  idx:DIR?split=train            MNIST and the like; split=train, test or all
  windows:FILE?subject=1,2       sensor recordings, cut into windows by the bundle's task
  digits:rendered?n=500          digits without a download: optdigits, inverted, photo, rendered …
  cifar:DIR?labels=coarse        CIFAR-10 and CIFAR-100; cinic:DIR is CINIC-10
  pacs:DIR?domain=sketch         one or more domains; so are officehome, officecaltech, domainnet and digits5
  ucihar:DIR?subject=3           UCI HAR, windows of nine signals of a phone
  python:module:function         a function of your own that returns (inputs, labels)
Classes are matched by name: the data may lack some of the bundle's classes, and may hold no others. A relative place
counts from the working folder here, and from the file's own folder in a configuration file.
"""


SAVED_HEAD = "a head saved by 'edge-agent fit'"


def add_bundle(parser: argparse.ArgumentParser) -> None:
    """Arguments by which a bundle and the folder for caches are named."""
    parser.add_argument(
        "--bundle", type=Path, required=True, metavar="PATH", help="bundle file (*.hwb), or an agent's state folder"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="folder of unpacked bundles and features (default: headwater in XDG_CACHE_HOME or ~/.cache)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of encoder and head, 0 = as many as cores (default: 1)"
    )


def add_data(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Arguments by which local data and their split are named."""
    parser.add_argument("--data", required=required, metavar="SOURCE", help="local data, see below")
    parser.add_argument(
        "--test-fraction", type=float, default=0.25, metavar="F", help="share held out for evaluation (default: 0.25)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of split and fit (default: 0)")
    parser.epilog = f"{SOURCES}\n{parser.epilog or ''}"


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Argument by which one variant of the encoder is chosen."""
    parser.add_argument(
        "--precision",
        choices=("auto", "fp32", "int8"),
        default="auto",
        help="auto: the saved head's, else fp32, unless int8 is faster here and a head on your data as accurate",
    )


def cache_of(arguments: argparse.Namespace) -> Path:
    """Folder for what can be made again: the one that was named, or the default one."""
    if arguments.cache is not None:
        return Path(arguments.cache)
    from ..api import default_cache

    return default_cache()


def bundle(arguments: argparse.Namespace) -> Bundle:
    """The bundle that ``--bundle`` names, verified; a bundle file is unpacked in the cache once.

    Raises:
        BundleDamaged: what is at that path cannot be used.
        UsageError: nothing is at that path, or arguments that no bundle can be run with.
    """
    from ..api import load_bundle

    check(arguments)
    return load_bundle(arguments.bundle, cache_of(arguments))


def existing(path: Path, expected: str) -> Path:
    """``path``, where something is.

    Raises:
        UsageError: nothing is there.
    """
    from ..errors import UsageError

    if not path.exists():
        raise UsageError(f"{path}: it is not there; expected {expected}, check the path")
    return path


def check(arguments: argparse.Namespace) -> None:
    """Return quietly when the numbers among the arguments are possible.

    Raises:
        UsageError: lists those that are not.
    """
    from ..errors import UsageError

    rules: dict[str, tuple[str, Callable[[float], bool], str]] = {
        "threads": ("--threads", lambda value: 0 <= value <= 1024, "0..1024"),
        "test_fraction": ("--test-fraction", lambda value: 0 < value < 1, "above 0 and below 1"),
        "seed": ("--seed", lambda value: value >= 0, "0 or more"),
    }
    mistakes = [
        f"{option} {getattr(arguments, name)}: expected {expected}"
        for name, (option, is_possible, expected) in rules.items()
        if getattr(arguments, name, None) is not None and not is_possible(getattr(arguments, name))
    ]
    if mistakes:
        raise UsageError("; ".join(mistakes))


def samples(arguments: argparse.Namespace, found: Bundle) -> Samples:
    """The samples that ``--data`` names, in the form that the bundle's task asks for."""
    from ..data import load

    task = found.manifest.task
    return load(arguments.data, task.input, task.class_names)


def parts(arguments: argparse.Namespace, found: Bundle) -> tuple[Samples, Samples]:
    """The samples that ``--data`` names: those to learn from, and those held out by ``--test-fraction``."""
    from ..data import split

    return split(samples(arguments, found), arguments.test_fraction, arguments.seed)


def encoder(arguments: argparse.Namespace, found: Bundle, precision: EncoderPrecision | None = None) -> Encoder:
    """The bundle's encoder after its self-test; ``precision`` (a saved head's) wins over ``--precision``.

    Without either it is fp32: there is nothing to tell by whether int8 is as accurate.
    """
    from ..encoder import Encoder

    wanted: EncoderPrecision = "int8" if arguments.precision == "int8" else "fp32"
    return Encoder.open(found, precision or wanted, threads(arguments))


def best_encoder(arguments: argparse.Namespace, found: Bundle, train: Samples) -> Encoder:
    """The bundle's encoder in the precision of ``--precision``, or the one that suits this device and its samples."""
    from ..precision import open_encoder
    from . import output

    features = cache_of(arguments) / "features"
    return open_encoder(
        found,
        arguments.precision,
        train,
        threads(arguments),
        seed=arguments.seed,
        features=features,
        progress=output.progress("features"),
    )


def threads(arguments: argparse.Namespace) -> int:
    """Encoder threads."""
    return 1 if arguments.threads is None else int(arguments.threads)
