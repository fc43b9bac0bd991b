"""Reference pages beside the code that they describe, made from docstrings and models, and the list of methods.

``python tests/harness/reference.py`` writes them; tests/policy/test_reference.py compares.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coordinator import compare, simulate
from coordinator.cli import COMMANDS as HEADWATER
from coordinator.cli import command_tree
from coordinator.cli.methods import LISTED, describe, marked_heads
from coordinator.config import CoordinatorConfig
from coordinator.research.compare.settings import OF_RUNNING, OF_THE_COMPARISON
from coordinator.simulation.plan import Plan
from edge_agent import data, heads
from edge_agent import methods as method_registry
from edge_agent.cli import COMMANDS as EDGE_AGENT
from edge_agent.cli import _parser as edge_agent_parser
from edge_agent.core.config import AgentConfig
from edge_agent.heads import numeric
from edge_agent.privacy.disclosure import BESIDE, SECURE_SUM, Item, messages, tensors, travels
from edge_agent.relay.settings import RelayConfig
from edge_agent.wire.broker_kinds import KINDS
from edge_agent.wire.messages import down, up
from edge_agent.wire.messages.fields import OLDEST_PROTOCOL, PROTOCOL, Command, Control
from edge_agent.wire.topics import Topics

ROOT = Path(__file__).parents[2]
WIDTH = 120
MADE = "<!-- Generated: python tests/harness/reference.py -->"


def pages() -> dict[Path, str]:
    """Text of every page by its path in the project."""
    # As 'headwater methods --json' has them, without a process that would import torch and all methods again.
    methods = json.loads(json.dumps([describe(name) for name in method_registry.names()]))
    shown = ("name", "travels", "stays", "server", "paper", "heads")
    listed = {
        method["name"]: {
            **{key: method[key] for key in shown},
            "exactness": {head: [grade] for head, (grade, _) in method["exactness"].items()},
        }
        for method in methods
    }
    return {
        Path("coordinator/cli") / LISTED: json.dumps(listed, indent=1, ensure_ascii=False) + "\n",
        Path("coordinator/simulation/settings.py"): settings_module(),
        Path("coordinator/research/compare/shared_settings.py"): shared_settings_module(),
        Path("edge_agent/methods/README.md"): methods_page(methods),
        Path("edge_agent/heads/README.md"): heads_page(),
        Path("edge_agent/data/README.md"): data_page(),
        Path("configs/README.md"): config_page(),
        Path("configs/brokers/README.md"): brokers_page(),
        Path("edge_agent/WHAT_LEAVES.md"): disclosure_page(),
        Path("examples/guides/commands.md"): commands_page(),
        Path("examples/guides/protocol.md"): protocol_page(),
    }


SETTINGS_IMPORTS = """from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict"""

SIMULATE = "coordinator.simulate"
COMPARE = "coordinator.compare"


def settings_module() -> str:
    """The fields of a plan that `coordinator.simulate` takes as further keywords, typed."""
    shared = further_settings(SIMULATE) & further_settings(COMPARE)
    return "\n\n".join(
        [
            settings_head("The further settings of `coordinator.simulate`", SETTINGS_IMPORTS),
            settings_class(
                "PlanSettings", "TypedDict", "Settings of simulations that comparisons take as well", shared
            ),
            settings_class(
                "Settings", "PlanSettings", "All further settings of a simulation", further_settings(SIMULATE) - shared
            ),
        ]
    )


def shared_settings_module() -> str:
    """The fields of a plan that `coordinator.compare` and `coordinator.sweep` take as further keywords, typed."""
    return "\n\n".join(
        [
            settings_head(
                "The further settings of `coordinator.compare` and `coordinator.sweep`",
                "from ...simulation.settings import PlanSettings",
            ),
            settings_class(
                "SharedSettings",
                "PlanSettings",
                "All further settings of a comparison",
                further_settings(COMPARE) - further_settings(SIMULATE),
            ),
        ]
    )


def further_settings(call: str) -> set[str]:
    """The fields of a plan that are neither arguments of a function nor set by it."""
    reserved = {"folder", *inspect.signature(simulate).parameters}
    if call == COMPARE:
        reserved = {"folder", *inspect.signature(compare).parameters, *OF_THE_COMPARISON, *OF_RUNNING}
    return Plan.model_fields.keys() - reserved


def settings_head(title: str, last_import: str) -> str:
    """The beginning of a module of typed settings."""
    lines = [
        f'"""{title}, as type checkers and editors see them.',
        "",
        "Made from the fields of `Plan` by tests/harness/reference.py; change them there.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        last_import,
    ]
    return "\n".join(lines) + "\n"


def settings_class(name: str, base: str, meaning: str, fields: Collection[str]) -> str:
    """A typed dictionary of fields of a plan, in the order of the plan."""
    lines = [
        f"class {name}({base}, total=False):",
        f'    """{meaning}; `Plan` has their limits, and says which go together."""',
    ]
    for field_name, field in Plan.model_fields.items():
        if field_name in fields:
            text = textwrap.fill(f'"""{field.description}."""', WIDTH - 4, break_long_words=False)
            lines += ["", f"    {field_name}: {type_as_code(field.annotation)}", textwrap.indent(text, "    ")]
    return "\n".join(lines) + "\n"


def type_as_code(annotation: Any) -> str:
    """The annotation of an argument that a field of this type is read from, as Python code."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_as_code(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(json.dumps(value) for value in arguments)}]"
    if origin is dict:
        return "Mapping[str, Any]"
    if origin is tuple:
        return f"tuple[{', '.join('...' if part is Ellipsis else type_as_code(part) for part in arguments)}]"
    if origin in {typing.Union, types.UnionType}:
        return " | ".join(type_as_code(part) for part in arguments)
    if annotation is Path:
        return "str | Path"
    return "None" if annotation is type(None) else str(annotation.__name__)


def methods_page(methods: list[dict[str, Any]]) -> str:
    """All methods: a table to choose from, then what travels, what stays and what the server does."""
    rows = [(f"[`{m['name']}`](#{m['name']})", m["summary"], marked_heads(m), m["paper"]) for m in methods]
    parts = [
        "# Methods",
        MADE,
        (
            "Each method is one file here, client part and server part together; the file name is the method's name. "
            "`headwater methods NAME` shows its parameters, their published values and where it differs from its paper."
        ),
        (
            "Device heads are those that a device without torch fits on the frozen encoder. `=`: equals the personal "
            "part that the method trains itself, on the same features (tested). `≈`: the same form, "
            "with another start or other steps, or without training the encoder along. `~`: an approximation. "
            "`headwater methods NAME` gives the reason for each."
        ),
        (
            "What travels of batch norm is each paper's choice; `--set norm=local_stats` (or `global`, `local_all`) "
            "changes it, except in `pfedhn`, which cannot generate statistics."
        ),
        table(("method", "in one sentence", "device heads", "source"), rows),
    ]
    for method in methods:
        parts.append(f"## {method['name']}")
        names = {"travels": "Travels", "stays": "Stays on the device", "server": "Server step", "source": "Source"}
        parts.append("\n".join(bullet(f"**{title}:** {method[key]}") for key, title in names.items() if method[key]))
    return joined(parts)


def heads_page() -> str:
    """All heads for devices without torch, with their parameters."""
    parts = [
        "# Heads",
        MADE,
        (
            "A head is fitted on the features of the frozen encoder, on the device, without torch. Each is one file; "
            "the file name is the name of the head. Parameters go into `head.params` of an agent's configuration or "
            "`edge-agent fit --param name=value`."
        ),
    ]
    for name in heads.names():
        kind = heads.get(name)
        parts += [f"## {name}", described(sys.modules[kind.__module__].__doc__), table_of_fields(kind.Params)]
    parts += ["# Numeric heads", described(sys.modules[numeric.__name__].__doc__)]
    for name in numeric.names():
        kind = numeric.get(name)
        parts += [f"## {name}", described(sys.modules[kind.__module__].__doc__), table_of_fields(kind.Params)]
    return joined(parts)


def data_page() -> str:
    """All kinds of data sources with their options, as their files describe them."""
    parts = [
        "# Data sources",
        MADE,
        (
            "A source is `kind:where?option=value&option=value`, the same on devices (`data.source`), for the offline "
            "commands (`--data`) and in simulations. Each kind is one file here or in `sets/`. Nothing is downloaded."
        ),
    ]
    for kind in data.registry.names():
        member = data.registry.load(kind)
        doc = (member if inspect.ismodule(member) else inspect.getmodule(member.read)).__doc__
        parts += [f"## {kind}", described(doc)]
    return joined(parts)


def brokers_page() -> str:
    """The brokers that are known, with their limits and configurations."""
    parts = [
        "# Brokers",
        MADE,
        (
            "Any broker of MQTT 3.1.1 will do. A federation uses clean sessions, QoS 0 and 1, wills and messages of "
            "120 KiB at most; no retained messages and no shared subscriptions. It has receipts of its own, so nothing "
            "that a broker stores is needed after its restart. Each file below is tested with the real broker; "
            "'headwater doctor --config FILE' says which broker it finds."
        ),
    ]
    for kind in KINDS:
        parts.append(f"## {kind.name}")
        parts.append("\n".join(bullet(f"{limit[0].upper()}{limit[1:]}.") for limit in kind.limits))
        links = [f"[{Path(name).name}]({_from_brokers(name)})" for name in kind.configurations]
        if links:
            parts.append("Configuration:\n" + "\n".join(f"- {link}" for link in links))
    parts.append("Next: [several brokers in a list](../../examples/guides/own-broker.md#several-brokers).")
    return joined(parts)


def _from_brokers(name: str) -> str:
    """The way from the folder of brokers to a file of ``configs``."""
    path = Path(name)
    return path.name if path.parent.name == "brokers" else f"../{path}"


def config_page() -> str:
    """Every key of the configuration files."""
    return joined(
        [
            "# Configuration",
            MADE,
            (
                "TOML files for both programs, and for the relay of a site. Relative "
                "paths in a file count from its folder. Unknown keys "
                "and impossible values are reported all at once, with the nearest known name."
            ),
            "## Agent: `edge-agent run --config agent.toml`",
            *sections(AgentConfig),
            "## Relay: `edge-agent relay --config relay.toml`",
            *sections(RelayConfig),
            "## Coordinator: `headwater serve --config coordinator.toml`",
            *sections(CoordinatorConfig),
        ]
    )


def disclosure_page() -> str:
    """What leaves a device: fields of its messages, and tensors by method."""
    parts = [
        "# What leaves a device",
        MADE,
        (
            "Everything that an agent sends, made from the models of its messages and from the methods. A test "
            "listens to whole runs and finds nothing else. Samples, names of files and folders, own classes, personal "
            "layers and personal heads are not in it. `edge-agent privacy --config agent.toml --method NAME` prints "
            "the list as the device's own `[privacy]` ([all keys](../configs/README.md)) leaves it."
        ),
        "## In messages",
        table(("message or channel", "name", "what it is", "setting"), map(item_row, (*BESIDE, *messages()))),
        "## In updates of a secure sum",
        (
            "This leaves in place of what jobs `train` send otherwise, where a run has `privacy.secure_sum = true`; "
            'with `privacy.secure_sum = "required"` the device insists on it.'
        ),
        table(("job", "tensors", "what it is", "setting"), map(item_row, SECURE_SUM)),
        "## In updates, by method",
    ]
    for name in method_registry.names():
        parts += [f"### {name}", travels(name).replace("``", "`")]
        rows = [item_row(item) for item in tensors(method_registry.create(name))]
        parts.append(table(("job", "tensors", "what it is", "setting"), rows) if rows else "No tensor leaves.")
    return joined(parts)


def commands_page() -> str:
    """Every command of both programs with its options."""
    parts = [
        "# Commands",
        MADE,
        (
            "Every command has `--help` with an example. `--json` prints one JSON object on stdout. "
            "[Exit codes](../../edge_agent/README.md#exit-codes), [keys of the configuration](../../configs/README.md)."
        ),
        "## headwater",
    ]
    for name, summary in HEADWATER.items():
        command = typer.main.get_command(command_tree([name])).commands[name]  # type: ignore[attr-defined]
        members = getattr(command, "commands", None) or {"": command}
        members = {word: member for word, member in members.items() if not member.hidden}  # old names
        parts += [f"### headwater {name}", summary]
        for inner, member in members.items():
            if inner:
                text = " ".join(inspect.cleandoc(member.help or "").partition("\n\n")[0].split())
                parts.append(f"`headwater {name} {inner}`: {text}")
            rows = [("`" + "`, `".join(one.opts) + "`", getattr(one, "help", None) or "") for one in member.params]
            parts.append(table(("option or argument", "meaning"), rows) if rows else "")
    parts.append("## edge-agent")
    for name, (_, _, summary) in EDGE_AGENT.items():
        parser = edge_agent_parser([name])
        group = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
        actions = [one for one in group.choices[name]._actions if not isinstance(one, argparse._HelpAction)]
        rows = [
            ("`" + "`, `".join(one.option_strings or [str(one.metavar or one.dest)]) + "`", meaning(one))
            for one in actions
        ]
        parts += [
            f"### edge-agent {name}",
            f"{summary[0].upper()}{summary[1:]}.",
            table(("option or argument", "meaning"), rows),
        ]
    return joined(parts)


def meaning(action: argparse.Action) -> str:
    """Help of an argument as ``--help`` shows it."""
    return (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))


def protocol_page() -> str:
    """Topics and messages between coordinator and agents."""
    topics = Topics("FEDERATION")
    rows = [
        (topics.announce, "coordinator", "announcements to all agents"),
        (topics.coordinators, "coordinator", "coordinators of one federation detect each other"),
        (topics.down("AGENT"), "coordinator", "control messages to one agent"),
        (topics.down_chunks("AGENT"), "coordinator", "chunks to one agent"),
        (
            topics.broadcast("0123456789abcdef"),
            "coordinator",
            "chunks of one blob to many; the start of its SHA-256",
        ),
        (topics.up("AGENT"), "agent", "control messages"),
        (topics.up_chunks("AGENT"), "agent", "chunks"),
        (topics.up("AGENT", "2-of-4"), "agent", "`update`, where a job names this partition"),
        (topics.up_chunks("AGENT", "2-of-4"), "agent", "chunks of that update"),
        (topics.presence("AGENT"), "agent or broker", "online and offline (retained, and the last will)"),
        (topics.heartbeat("AGENT"), "agent", "heartbeats"),
        (topics.aggregators_down, "coordinator", "messages to aggregators, which agents cannot read"),
        (topics.aggregators_up, "aggregator", "messages to the coordinator"),
        (topics.site_down("RELAY"), "coordinator", "messages to the relay of a site about sums of updates"),
        (topics.site_up("RELAY"), "relay", "messages to the coordinator about sums"),
        (topics.site_chunks("RELAY"), "relay", "chunks of a sum"),
    ]
    every = {**vars(up), **vars(down)}
    kinds = [kind for kind in every.values() if inspect.isclass(kind) and issubclass(kind, Control)]
    kinds = [
        kind
        for kind in kinds
        if "type" in kind.model_fields and kind.model_fields["type"].default is not PydanticUndefined
    ]
    parts = [
        "# Protocol",
        MADE,
        (
            f"Coordinator and agents exchange messages over an MQTT 3.1.1 broker. This is protocol version "
            f"{PROTOCOL}; a peer of a version below {OLDEST_PROTOCOL} or above its own is "
            f"refused with the name of the side to upgrade."
        ),
        (
            "Control messages are JSON objects with a checksum. Models and updates are blobs: files in the format of "
            "safetensors, named by their SHA-256, sent in chunks that the receiver asks for again where they are "
            "missing. A message that does not fit its model is dropped and counted. An agent with a key of "
            "commands obeys "
            "only commands with a proof of its coordinator (["
            "users and brokers](certificates.md#users-and-brokers))."
        ),
        "## Topics",
        table(("topic", "published by", "content"), [(f"`{topic}`", by, text) for topic, by, text in rows]),
        "## Messages",
        "Every message carries `v`, `boot`, `seq`, `federation` and `type`; those of a coordinator also `epoch`.",
        table(
            ("type", "from", "meaning", "fields"),
            [
                (
                    f"`{kind.model_fields['type'].default}`",
                    "coordinator" if issubclass(kind, Command) else "agent",
                    " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`"),
                    ", ".join(f"`{name}`" for name in kind.model_fields if name not in Command.model_fields),
                )
                for kind in kinds
            ],
        ),
        (
            "Next: [every field that leaves a device](../../edge_agent/WHAT_LEAVES.md), or "
            "[the way of one round through the code](../../coordinator/README.md#the-way-of-one-round)."
        ),
    ]
    return joined(parts)


def item_row(item: Item) -> tuple[str, ...]:
    setting = f"`{item.setting}`" if item.setting else ""
    return (item.where, f"`{item.name}`", item.meaning, setting)


def sections(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """A table for the plain keys of ``model``, then one for each of its sections."""
    nested = {name: found for name, field in model.model_fields.items() if (found := models_in(field))}
    if set(nested) != set(model.model_fields):
        if path:
            yield f"### `{path}`"
        yield table_of_fields(model, besides=nested)
    for name, kinds in nested.items():
        field = model.model_fields[name]
        label = f"[[{name}]]" if "tuple" in str(field.annotation) else f"{path.strip('[]')}.{name}".lstrip(".")
        for kind in kinds:
            variant = f" (kind = {kind.model_fields['kind'].default})" if len(kinds) > 1 else ""
            shown = label if label.startswith("[") else f"[{label}]"
            yield from sections(kind, f"{shown}{variant}")


def models_in(field: FieldInfo) -> list[type[BaseModel]]:
    """The models that a field holds: none for a plain value."""

    def inside(annotation: Any) -> Iterator[type[BaseModel]]:
        if inspect.isclass(annotation) and not typing.get_args(annotation) and issubclass(annotation, BaseModel):
            yield annotation
        for part in typing.get_args(annotation):
            yield from inside(part)

    return list(inside(field.annotation))


def table_of_fields(model: type[BaseModel], besides: Iterable[str] = ()) -> str:
    """Key, type, default and meaning of each field."""
    rows = [
        (f"`{name}`", f"`{kind_of(field.annotation)}`".replace("|", "or"), default_of(field), field.description or "")
        for name, field in model.model_fields.items()
        if name not in set(besides)
    ]
    return table(("key", "type", "default", "meaning"), rows)


def kind_of(annotation: Any) -> str:
    """A type as readers of TOML know it."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind_of(args[0])
    if origin is typing.Literal:
        return " | ".join(str(arg) for arg in args)
    if origin in {typing.Union, types.UnionType}:
        return " | ".join(dict.fromkeys(kind_of(arg) for arg in args if arg is not type(None)))
    if origin in {tuple, list}:
        return f"list of {kind_of(args[0])}"
    if origin is dict:
        return "table"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default_of(field: FieldInfo) -> str:
    """The default as TOML would have it; a dash where there is none, bold where a value is required."""
    if field.is_required():
        return "**required**"
    value = field.default  # what a factory makes depends on the machine, or is empty
    if value is None or value is PydanticUndefined or value == ():
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"


def described(doc: str | None) -> str:
    """A module's docstring as Markdown."""
    return inspect.cleandoc(doc or "").replace("``", "`")


def table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [names, tuple("---" for _ in names), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def bullet(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False)


def joined(parts: Iterable[str]) -> str:
    """Paragraphs, wrapped where they are neither heading, table, list nor comment."""
    wrapped = (
        part if part.startswith(("#", "|", "-", "<")) or "\n" in part else textwrap.fill(part, WIDTH) for part in parts
    )
    return "\n\n".join(part for part in wrapped if part) + "\n"


if __name__ == "__main__":
    for place, text in pages().items():
        (ROOT / place).write_text(text, encoding="utf-8")
        print(place)
