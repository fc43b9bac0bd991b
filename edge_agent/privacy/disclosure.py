"""The list of what leaves a device: every field of its messages, and every tensor of its updates by method.

The fields come from the models that the messages are made with, the tensors from the method itself: nothing can be
sent that is not here. A test listens to whole runs and compares.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel

from ..core.task import ImageInput, Task, Tensors
from ..wire.messages.fields import HTTP_BLOBS, HTTP_UPLOADS, Control
from ..wire.messages.up import FromAgent

if TYPE_CHECKING:
    from ..methods.base import Method


@dataclass(frozen=True)
class Item:
    """One value that leaves a device.

    Attributes:
        where: The message or channel that it is in.
        name: Its name there; it ends in ``.*`` where it stands for several names.
        meaning: What the value is.
        setting: The key of the agent's file that withholds or changes it; empty where none does.
    """

    where: str
    name: str
    meaning: str
    setting: str = ""


FACTS = {
    "rss_mb": "memory of the agent's process, MB",
    "torch_loaded": "whether torch is in memory",
    "cores": "number of processor cores",
    HTTP_BLOBS: "whether the device fetches blobs by HTTP",
    HTTP_UPLOADS: "whether the device can send updates by HTTP",
    "inputs_since": "seconds since 1970 at which the inputs of the device's server changed; 0: they are as fitted",
}
"""The meaning of each entry in ``facts`` of a hello."""

EVERY = "every message"
"""The `Item.where` of fields that all messages have."""

BESIDE = (
    Item("broker", "client id", "the agent's id and a random part", "id"),
    Item("broker", "user, password or certificate", "as configured for the broker", "broker"),
    Item("topic", "federation and agent", "name of the federation and id of the agent, in every topic", "id"),
    Item("presence", "state, boot, connection", "online or offline, id of the agent's start, number of its connection"),
    Item("chunk", "transfer, index, count, offset", "which part of which update it is"),
    Item("chunk", "data", "bytes of an update: its tensors by name, below"),
    Item(
        "HTTP PUT",
        "content",
        "the same bytes, where the coordinator names a URL for them; the head says SHA-256, size and range",
        "uploads.by_http",
    ),
)
"""The values that leave beside the fields of messages."""

_MEANING = {
    "acc_global": "accuracy of the shared model on held-out samples of this device",
    "acc_local": "accuracy of what this device learns alone, on the same samples",
    "acc_personal": "accuracy of the personal model, on the same samples",
    "chunk_bytes": "size of its chunks",
    "condition": "ok, fault (the last task failed) or stalled (its disk cannot be written)",
    "digest": "SHA-256 of the tensors or the bundle that the message is about",
    "error": "kind of the error",
    "head": "kind of the personal head",
    "message": "the error in words",
    "missing": "chunks that have yet to arrive",
    "ranges": "chunks that have yet to arrive",
    "metrics": "figures of training and evaluation that the method logs, such as loss and acc.personal",
    "purpose": "what the agent was asked to do",
    "round": "number of the round",
    "rss_mb": FACTS["rss_mb"],
    "run": "id of the run",
    "samples": "number of training samples",
    "size_bytes": "size of the update",
    "software": "version of Headwater",
    "tier": "whether the device trains encoders, or fits heads",
    "torch_loaded": FACTS["torch_loaded"],
    "type": "kind of the message",
    "v": "version of the protocol",
}
"""The meaning of fields that mean the same in all messages, where the message's model does not say it."""

_SETTINGS = {
    "samples": "privacy.samples",
    "support": "privacy.samples",
    "metrics": "privacy.metrics",
    **dict.fromkeys(("acc_global", "acc_local", "acc_personal", "better_alone", "local_model"), "privacy.metrics"),
    "one_class": "privacy.metrics",
    "inputs_since": "privacy.inputs_since",
    HTTP_BLOBS: "downloads.by_http",
    HTTP_UPLOADS: "uploads.by_http",
}
"""The key of the agent's file that withholds or rounds each field."""


def messages() -> Iterator[Item]:
    """Yield every field of every message that an agent sends, common ones first; nested ones are as ``blob.digest``."""
    yield from _fields(Control, EVERY)
    yield Item(EVERY, "crc", "checksum of the message")
    for kind in get_args(FromAgent):
        fields = _fields(kind, kind.model_fields["type"].default)
        yield from (item for item in fields if item.name not in Control.model_fields)


def _fields(model: type[BaseModel], where: str, path: str = "") -> Iterator[Item]:
    """Yield the fields of a message's model, and those of models in it; ``path`` is the prefix of their names."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, where, f"{path}{name}.")
        elif name == "facts":
            for fact, meaning in FACTS.items():
                yield Item(where, f"facts.{fact}", meaning, _SETTINGS.get(fact, ""))
        else:
            full_name = f"{path}{name}"
            if name == "metrics":
                full_name += ".*"
            yield Item(where, full_name, field.description or _MEANING[name], _SETTINGS.get(name, ""))


SECURE_SUM = (
    Item("secure_keys", "secure.keys", "two public keys and the SHA-256 of a random mask, for one round"),
    Item("secure_shares", "secure.shares", "shares of their secrets, each encrypted for another device"),
    Item(
        "train", "secure.masked", "the tensors of the method times the sample count, and this count, under random masks"
    ),
    Item("secure_unmask", "secure.revealed", "shares of others' secrets, which take the masks off the sum alone"),
)
"""The values that leave in a secure sum, in place of the tensors of a round."""

_LEAST = "privacy.min_class_count"
_NORM = {
    "global": "",
    "local_stats": ", without running statistics of batch norm",
    "local_all": ", without batch norm",
}


def _small_task() -> Task:
    return Task(
        input=ImageInput(channels=1, height=8, width=8),
        class_names=("a", "b", "c"),
        encoder="small_cnn",
        encoder_params={"feature_dim": 7, "width": 2},
    )


@dataclass(frozen=True)
class Example:
    """One round of a method on a small model, to ask a policy about.

    Attributes:
        received: The shared tensors that a client receives.
        update: An update without a change, with zeros for what it carries beside the model.
        model_shapes: Shape of each tensor of the model, by name.
        features: Number of the encoder's features.
        classes: Number of classes.
    """

    received: Tensors
    update: Tensors
    model_shapes: dict[str, tuple[int, ...]]
    features: int
    classes: int


def example(method: Method) -> Example:
    """Make the example of a method; needs torch."""
    from ..training.parts import to_arrays

    task = _small_task()
    model = method.build(task)
    shared = to_arrays(model, method.shared_names(model))
    returned = {name: shared[name] for name in method.returned_names(model)}
    return Example(
        received=shared,
        update={**returned, **method.sends(model, task)},
        model_shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        features=int(task.encoder_params["feature_dim"]),
        classes=task.num_classes,
    )


def tensors(method: Method) -> Iterator[Item]:
    """Yield the tensors of an update of a round, and those that are asked for once after the rounds; needs torch.

    ``NAME.*`` are the layers of a part of the model; what they are called depends on the encoder. Shapes are written
    with K classes and d features.
    """
    from ..training.parts import norm_names

    task = _small_task()
    sizes = {3: "K", 7: "d", 7 * 8 // 2: "d (d + 1) / 2"}
    model = method.build(task)
    names = method.returned_names(model)
    least = method.least_class_count

    def item(name: str, meaning: str) -> Item:
        if least is None or "encoder" in name or "head." in name:
            return Item("train", name, meaning)
        return Item("train", name, f"{meaning}; classes of fewer than {least} samples are left out", _LEAST)

    for part in sorted({name.partition(".")[0] for name in names}):
        yield item(f"{part}.*", f"{part} after local training{_NORM[method.norm]}")
    listed = dict[str, str]()
    for name, array in sorted(method.sends(model, task).items()):
        for shared in names:
            if name.endswith(f".{shared}"):
                listed[f"{name.removesuffix(shared)}*"] = "one array for each tensor of the model that travels"
                break
        else:
            listed[name] = f"{array.dtype} [{', '.join(sizes.get(size, str(size)) for size in array.shape)}]"
    yield from (item(name, meaning) for name, meaning in listed.items())
    if "encoder" in method.shared:
        if norm_names(model, method.shared_names(model)):
            meaning = "batch norm of the encoder, which otherwise stays here, once after the last round"
            yield Item("batch_norm_stats", "encoder.*", meaning, "privacy.batch_norm_stats")
        meaning = "smallest and largest activation of each step of the encoder on own samples, where it is asked for"
        yield Item("activation_ranges", "ranges", meaning, "privacy.activation_ranges")


HEADINGS = {
    "source": "Source",
    "travels": "Travels",
    "stays": "Stays",
    "server": "Server",
    "differs": "Differs from the paper",
}
"""The headings of sections in the docstrings of methods, by key."""


def section(doc: str, heading: str) -> str:
    """Return the text behind ``heading:`` in a method's docstring, up to the next heading."""
    lines: list[str] = []
    is_inside = False
    for line in doc.splitlines():
        text = line
        begun = next((title for title in HEADINGS.values() if line.startswith(f"{title}:")), None)
        if begun is not None:
            is_inside = begun == heading
            text = line.partition(":")[2]
        if is_inside:
            lines.append(text.strip())
    return " ".join(lines).strip()


def travels(name: str) -> str:
    """Return what travels by the docstring of a method that ships; its file is read, not imported, so without torch."""
    spec = find_spec(f"edge_agent.methods.{name}")
    if spec is None or spec.origin is None:
        return ""
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return section(doc, HEADINGS["travels"])
