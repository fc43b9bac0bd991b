"""Commands about the samples that a person labels on this device, one by one, and their classes: add and classes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import AgentConfig, DataConfig, HeadConfig, load
from ..errors import HeadwaterError, StateError, UsageError
from ..storage import check_writable, folder_lock, read_json
from . import output

if TYPE_CHECKING:
    from ..bundle import Manifest
    from ..data.collected import Collection


def add_add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent add``."""
    _add_where(parser)
    parser.add_argument("--label", metavar="NAME", help="class of the samples, in place of the labels of --data")
    parser.add_argument("--data", metavar="SOURCE", help="data source, as for 'edge-agent fit'")
    parser.add_argument("files", nargs="*", metavar="FILE", help="images, or recordings (*.npy, *.csv)")


def add(arguments: argparse.Namespace) -> int:
    """Add labelled samples to those of this device, and fit its head again with them.

    The class may be new: the head then knows it behind the others, whose order stays. Every fourth sample of a class is
    held out for evaluation. At most data.budget samples (2000) are kept: beyond, the oldest one of the class with most
    samples is dropped. While the device's agent runs, that fits the head in the background; otherwise it is done at
    once, from features that are stored. The head before stays: 'edge-agent rollback --head' returns to it.

    Example:
      edge-agent add --state /var/lib/headwater-agent --label scarf photo1.png photo2.png
    """
    from ..data import from_files
    from ..data import load as load_data
    from ..data.collected import labelled

    if (arguments.data is None) == (not arguments.files):
        raise UsageError("expected FILE ... with --label NAME, or --data SOURCE")
    if arguments.data is None and arguments.label is None:
        raise UsageError("--label is missing: which class are these files of?")
    config, manifest, collection = _opened(arguments)
    task = manifest.task
    if arguments.data is None:
        samples = from_files(arguments.files, task.input, compact=True)
    else:
        own, names = arguments.label is None, task.class_names
        samples = load_data(arguments.data, task.input, names, compact=True, labelled=own, own_classes=own)
    if arguments.label is not None:
        samples = labelled(samples, arguments.label)
    added = collection.add(samples, config.data.budget)
    content = {"added": added.added, "known": added.known, "dropped": added.dropped}
    dropped = f", {added.dropped} older ones dropped: at most {config.data.budget} are kept" if added.dropped else ""
    known = f", {added.known} were there already" if added.known else ""
    return _refitted(arguments, config, content, [("samples", f"{added.added} added{known}{dropped}")])


def add_classes_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent classes``."""
    _add_where(parser)
    parser.add_argument("action", choices=("list", "rename", "merge", "remove"), help="what to do")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rename OLD NEW; merge A B ... INTO; remove NAME ...")


def classes(arguments: argparse.Namespace) -> int:
    """List the classes of this device, or rename, merge or remove some, and fit the head again.

    The state of a class is trained (the head knows it), collected (it has samples that the head has not seen) or empty.
    Changes hold for all samples of the device, those of its agent's data source included, and also for later ones. The
    order of the other classes stays. The head before stays: 'edge-agent rollback --head' returns to it.

    Example:
      edge-agent classes --state /var/lib/headwater-agent merge scarf shawl scarf
    """
    from ..heads.saved import class_names

    names, action = arguments.names, arguments.action
    if not {"list": len(names) == 0, "rename": len(names) == 2, "merge": len(names) > 2, "remove": len(names) > 0}[
        action
    ]:
        raise UsageError(
            f"classes {action} {' '.join(names)}: expected list, rename OLD NEW, merge A B INTO or remove NAME"
        )
    config, manifest, collection = _opened(arguments)
    if action == "list":
        content = _states(config, collection, manifest)
        rows = [(row["class"], row["train"], row["held_out"], row["state"]) for row in content["classes"]]
        return output.result(
            arguments, content, lambda: output.table(("class", "added to train", "held out", "state"), rows)
        )
    known = [*manifest.task.class_names, *class_names(config.state / "head")]
    if action == "rename":
        collection.rename(names[0], names[1], known)
    elif action == "merge":
        collection.merge(names[:-1], names[-1], known)
    else:
        collection.remove(names, known)
    done = {"rename": "renamed", "merge": "merged", "remove": "removed"}[action]
    return _refitted(arguments, config, {done: names}, [(done, ", ".join(names))])


def _add_where(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--state", type=Path, metavar="DIR", help="state folder of a device that learns from added samples alone"
    )
    where.add_argument(
        "--config", type=Path, default=Path("agent.toml"), help="the agent's TOML file (default: agent.toml)"
    )


def _opened(arguments: argparse.Namespace) -> tuple[AgentConfig, Manifest, Collection]:
    """Configuration, bundle and collection of this device.

    Raises:
        StateError: no bundle is in use.
    """
    from ..agent.head_tier import collection_of
    from ..bundle import current_manifest

    if arguments.state is None and not arguments.config.exists():
        raise UsageError(
            f"{arguments.config}: it is not there; name the agent's file (--config FILE), or, without one, a state "
            "folder (--state DIR), into which 'edge-agent import' has put a bundle"
        )
    config = load(AgentConfig, arguments.config) if arguments.state is None else _alone(arguments.state)
    manifest = current_manifest(config.state / "bundles") if config.state.is_dir() else None
    if manifest is None:
        raise StateError(f"{config.state}: no bundle is in use; install one first with 'edge-agent import'")
    check_writable(config.state)
    return config, manifest, collection_of(config)


def _alone(state: Path) -> AgentConfig:
    """Configuration of a device whose only samples are the added ones."""
    folder = (state / "samples").absolute()
    return AgentConfig(
        id="device", state=state, data=DataConfig(source=f"collected:{folder}"), head=HeadConfig(own_classes=True)
    )


def _refitted(
    arguments: argparse.Namespace, config: AgentConfig, content: dict[str, Any], rows: Sequence[tuple[str, object]]
) -> int:
    """Fit the head again where no agent does, and print what was done."""
    from ..agent.head_tier import refit_current

    why = _why_not_here(arguments, config)
    if not why:
        try:
            with folder_lock(config.state, "edge-agent add"):
                refit_current(config)
        except StateError as error:
            if "is in use by" not in str(error):
                raise
            why = "the agent of this device is running and fits it"
    metrics = (read_json(config.state / "head" / "head.json") or {}).get("metrics", {}) if not why else {}
    content = {**content, "refitted": not why, "not_refitted": why or None, "metrics": metrics or None}
    shown = [*rows, ("head", why and f"not fitted here: {why}")] if why else [*rows, ("head", "fitted again")]
    if metrics:
        count = f"{metrics.get('n_train')} samples to fit, {metrics.get('n_test')} held out"
        shown += [("acc.personal", output.percent(metrics.get("acc.personal"))), ("learned from", count)]
    return output.result(arguments, content, lambda: output.pairs(shown))


def _why_not_here(arguments: argparse.Namespace, config: AgentConfig) -> str:
    """Why the head is not to be fitted from the added samples alone; empty where it may."""
    from ..agent.head_tier import collection_of

    metrics = (read_json(config.state / "head" / "head.json") or {}).get("metrics", {})
    learned = sum(int(metrics.get(name) or 0) for name in ("n_train", "n_test"))
    if arguments.state is None or learned == int(metrics.get("n_collected") or 0):
        return ""
    have = len(collection_of(config).index().samples)
    return f"it was fitted on {learned} samples of the agent's data source, and {have} are here; give --config"


def _states(config: AgentConfig, collection: Collection, manifest: Manifest) -> dict[str, Any]:
    """The classes with their numbers of added samples and their states, in the order of the head."""
    from ..heads import saved

    index, trained, names = collection.index(), set[str](), list[str]()
    try:
        head = saved.load(config.state / "head", {k: v.fingerprint for k, v in manifest.variants.items()})
        names = list(head.class_names)
        arrays = head.head.arrays
        trained = {names[label] for label in arrays["only_class" if "only_class" in arrays else "classes"].tolist()}
    except HeadwaterError:  # no head yet, or one of another bundle
        names = []
    rows = []
    for name in dict.fromkeys([*names, *index.classes]):
        counts = [sum(e.label == name and e.held_out is held for e in index.samples) for held in (False, True)]
        state = "trained" if name in trained else "collected" if sum(counts) else "empty"
        if (now := index.name_of(name)) != name:
            state = f"{state}; {'removed' if now is None else f'renamed to {now}'} with the next fit"
        rows.append({"class": name, "train": counts[0], "held_out": counts[1], "state": state})
    return {"classes": rows, "samples": len(index.samples), "fitted": index.version == index.fitted}
