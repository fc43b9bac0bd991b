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
    "peft_params": ("--peft-param", "--peft-params"),
    "evaluate_after": ("--after",),
    "tags": ("--tag", "--tags"),
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
    """Return a decorator that replaces a command's first argument by one option for each of the model's fields.

    The command gets a `Given` there. The options have no defaults: what is not given is left to the model, or to a
    configuration file.

    Args:
        model: The settings; names, types, help texts and defaults are those of its fields.
        fields: The fields that get an option; None: all.
        without: Fields that get none.
        help: Field -> a help text in place of the model's.
        bounds: Whether the command line checks bounds of numbers at once. Otherwise the model does, with all its other
            mistakes.
    """
    names = model.model_fields if fields is None else fields
    chosen = {name: model.model_fields[name] for name in names if name not in without}
    generated = [_option(name, field, help.get(name), bounds=bounds) for name, field in chosen.items()]

    def decorate(command: Command) -> Command:
        _, *others = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            given: Given = {}
            for name, field in chosen.items():
                typed = arguments.pop(name)
                if typed is None or typed is False or typed == []:  # the option was not given
                    continue
                is_negated = field.default is True  # its option is --no-NAME
                given[name] = False if is_negated else _value(name, field, typed)
            command(given, **arguments)

        keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others]
        called.__signature__ = inspect.Signature([*generated, *keyword_only])  # type: ignore[attr-defined]
        called.__annotations__ = {}
        return called  # type: ignore[return-value]

    return decorate


def flag(field: str) -> str:
    """Return the flag that a field is usually given by, such as ``--keep-every``."""
    return _flags(field)[0]


def one_of(by_position: T | None, by_option: T | None, name: str) -> T | None:
    """Return the value that was given by position or by an option of the same meaning; None: it was not given.

    Args:
        by_position: The value of the argument.
        by_option: The value of the option.
        name: What both name, such as RUN, for the message.

    Raises:
        UsageError: Both were given, and differ.
    """
    if by_position is not None and by_option is not None and by_position != by_option:
        raise UsageError(f"{name} is given twice, as {by_position} and as {by_option}; give one of them")
    return by_option if by_position is None else by_position


def state_path(config: Path | None, state: Path | None) -> Path:
    """Return the state folder: the one that was given, else that of the configuration.

    Of a configuration that names the folder nothing else is read or checked, so that a look at the state starts fast.

    Raises:
        ConfigError: No folder was given, and the configuration cannot be read.
    """
    if state is not None:
        return state.absolute()
    file = config or Path("coordinator.toml")  # as `load_config`, whose models take long to load
    folder = read_toml(file).get("state") if file.exists() else None
    if isinstance(folder, str):
        if Path(folder).is_absolute():
            return Path(folder)
        return (file.parent / folder).resolve()
    from ..config import load_config

    return load_config(config).state


def _option(name: str, field: FieldInfo, text: str | None, *, bounds: bool) -> inspect.Parameter:
    """Return the parameter by which typer makes a field's option."""
    kind = _type_of(field.annotation)
    # A flag is there or not; of several values each is given by an option of its own.
    typed: Any = kind | None
    default: bool | None = None
    if kind is bool:
        typed = bool
        default = False
    elif kind in {dict, list, tuple}:
        typed = list[str] | None
    flags = _flags(f"no_{name}" if field.default is True else name)
    limits = _limits_of(field) if bounds and kind is int else {}
    annotation = Annotated[typed, typer.Option(*flags, help=text or _help(field), **limits)]  # a form for typer alone
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _limits_of(field: FieldInfo) -> dict[str, int]:
    """Return the bounds of a field of whole numbers, as typer names them."""
    limits: dict[str, int] = {}
    for limit in field.metadata:
        if hasattr(limit, "ge"):
            limits["min"] = limit.ge
        if hasattr(limit, "le"):
            limits["max"] = limit.le
        if hasattr(limit, "lt"):
            limits["max"] = limit.lt - 1
    return limits


def _flags(name: str) -> tuple[str, ...]:
    return FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def _type_of(annotation: Any) -> Any:
    """Return the type of a field's values: the first one of a union, text for a `Literal`."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin in {Union, UnionType}:
        return _type_of(next(argument for argument in arguments if argument is not NoneType))
    if origin is Annotated:
        return _type_of(arguments[0])
    if origin is Literal:
        return str
    return annotation if origin is None else origin


def _help(field: FieldInfo) -> str:
    """Return the field's description as a sentence, with its default where that is not said."""
    kind = _type_of(field.annotation)
    text = field.description or ""
    if field.default is True:
        text = f"Do not {text}"
    if kind is dict:
        text = f"name=value, repeatable: {text}"
    elif kind in {list, tuple}:
        text = f"{text}; repeatable"
    elif re.match("[a-z]+ ", text):  # a word, and no name
        text = f"{text[:1].upper()}{text[1:]}"
    has_default = isinstance(field.default, str | int | float) and not isinstance(field.default, bool)
    return f"{text}; default: {field.default}." if has_default and "default" not in text else f"{text}."


def _value(name: str, field: FieldInfo, value: Any) -> Any:
    """Return an option's value for the model: in pairs ``name=value``, what is JSON is read as JSON, else as text.

    Where the model has texts alone, as of tags, all stays text.

    Raises:
        UsageError: A pair lacks its name or the sign.
    """
    kind = _type_of(field.annotation)
    if kind is tuple:
        return tuple(value)
    if isinstance(value, Path):
        return value.expanduser()
    if kind is not dict:
        return value
    is_text = get_args(field.annotation)[-1] is str
    pairs = [pair.partition("=") for pair in value]
    wrong = ["".join(pair) for pair in pairs if not (pair[0] and pair[1])]
    if wrong:
        flag = _flags(name)[0]
        example = next(pair[0] or "NAME" for pair in pairs if not (pair[0] and pair[1]))
        raise UsageError(f"{flag} {', '.join(wrong)}: expected name=value, for example {flag} {example}=VALUE")
    result: dict[str, Any] = {}
    for key, _, text in pairs:
        try:
            result[key] = text if is_text else json.loads(text)
        except ValueError:
            result[key] = text
    return result
