"""Commands about the samples that a person labels on this device, one by one, and their classes: add and classes."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import formats
from ..core.config import AgentConfig, load
from ..core.errors import HeadwaterError, StateError, UsageError
from ..core.locks import folder_lock
from ..core.storage import check_writable, read_json
from . import output
from .where import config_of_folder, named

if TYPE_CHECKING:
    from ..agent.head_tier import Refitted
    from ..bundle.manifest import Manifest
    from ..data.collected import Collection


SHOWN_REASONS = 5
"""Samples that are left out are named with their reasons, up to so many."""

FEW_SAMPLES = 20
"""Of a class with fewer samples to fit its owner is told when the head has become worse."""


def add_add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent add``."""
    _add_where(parser)
    parser.add_argument("--label", metavar="NAME", help="class of the samples, in place of the labels of --data")
    parser.add_argument("--data", metavar="SOURCE", help="data source, as for 'edge-agent fit'")
    parser.add_argument(
        "--strict", action="store_true", help="refuse data of which something cannot be used, instead of leaving it out"
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="images, or recordings (*.npy, *.csv)")


def add(arguments: argparse.Namespace) -> int:
    """Add labelled samples to those of this device, and fit its head again with them.

    The class may be new: the head then knows it behind the others, whose order stays. Every fourth sample of a class is
    held out for evaluation. At most data.budget samples (2000) are kept: beyond, the oldest one of the class with most
    samples is dropped. While the device's agent runs, that fits the head in the background; otherwise it is done at
    once, from features that are stored. The head before stays: 'edge-agent rollback --head' returns to it. Where the
    new head answers fewer of the known classes' held-out samples, a warning says so.

    The heads that are compared are those of 'edge-agent fit'; its figures differ, because it holds out a random quarter
    of the samples, and this every fourth one of a class.

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
        samples = from_files(arguments.files, task.input, strict=arguments.strict, compact=True)
    else:
        own = arguments.label is None
        names = task.class_names
        samples = load_data(
            arguments.data, task.input, names, strict=arguments.strict, compact=True, labelled=own, own_classes=own
        )
    left_out = samples.skipped
    if arguments.label is not None:
        samples = labelled(samples, arguments.label)
    added = collection.add(samples, config.data.budget)
    content = {**asdict(added), "renamed": dict(added.renamed), "skipped": [str(item) for item in left_out]}
    count = f"{added.added} added"
    if added.known:
        count += f", {added.known} were there already"
    if added.moved:
        count += f", {added.moved} of them of another class till now"
    if added.dropped:
        count += f", {added.dropped} older ones dropped: at most {config.data.budget} are kept"
    rows = [("samples", count)]
    rows += [("class", f"'{old}' is called '{new}' on this device") for old, new in added.renamed.items()]
    rows += [("left out", str(item)) for item in left_out[:SHOWN_REASONS]]
    if len(left_out) > SHOWN_REASONS:
        rows.append(("left out", f"… and {len(left_out) - SHOWN_REASONS} more"))
    return _refitted(arguments, config, content, rows)


def add_classes_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent classes``."""
    _add_where(parser)
    parser.add_argument("action", choices=("list", "rename", "merge", "remove"), help="what to do")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rename OLD NEW; merge A B ... INTO; remove NAME ...")


def classes(arguments: argparse.Namespace) -> int:
    """List the classes of this device, or rename, merge or remove some, and fit the head again.

    Removing a class removes its added samples for good. The state of a class is trained (the head knows it), collected
    (it has samples that the head has not seen) or empty. The numbers are of added samples: a class that the head
    learned from the agent's data source alone has none.

    Changes hold for all samples of the device, those of its agent's data source included, and also for later ones. The
    order of the other classes stays. The head before stays: 'edge-agent rollback --head' returns to it.

    Example:
      edge-agent classes --state /var/lib/headwater-agent merge scarf shawl scarf
    """
    from ..data.partition import is_collected
    from ..heads.saved import class_names

    names = arguments.names
    action = arguments.action
    takes_names = {"list": len(names) == 0, "rename": len(names) == 2, "merge": len(names) > 2, "remove": bool(names)}
    if not takes_names[action]:
        raise UsageError(
            f"classes {action} {' '.join(names)}: expected list, rename OLD NEW, merge A B INTO or remove NAME"
        )
    config, manifest, collection = _opened(arguments)
    if action == "list":
        listed = _states(config, collection, manifest)
        lines = [(row["class"], row["train"], row["held_out"], row["state"]) for row in listed["classes"]]
        return output.result(
            arguments, listed, lambda: output.table(("class", "added to train", "held out", "state"), lines)
        )
    known = [*manifest.task.class_names, *class_names(config.state / "head")]
    merged = [name for name in names[:-1] if name != names[-1]]
    changed = {"rename": names[:1], "merge": merged, "remove": names}[action]
    _check_classes(changed, collection.names(known), _states(config, collection, manifest))
    content: dict[str, Any]
    if action == "rename":
        collection.rename(names[0], names[1], known)
        content = {"renamed": names}
        rows = [("renamed", f"{names[0]} → {names[1]}")]
    elif action == "merge":
        collection.merge(names[:-1], names[-1], known)
        content = {"merged": names}
        rows = [("merged", f"{', '.join(names[:-1])} → {names[-1]}")]
    else:
        held = {entry.label for entry in collection.index().samples}
        if is_collected(config.data) and held and held <= {*names}:
            raise UsageError(
                f"classes remove {' '.join(names)}: no other class has samples, so no head could be fitted; add "
                "samples of another class first"
            )
        removed = collection.remove(names, known)
        content = {"removed": names, "samples_removed": removed}
        rows = [("removed", ", ".join(names))]
        if removed:
            hint = "'edge-agent rollback --head' brings back the head alone"
            rows.append(("samples", f"{removed} removed for good; {hint}"))
    return _refitted(arguments, config, content, rows)


def _check_classes(changed: Sequence[str], names: Sequence[str], listed: dict[str, Any]) -> None:
    """Require that the classes that are to be changed exist.

    Args:
        changed: The names of these classes.
        names: The classes of head, collection and bundle.
        listed: What ``classes list`` shows: those of the bundle alone are not among them.

    Raises:
        UsageError: There is no such class.
    """
    from ..data.base import near

    missing = [f"'{name}'{near(name, names)}" for name in changed if name not in names]
    if missing:
        shown = ", ".join(row["class"] for row in listed["classes"])
        raise UsageError(f"no class {', '.join(missing)}; 'edge-agent classes list' shows {shown or 'none yet'}")


def _add_where(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--state", type=Path, metavar="DIR", help="state folder of a device that learns from added samples alone"
    )
    where.add_argument(
        "--config", type=Path, default=Path("agent.toml"), help="the agent's TOML file (default: agent.toml)"
    )


def _opened(arguments: argparse.Namespace) -> tuple[AgentConfig, Manifest, Collection]:
    """Return configuration, bundle and collection of this device.

    Raises:
        StateError: no bundle is in use.
    """
    from ..agent.head_tier import collection_of
    from ..bundle.installed import current_manifest

    if arguments.state is None and not arguments.config.exists():
        raise UsageError(
            f"{arguments.config}: it is not there; name the agent's file (--config FILE), or, without one, a state "
            "folder (--state DIR); 'edge-agent import starter --state DIR' makes one"
        )
    if arguments.state is None:
        config = load(AgentConfig, arguments.config)
    else:
        _check_state(arguments.state)
        config = config_of_folder(arguments.state)
    manifest = current_manifest(config.state / "bundles") if config.state.is_dir() else None
    if manifest is None:
        raise StateError(f"{config.state}: no bundle is in use; {_how_to_import(named(arguments))}")
    check_writable(config.state)
    return config, manifest, collection_of(config)


def _check_state(state: Path) -> None:
    """Require that there is a device's state folder.

    Raises:
        UsageError: There is none; the message has the command that makes one.
    """
    if not state.exists():
        new = _how_to_import(f" --state {shlex.quote(str(state))}")
        raise UsageError(
            f"{state}: it is not there; expected a device's state folder; check the path, or, for a new one, {new}"
        )


def _how_to_import(device: str) -> str:
    """Return what to do where a device has no bundle.

    Args:
        device: The option that names the device's folder, such as " --state DIR".
    """
    return (
        f"install a bundle: 'edge-agent import BUNDLE{device}'; the BUNDLE 'starter' is the encoder of pictures that "
        "comes with this package"
    )


def _refitted(
    arguments: argparse.Namespace, config: AgentConfig, content: dict[str, Any], rows: Sequence[tuple[str, object]]
) -> int:
    """Fit the head again where no agent does, and print what was done."""
    from ..agent.head_tier import refit

    before = _metrics_of(config)
    # Step 1: fit it, unless the agent does, or only the configuration's data would make the head complete.
    obstacle = _why_not_here(arguments, config)
    refitted: Refitted | None = None
    if not obstacle:
        try:
            with folder_lock(config.state, "edge-agent add"):
                refitted = refit(config, compare=True)
        except StateError as error:
            if not error.holder:
                raise
            obstacle = "the agent of this device is running and fits it"
            if before:
                obstacle += "; the head before answers until then"
    metrics = {} if obstacle else _metrics_of(config)
    content = {**content, "refitted": not obstacle, "not_refitted": obstacle or None, "metrics": metrics or None}
    content["acc.personal_before"] = before.get("acc.personal")
    if obstacle:
        rows = [*rows, ("head", f"not fitted here: {obstacle}")]
        return output.result(arguments, content, lambda: formats.pairs(rows))
    # Step 2: say how good the new head is, beside the one before.
    shown = [
        *rows,
        ("head", _head_text(metrics, before)),
        ("acc.personal", _accuracy_text(metrics, before)),
        ("learned from", f"{metrics.get('n_train')} samples to fit, {metrics.get('n_test') or 0} held out"),
    ]
    notes = []
    if metrics.get("classes") == 1:
        notes.append("note: the head knows one class alone, and answers every input so; add samples of another class")
    by_class: list[str] = []
    if refitted is not None:
        content["per_class"] = [asdict(row) for row in class_rows(refitted)]
        content["warnings"] = [*warnings_about(refitted, named(arguments))]
        by_class = ["", *_class_table(refitted)] if len(content["per_class"]) > 1 else []
        notes += [f"warning: {line}" for line in content["warnings"]]
    if not before and arguments.state is not None:
        state = shlex.quote(str(arguments.state))
        notes.append(f"next: edge-agent predict --bundle {state} FILE ..., or edge-agent serve --state {state}")
    return output.result(arguments, content, lambda: [*formats.pairs(shown), *by_class, *notes])


def _accuracy_text(metrics: dict[str, Any], before: dict[str, Any]) -> str:
    """Return the accuracy on held-out samples with its interval, and that of the head before where there was one."""
    from ..personal.local.validation import interval

    share = metrics.get("acc.personal")
    text = formats.percent(share)
    if share is not None:
        count = int(metrics.get("n_test") or 0)
        low, high = interval(round(share * count), count)
        text += f"  (95 %: {100 * low:.1f} to {100 * high:.1f} %)"
        if metrics.get("one_class"):
            text += f"  ({output.ONE_CLASS})"
    if before:
        samples = f"{before.get('n_test')} held-out samples"
        text += f"; before {formats.percent(before.get('acc.personal'))} of {samples}, which were others in part"
    return text


def _head_text(metrics: dict[str, Any], before: dict[str, Any]) -> str:
    """Return the name of the head, why this kind was chosen, and of which kind the one before was."""
    text = f"{metrics.get('head')}, fitted again"
    if before and before.get("head") != metrics.get("head"):
        text += f"; before it was {before.get('head')}"
    if metrics.get("choice"):
        text += f"; chosen for {metrics['choice']}"
    return text


@dataclass(frozen=True)
class ClassRow:
    """One class after a fit: samples to fit and held out, and how many of these both heads answer right.

    ``right_before`` is None where there was no head before, or none that knows the class.
    """

    name: str
    train: int
    held_out: int
    right: int
    right_before: int | None


def class_rows(refitted: Refitted) -> list[ClassRow]:
    """Return the classes of a head that was fitted again, in its order."""
    known = refitted.before.class_names if refitted.before is not None else ()
    right_before = Counter(itertools.compress(refitted.classes, refitted.right_before.tolist()))
    return [
        ClassRow(one.name, one.train, one.held_out, one.right, right_before[one.name] if one.name in known else None)
        for one in refitted.result.classes
    ]


def warnings_about(refitted: Refitted, agent: str) -> Iterator[str]:
    """Yield what the owner should know of a head that answers less than the one before, with the way back.

    Args:
        refitted: The head, and the one before.
        agent: The option by which the next command names the same device, such as " --state dev"; empty: none.
    """
    from ..personal.local.validation import is_better

    before = int(refitted.right_before.sum())
    now = int(refitted.right_now.sum())
    if refitted.before is None or now >= before:
        return
    noise = "by more than noise"
    if not is_better(refitted.right_before, refitted.right_now):
        noise = "which may be noise"
    yield (
        f"of {len(refitted.classes)} held-out samples of the classes known before, the head before answers {before} "
        f"right and this one {now}, {noise}; 'edge-agent rollback --head{agent}' brings back the head before"
    )
    fewest = min(refitted.result.classes, key=lambda one: one.train)
    if fewest.train < FEW_SAMPLES:
        yield (
            f"class '{fewest.name}' has {fewest.train} samples to fit, the fewest; fewer than {FEW_SAMPLES} make "
            "a head unsure of all classes: add more of it"
        )


def _class_table(refitted: Refitted) -> list[str]:
    rows = [
        (row.name, row.train, row.held_out, row.right, "–" if row.right_before is None else row.right_before)
        for row in class_rows(refitted)
    ]
    return output.table(("class", "to fit", "held out", "right", "right before"), rows)


def _metrics_of(config: AgentConfig) -> dict[str, Any]:
    """Return what was reported of the head in use; nothing where there is none."""
    return dict((read_json(config.state / "head" / "head.json") or {}).get("metrics", {}))


def _why_not_here(arguments: argparse.Namespace, config: AgentConfig) -> str:
    """Return why the head is not to be fitted from the added samples alone; empty where it may."""
    from ..agent.head_tier import why_not_from_added

    if arguments.state is None:
        return ""
    reason = why_not_from_added(config)
    return f"{reason}; give --config" if reason else ""


def _states(config: AgentConfig, collection: Collection, manifest: Manifest) -> dict[str, Any]:
    """Return the classes with their numbers of added samples and their states, in the order of the head."""
    index = collection.index()
    names, trained = _classes_of_head(config, manifest)
    counts = Counter((sample.label, sample.held_out) for sample in index.samples)
    rows = []
    for name in dict.fromkeys([*names, *index.classes]):
        train = counts[name, False]
        held_out = counts[name, True]
        state = "empty"
        if name in trained:
            state = "trained"
        elif train or held_out:
            state = "collected"
        # A change of the classes holds from the next fit on.
        name_then = index.name_of(name)
        if name_then is None:
            state += "; removed with the next fit"
        elif name_then != name:
            state += f"; renamed to {name_then} with the next fit"
        rows.append({"class": name, "train": train, "held_out": held_out, "state": state})
    return {"classes": rows, "samples": len(index.samples), "fitted": index.version == index.fitted}


def _classes_of_head(config: AgentConfig, manifest: Manifest) -> tuple[list[str], set[str]]:
    """Return the names of the head's classes, and those that it can answer; none without a head of this bundle."""
    from ..heads import saved

    fingerprints = {precision: variant.fingerprint for precision, variant in manifest.variants.items()}
    try:
        head = saved.load(config.state / "head", fingerprints)
        arrays = head.head.arrays
        labels = arrays["only_class" if "only_class" in arrays else "classes"].tolist()
        return list(head.class_names), {head.class_names[label] for label in labels}
    except HeadwaterError:
        return [], set()
