"""Which log a text such as ``csv:FOLDER`` or ``mlflow:http://host:5000`` names."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_agent.core.errors import ConfigError, HeadwaterError, UsageError
from edge_agent.core.registry import Registry, absolute, is_reference, load_reference

from .base import Logger

LOGGERS = Registry("log", "coordinator.loggers", entry_points="headwater.loggers", suffix="_log")
"""The kinds of logs: files here, and what other packages add."""


@dataclass(frozen=True)
class NamedLogger:
    """A log with the name by which it is reported."""

    name: str
    logger: Logger


def split_choice(text: str) -> tuple[str, str]:
    """Return the name of a log and its target; that of a class in a file stands behind a question mark.

    Raises:
        UsageError: The target holds a password.
    """
    reference, _, options = text.partition("?")
    if is_reference(reference):
        return reference, options
    name, _, target = text.partition(":")
    try:
        password = urllib.parse.urlsplit(target).password
    except ValueError:  # it is no URL, which the log says itself where it needs one
        password = None
    if password:
        raise UsageError(
            f"--log {name}: the address holds a password, which the run's files would show; leave it out, and set the "
            "variables that the log's own package reads, such as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    return name, target


def absolute_choice(text: str, folder: Path | None = None) -> str:
    """Return a choice that means the same from any folder; what names no log stays, to be refused later.

    Args:
        text: As behind ``--log``.
        folder: The folder that its relative paths count from; None: the working folder.
    """
    try:
        name, target = split_choice(text)
        kind = _class_of(name)
    except HeadwaterError:
        return text
    whole = kind.absolute_target(target, folder or Path.cwd())
    if is_reference(name):
        return absolute(f"{name}?{whole}" if whole else name, folder)
    return f"{name}:{whole}" if whole else name


def make_loggers(choices: Sequence[str | Logger], folder: Path | None) -> list[NamedLogger]:
    """Return the logs that were chosen; nothing is opened or written.

    Args:
        choices: Texts as behind ``--log``, or objects.
        folder: Where those log that name no place; None: there is no lasting one.

    Raises:
        ConfigError: Some name no log, twice the same one, or no place where there is no lasting folder.
    """
    mistakes = []
    loggers: list[NamedLogger] = []
    for choice in choices:
        try:
            loggers.append(_make_logger(choice, folder))
        except HeadwaterError as error:
            mistakes.append(str(error))
    texts = [choice for choice in choices if isinstance(choice, str)]
    mistakes += [
        f"--log {text} is given twice; leave one out" for text in dict.fromkeys(texts) if texts.count(text) > 1
    ]
    if mistakes:
        raise ConfigError("--log", mistakes)
    return loggers


def check_loggers(loggers: Sequence[NamedLogger]) -> None:
    """Return quietly where all logs can be written: their packages are there, servers answer, folders are writable.

    Raises:
        HeadwaterError: One cannot; the error of the first, or of several all of them in one.
    """
    errors: list[HeadwaterError] = []
    for named in loggers:
        try:
            named.logger.check()
        except HeadwaterError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError("--log", map(str, errors))


def _make_logger(choice: str | Logger, folder: Path | None) -> NamedLogger:
    """Return the log of one choice.

    Raises:
        UsageError: There is no such log, or it has no place.
    """
    if isinstance(choice, Logger):
        return NamedLogger(type(choice).__name__, choice)
    if not isinstance(choice, str):
        raise UsageError(
            f"log={choice!r}: expected a name such as 'csv' or 'csv:FOLDER', or an object of a subclass of "
            f"{Logger.__module__}.{Logger.__qualname__}"
        )
    name, target = split_choice(choice)
    kind = _class_of(name)
    if kind.writes_files and not target and folder is None:
        raise UsageError(f"log='{name}': the folder of this run is temporary; say where: '{name}:FOLDER', or give out=")
    shown = kind.__name__ if is_reference(name) else name
    return NamedLogger(shown, kind(target, (folder or Path()) / shown))


def _class_of(name: str) -> type[Logger]:
    """Return the class of a log.

    Raises:
        UnknownName: There is none of this name; the message suggests the nearest one.
        UsageError: What the name leads to is no log.
    """
    if not is_reference(name):
        return LOGGERS.load_class(name, Logger)  # type: ignore[type-abstract]
    kind = load_reference("log", name)
    if not isinstance(kind, type) or not issubclass(kind, Logger):
        raise UsageError(f"log '{name}': expected a subclass of {Logger.__module__}.{Logger.__qualname__}")
    return kind
