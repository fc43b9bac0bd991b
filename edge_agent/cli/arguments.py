"""Arguments that fit, predict and evaluate share, and what they name: a bundle, its encoder, local data, a head."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle import starter
from ..bundle.starter import bundle_path
from ..core.errors import UsageError
from . import output
from .where import check_exists

if TYPE_CHECKING:
    from ..bundle.unpacked import Bundle
    from ..core.config import DataConfig
    from ..data import LeftOut, Samples
    from ..heads.saved import SavedHead, SavedNumeric
    from ..personal.encoder import Encoder
    from ..personal.fitting import FitOptions

_SOURCES = """data sources (kind:where?option=value&option=value):
  images:DIR                     one sub-folder of image files for each class; without any for 'predict'
  npz:FILE?inputs=x&labels=y     arrays in a NumPy archive
  idx:DIR?split=train            MNIST and the like; split=train, test or all
  windows:FILE?subject=1,2       sensor recordings, cut into windows by the bundle's task
  csv:FILE?label=c&columns=x,y   tables: recordings, windows or images; recording=c, time=c, target=c
  wav:DIR?rate=16000             sounds by class, as log-mel windows; form=image for encoders of images,
                                 form=signal for encoders of raw sound
  video:DIR?every_s=1            frames of films by class; camera:0?n=10&label=cat takes pictures now
  digits:rendered?n=500          digits without a download: optdigits, inverted, photo, rendered …
  cifar:DIR?labels=coarse        CIFAR-10 and CIFAR-100; cinic:DIR is CINIC-10
  pacs:DIR?domain=sketch         one or more domains; so are officehome, officecaltech, domainnet and digits5
  ucihar:DIR?subject=3           UCI HAR, windows of nine signals of a phone
  collected:DIR                  samples that were added on this device with 'edge-agent add'
  python:module:function         your own function that returns (inputs, labels)
Classes are matched by name: the data may lack some of the bundle's classes, and may hold no others, unless
--own-classes is given. A relative place counts from the working folder here, and from the file's own folder in a
configuration file. Files that cannot be used are left out and counted.
"""


def add_bundle(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which bundle, and how its encoder runs."""
    parser.add_argument(
        "--bundle",
        type=bundle_path,
        default=starter.NAME,
        metavar="PATH",
        help="bundle file (*.hwb), or an agent's state folder (default: starter, the encoder of pictures that comes "
        "with this package)",
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
    parser.add_argument(
        "--precision",
        choices=("auto", "fp32", "int8"),
        default="auto",
        help="auto: the saved head's, else fp32, unless int8 is faster here and a head on your data as accurate",
    )


def bundle_option(arguments: argparse.Namespace) -> str:
    """Return the option by which another command names the same bundle, such as " --bundle b.hwb"; empty: none."""
    if arguments.bundle == bundle_path(starter.NAME):
        return ""
    return f" --bundle {shlex.quote(str(arguments.bundle))}"


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add local data and their split, for commands that fit; the help lists the data sources."""
    parser.add_argument("--data", required=True, metavar="SOURCE", help="local data, see below")
    parser.add_argument("--test", metavar="SOURCE", help="held-out samples; all of --data is for training then")
    parser.add_argument(
        "--norm",
        choices=("auto", "own", "shipped"),
        default="auto",
        help="batch norm statistics: of your inputs (own), the bundle's, or own where heads lose nothing by it (auto)",
    )
    parser.add_argument(
        "--test-fraction", type=float, metavar="F", help="share of --data held out for evaluation (default: 0.25)"
    )
    parser.add_argument(
        "--partition", type=Path, metavar="FILE", help="partition file: use the rows of one --client of --data"
    )
    parser.add_argument("--client", metavar="NAME", help="client in --partition")
    add_strict(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of split and fit (default: 0)")
    parser.add_argument(
        "--own-classes", action="store_true", help="the data may hold classes that the bundle does not know"
    )
    parser.epilog = f"{_SOURCES}\n{parser.epilog or ''}"


def add_strict(parser: argparse.ArgumentParser) -> None:
    """Add the option that makes unusable data an error."""
    parser.add_argument(
        "--strict", action="store_true", help="refuse data of which something cannot be used, instead of leaving it out"
    )


def add_no_local(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the option that looks for no acc.local, and return the group, for what excludes that."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--no-local", dest="local", action="store_false", help="do not look for what this device reaches alone"
    )
    return group


def cache_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of unpacked bundles and of features."""
    from ..personal.personalizer import default_cache

    return default_cache() if arguments.cache is None else Path(arguments.cache)


def bundle_of(arguments: argparse.Namespace) -> Bundle:
    """Return the bundle that ``--bundle`` names, verified; a bundle file is unpacked in the cache once.

    Raises:
        BundleDamaged: what is at that path cannot be used.
        UsageError: nothing is at that path, or impossible numbers among the arguments; all of them are listed.
    """
    from ..personal.personalizer import load_bundle

    rules: list[tuple[str, Callable[[float], bool], str]] = [
        ("threads", lambda value: 0 <= value <= 1024, "0..1024"),
        ("test_fraction", lambda value: 0 < value < 1, "above 0 and below 1"),
        ("seed", lambda value: value >= 0, "0 or more"),
        ("unknown", lambda value: 0 <= value < 1, "0 or more and below 1"),
    ]
    mistakes = [
        f"--{name.replace('_', '-')} {value}: expected {expected}"
        for name, is_possible, expected in rules
        if (value := getattr(arguments, name, None)) is not None and not is_possible(value)
    ]
    if mistakes:
        raise UsageError("; ".join(mistakes))
    return load_bundle(arguments.bundle, cache_of(arguments))


def head_folder(given: Path | None) -> Path | None:
    """Return the folder of the head that --head names: that folder, or the head of a device's state folder."""
    if given is None:
        return None
    check_exists(given, "a head saved by 'edge-agent fit', or a device's state folder")
    return own_head(given) or given


def own_head(state: Path) -> Path | None:
    """Return the head of the device whose state folder this is; None where it is none, or has no head yet."""
    from ..heads.saved import CARD

    return state / "head" if (state / "head" / CARD).is_file() and (state / "bundles").is_dir() else None


def samples_of(arguments: argparse.Namespace, bundle: Bundle) -> tuple[Samples, Samples]:
    """Return samples to learn from and held-out ones, as an agent with this bundle would take them."""
    from ..data.partition import own_samples

    task = bundle.manifest.task
    return own_samples(
        data_config(arguments),
        "",
        task.input,
        task.class_names,
        own_classes=arguments.own_classes,
    )


def data_config(arguments: argparse.Namespace) -> DataConfig:
    """Return the arguments of `add_data` as ``[data]`` of an agent's configuration."""
    from ..personal.personalizer import local_data

    names = ("test", "test_fraction", "partition", "client", "strict")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return local_data(arguments.data, seed=arguments.seed, **given)


def skipped_of(parts: tuple[Samples, Samples]) -> tuple[LeftOut, ...]:
    """Return what was left out of training and held-out samples, each once."""
    return tuple(dict.fromkeys((*parts[0].skipped, *parts[1].skipped)))


def encoder_of(
    arguments: argparse.Namespace,
    bundle: Bundle,
    head: SavedHead | SavedNumeric | None = None,
    train: Samples | None = None,
) -> Encoder:
    """Return the bundle's encoder after its self-test: a saved head's, else as ``--precision`` and ``--norm`` say.

    Where these are ``auto``, the samples ``train`` decide; without samples it is fp32 with the bundle's batch norm.
    """
    from ..personal.encoder import Encoder
    from ..personal.precision import Refit, open_encoder

    threads = 1 if arguments.threads is None else arguments.threads
    if head is not None:
        return Encoder.open(bundle, head.precision, threads, norm=head.norm)
    return open_encoder(
        bundle,
        arguments.precision,
        train,
        threads,
        norm=getattr(arguments, "norm", "auto"),
        refit=Refit(getattr(arguments, "seed", 0), cache_of(arguments) / "features", output.progress("features")),
    )


def fit_options(arguments: argparse.Namespace, **more: Any) -> FitOptions:
    """Return seed, cache and progress of a fit by these arguments; ``more`` are fields of `FitOptions`."""
    from ..personal.fitting import FitOptions

    cache = cache_of(arguments) / "features"
    allow_local = getattr(arguments, "allow_local", False)
    return FitOptions(
        seed=arguments.seed,
        cache=cache,
        progress=output.progress,
        local=arguments.local,
        blend=getattr(arguments, "blend", True),
        allow_local=allow_local,
        **more,
    )
