"""Numbers, shares, sizes and rows as people read them: on terminals of both programs, in logs and on pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .time_and_text import show_time


def value_text(value: object) -> str:
    """Return a value as a cell: a dash for what is not known, three decimals for floats, three digits of small ones."""
    if value is None or value == "":
        return "–"
    if not isinstance(value, float):
        return str(value)
    if 0 < abs(value) < 0.0005:
        return f"{value:.3g}"
    return f"{value:.3f}"


def percent(share: float | None) -> str:
    """Return a share 0..1 as a percentage with one decimal; a dash for None."""
    return "–" if share is None else f"{100 * share:.1f} %"


def number(value: float | None) -> str:
    """Return a number with four significant digits; a dash for None."""
    return "–" if value is None else f"{value:.4g}"


def broker(status: Mapping[str, Any]) -> str:
    """Return, for people, the broker in a status file, since when it is connected, and why others were left.

    Args:
        status: The connection as `BrokerConnection.to_json` writes it; what other programs have put there is ignored.
    """
    text = f"{status.get('url')} since {show_time(status.get('since'))}"
    left = status.get("left")
    if not isinstance(left, list):
        return text
    for other in left:
        if isinstance(other, Mapping):
            text = f"{text}; not {other.get('url')}: {other.get('reason')}"
    return text


def ways(status: Mapping[str, Any]) -> str:
    """Return, for people, by which ways blobs have gone since the start, and why HTTP was of no use last.

    Args:
        status: The object in an agent's status file.
    """
    text = f"{size(status.get('http_bytes'))} by HTTP, {size(status.get('mqtt_bytes'))} over MQTT"
    problem = status.get("http_problem")
    if problem:
        text = f"{text}; not by HTTP: {problem}"
    return text


def size(number: int | None) -> str:
    """Return bytes as MiB or GiB; a dash for None."""
    if number is None:
        return "–"
    if number < 1 << 30:
        return f"{number / (1 << 20):.0f} MiB"
    return f"{number / (1 << 30):.1f} GiB"


def pairs(rows: Iterable[tuple[str, object]]) -> list[str]:
    """Return lines ``name  value`` with the values in one column."""
    cells = [(name, value_text(value)) for name, value in rows]
    width = max((len(name) for name, _ in cells), default=0)
    return [f"{name:<{width}}  {text}" for name, text in cells]


def other_version(serving: object, own: str, what: str) -> str:
    """Return a note that ``what`` runs another version than this command; empty where it does not."""
    if not isinstance(serving, str) or serving == own:
        return ""
    return f"version {serving} runs, this command is of version {own}: restart {what} to change it"


def printable(text: str) -> str:
    """Return ``text`` with a space in place of each character that could control a terminal or break a log line."""
    return "".join(character if character.isprintable() else " " for character in text)
