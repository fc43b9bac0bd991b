"""``edge-agent privacy``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import methods
from ..core import formats
from ..core.config import AgentConfig, PrivacyConfig, load, own_methods
from ..core.errors import PrivacyRefused, UnknownName
from ..core.registry import PinnedFile, own_name
from ..privacy.disclosure import BESIDE, SECURE_SUM, Item, example, messages, tensors, travels
from ..privacy.policy import UpdateFacts, allows_metric, check_policy, check_update, objections, spent
from ..wire.messages.fields import OUTSIDE_ROUNDS
from . import output

if TYPE_CHECKING:
    from ..core.task import Tensors
    from ..methods.base import Method


def add_privacy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``edge-agent privacy``."""
    parser.add_argument("--config", type=Path, default=Path("agent.toml"), help="TOML file (default: agent.toml)")
    parser.add_argument("--method", help="also list what this method sends; 'headwater methods' lists all")


def privacy(arguments: argparse.Namespace) -> int:
    """List everything that may leave this device under its configuration: fields of messages, and tensors by method.

    The list is made from the models of the messages and from the method, not written by hand. What [privacy] in the
    configuration withholds or rounds is marked. Tensors of a method are listed where torch is installed; elsewhere
    the method's own words say what travels.

    Example:
      edge-agent privacy --config agent.toml --method fedpac
    """
    config = load(AgentConfig, arguments.config)
    known = (*methods.names(), *own_methods(config.training))
    if arguments.method is not None and arguments.method not in known:
        raise UnknownName("method", arguments.method, known)
    fields = [*BESIDE, *messages()]
    content: dict[str, Any] = {
        "policy": config.privacy.model_dump(mode="json"),
        "note": check_policy(config.privacy, own_methods(config.training)) or None,
        "fields": [{**asdict(item), "state": state(config, item)} for item in fields],
        "spent": spent(config),
        "method": None,
        "secure_sum": [{**asdict(item), "state": "leaves"} for item in SECURE_SUM],
    }
    if arguments.method is not None:
        content["method"] = of_method(config, arguments.method)
    return output.result(arguments, content, lambda: lines(content))


def state(config: AgentConfig, item: Item) -> str:
    """Return whether something leaves the device under this configuration, and how.

    One of ``leaves``, ``rounded``, ``clipped``, ``with noise``, ``withheld``, ``without noise`` (it would leave without
    noise, so it is withheld) and ``as named`` (those metrics that the configuration names).
    """
    policy = config.privacy
    if item.where == "train" and policy.wants_noise:
        return "with noise" if policy.noise else "clipped"
    if item.where in OUTSIDE_ROUNDS:
        return _state_outside_rounds(policy, item)
    if item.setting == "privacy.metrics":
        return _state_of_metrics(policy, item)
    if item.setting == "privacy.samples" and policy.samples == "rounded":
        return "rounded"
    return "leaves"


def _state_outside_rounds(policy: PrivacyConfig, item: Item) -> str:
    """Return the state of what is sent outside the rounds, where the policy has a switch for it."""
    is_allowed = getattr(policy, item.where)
    if not is_allowed:
        return "withheld"
    return "without noise" if policy.wants_noise else "leaves"


def _state_of_metrics(policy: PrivacyConfig, item: Item) -> str:
    """Return the state of a metric, or of the metrics that begin with a name (``acc.*``)."""
    if not item.name.endswith(".*"):
        return "leaves" if allows_metric(policy, item.name.replace("acc_", "acc.")) else "withheld"
    if "*" in policy.metrics:
        return "leaves"
    return "as named" if policy.metrics else "withheld"


def of_method(config: AgentConfig, name: str) -> dict[str, Any]:
    """Return what a method sends, in its words and, where torch is installed, by tensor; and why it is refused."""
    try:
        method = methods.create(_reference_of(config, name))
        refused = refusal(config, method)
        listed = [{**asdict(item), "state": state(config, item)} for item in tensors(method)]
    except ModuleNotFoundError:
        refused = "; ".join(objections(config.privacy, name, None))
        listed = None
    content = {"name": name, "allowed": not refused, "refused": refused or None}
    return {**content, "travels": travels(name), "tensors": listed}


def _reference_of(config: AgentConfig, name: str) -> str:
    """Return what the method is created by: its name, or its file where the configuration names that."""
    for reference in config.training.methods:
        if own_name(reference.rpartition(":")[2]) == name:
            return str(PinnedFile.of("method", reference, config.training.folder))
    return name


def refusal(config: AgentConfig, method: Method) -> str:
    """Return why this device refuses updates of a method with these parameters, as the agent says it; empty: allowed.

    A run may ask for more noise, and for clipping, which does not depend on its size.
    """
    from ..privacy.noise import objection

    policy = config.privacy
    reasons = objections(policy, method.name, method.least_class_count)
    if reasons:
        return "; ".join(reasons)
    try:
        check_update(policy, *_example_of(method))
    except PrivacyRefused as error:
        return str(error)
    return objection(method) if policy.wants_noise else ""


def _example_of(method: Method) -> tuple[Tensors, UpdateFacts]:
    """Return an update of the method on a small model of a device without samples, and what it is judged by."""
    import numpy as np

    made = example(method)
    facts = UpdateFacts(
        method=method.name,
        is_shipped=methods.registry.is_shipped(method.name),
        declared_least=method.least_class_count,
        shared=frozenset(made.received),
        model_shapes=made.model_shapes,
        features=made.features,
        class_counts=np.zeros(made.classes, np.int64),
    )
    return made.update, facts


def lines(content: dict[str, Any]) -> Iterator[str]:
    """Yield the list as text."""
    yield "[privacy] of this device"
    policy = {**content["policy"], "methods": _names(content["policy"]["methods"])}
    yield from (f"  {line}" for line in formats.pairs(policy.items()))
    yield from (f"  note: {note}" for note in filter(None, [content["note"]]))
    if content["spent"] is not None:
        yield "spent by its updates so far"
        yield from (f"  {line}" for line in formats.pairs(content["spent"].items()))
    yield ""
    yield from _listed("what leaves in messages", content["fields"])
    if (method := content["method"]) is not None:
        verdict = f"refused: {method['refused']}" if method["refused"] else "allowed"
        yield ""
        yield f"method {method['name']} ({verdict}) travels: {method['travels'] or 'its file does not say'}"
        if method["tensors"] is None:
            yield "torch is not installed here; on a device with it this lists every tensor, and what [privacy] refuses"
        else:
            yield from _listed("tensors of its updates", method["tensors"])
            yield from _listed("in a secure sum, in place of what leaves in jobs 'train'", content["secure_sum"])


_MARKS = {
    "clipped": "clipped: privacy.clip",
    "with noise": "with noise: privacy.noise",
    "without noise": "withheld: it would be without the noise or clipping of [privacy]",
}


def _names(names: list[str] | None) -> str:
    return "all" if names is None else ", ".join(names) or "none"


def _listed(title: str, items: list[dict[str, Any]]) -> Iterator[str]:
    yield title
    before = ""
    for item in items:
        if item["where"] != before:
            before = item["where"]
            yield f"  {before}"
        said = _MARKS.get(item["state"], f"{item['state']}: {item['setting']}")
        mark = "" if item["state"] == "leaves" else f" [{said}]"
        yield f"    {item['name']}{mark}: {item['meaning']}"
