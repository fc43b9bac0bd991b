"""Options of the commands: those that several have, and those generated from the fields of a settings model."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from edge_agent.core.errors import UsageError
from edge_agent.core.logs import LogFormat
from edge_agent.core.storage import read_toml

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; default: coordinator.toml in this folder.")
]
State = Annotated[Path | None, typer.Option("--state", help="State folder; default: the one in the configuration.")]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The same as RUN, as earlier versions named it.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; logs go to stderr.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Verbose logging on stderr.")]
Logs = Annotated[LogFormat, typer.Option("--log-format", help="json: one JSON object a line on stderr.")]

INTERRUPTED = 130
"""Exit code after Ctrl-C, and of a command that was stopped before it was done."""

Given = dict[str, Any]
"""Field -> value, of the fields that were given on the command line."""

FLAGS = {
    "method": ("--method", "-m"),
    "params": ("--set", "--param", "--params", "-p"),
    "data": ("--data", "-d"),
    "clients": ("--clients", "-n"),
    "rounds": ("--rounds", "-r"),
    "targets": ("--target", "-t"),
    "encoder_params": ("--encoder-param", "--encoder-params"),
    "evaluate_after": ("--after",),
}
"""Flags of fields that have more than, or another than, their own name."""

Command = TypeVar("Command", bound=Callable[..., None])
T = TypeVar("T")


def from_model(
    model: type[BaseModel],
    fields: Collection[str] | None = None,
    *,
    without: Collection[str] = (),
    help: Mapping[str, str] = MappingProxyType({}),  # noqa: A002 - as typer calls it
    bounds: bool = False,
) -> Callable[[Command], Command]:
    """A decorator that replaces a command's first argument by one option for each of the model's fields.

    The command gets a `Given` there. Names, types, help and defaults are the model's; ``help`` replaces some texts.
    Values are checked by the model, with all its other mistakes, unless ``bounds`` asks for that at once.

    The options have no defaults: what is not given is left to the model, or to a configuration file.
    """
    chosen = {
        name: model.model_fields[name]
        for name in (model.model_fields if fields is None else fields)
        if name not in without
    }
    generated = [_option(name, field, help.get(name), bounds=bounds) for name, field in chosen.items()]

    def decorate(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())

        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            typed = {name: arguments.pop(name) for name in chosen}
            given = {name: value for name, value in typed.items() if not (value is None or value is False)}
            given |= {name: False for name in given if chosen[name].default is True}
            command({name: _value(chosen[name], value) for name, value in given.items() if value != []}, **arguments)

        parameters = [*generated, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own[1:])]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {}
        return called  # type: ignore[return-value]

    return decorate


def flag(field: str) -> str:
    """The flag that a field is usually given by, such as ``--keep-every``."""
    return _flags(field)[0]


def one_of(by_position: T | None, by_option: T | None, name: str) -> T | None:
    """Return the value that was given by position or by an option of the same meaning; None: it was not given.

    Args:
        by_position: The value of the argument.
        by_option: The value of the option.
        name: What both name, such as RUN, for the message.

    Raises:
        UsageError: both were given, and differ.
    """
    if by_position is not None and by_option is not None and by_position != by_option:
        raise UsageError(f"{name} is given twice, as {by_position} and as {by_option}; give one of them")
    return by_option if by_position is None else by_position


def state_path(config: Path | None, state: Path | None) -> Path:
    """The state folder: the one that was given, else that of the configuration.

    Of a configuration that names the folder nothing else is read or checked, so that a look at the state starts fast.

    Raises:
        ConfigError: no folder was given, and the configuration cannot be read.
    """
    if state is not None:
        return state.absolute()
    file = config or Path("coordinator.toml")  # as `load_config`, whose models take long to load
    if file.exists() and isinstance(folder := read_toml(file).get("state"), str):
        return Path(folder) if Path(folder).is_absolute() else (file.parent / folder).resolve()
    from ..config import load_config

    return load_config(config).state


def _option(name: str, field: FieldInfo, text: str | None, *, bounds: bool) -> inspect.Parameter:
    kind = _type_of(field.annotation)
    limits: dict[str, Any] = {}
    for limit in field.metadata if bounds and kind is int else ():
        limits |= {"min": limit.ge} if hasattr(limit, "ge") else {}
        limits |= {"max": limit.le} if hasattr(limit, "le") else {}
        limits |= {"max": limit.lt - 1} if hasattr(limit, "lt") else {}
    flags = _flags(f"no_{name}" if field.default is True else name)
    typed: Any = bool if kind is bool else (list[str] if kind in {dict, list, tuple} else kind) | None
    annotation = Annotated[typed, typer.Option(*flags, help=text or _help(field), **limits)]  # a form for typer alone
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flags(name: str) -> tuple[str, ...]:
    return FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def _type_of(annotation: Any) -> Any:
    """The type of a field's values; the first one of a union, text for a `Literal`."""
    origin = get_origin(annotation)
    if origin in {Union, UnionType}:
        return _type_of(next(one for one in get_args(annotation) if one is not NoneType))
    if origin is Annotated:
        return _type_of(get_args(annotation)[0])
    return str if origin is Literal else origin or annotation


def _help(field: FieldInfo) -> str:
    """The field's description as a sentence, with its default where that is not said."""
    kind = _type_of(field.annotation)
    text = field.description or ""
    if field.default is True:
        text = f"Do not {text}"
    if kind is dict:
        text = f"name=value, repeatable: {text}"
    elif kind in {list, tuple}:
        text = f"{text}; repeatable"
    else:
        text = f"{text[:1].upper()}{text[1:]}" if re.match("[a-z]+ ", text) else text
    has_default = isinstance(field.default, str | int | float) and not isinstance(field.default, bool)
    return f"{text}; default: {field.default}." if has_default and "default" not in text else f"{text}."


def _value(field: FieldInfo, value: Any) -> Any:
    """A value for the model: ``name=value`` pairs are read as JSON where they are JSON, else as text."""
    kind = _type_of(field.annotation)
    if kind is not dict:
        return tuple(value) if kind is tuple else value.expanduser() if isinstance(value, Path) else value
    pairs = [pair.partition("=") for pair in value]
    if wrong := ["".join(pair) for pair in pairs if not (pair[0] and pair[1])]:
        raise UsageError(f"--param {', '.join(wrong)}: expected name=value, for example --param local_epochs=5")
    result: dict[str, Any] = {}
    for name, _, text in pairs:
        try:
            result[name] = json.loads(text)
        except ValueError:
            result[name] = text
    return result
