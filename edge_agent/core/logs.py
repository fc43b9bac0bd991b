"""Log lines of both programs, as text for people or as one JSON object a line for programs that collect them.

A message of Headwater is an event with named values: ``agent_lost agent=%s silent_s=%.0f``. The names are read from
the message as it stands in the source, never from the finished text, so that no value can pass for another field.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import math
import re
import sys
import threading
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
RESERVED = ("time", "level", "logger", "event", "text", "traceback")
"""Keys that this module writes into lines itself; a value of a message with such a name is left out."""

_DIRECTIVE = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
_NAMED = re.compile(r"(?:^|\s)([A-Za-z][\w.]*)=$")
_EVENT = re.compile(r"([a-z][a-z0-9]*(?:_[a-z0-9]+)+|[a-z]+(?=:|$)|[a-z]+(?= [A-Za-z][\w.]*=))(?=$|[\s:])")


def parts_of(template: str, args: tuple[Any, ...]) -> tuple[str, dict[str, Any], bool]:
    """Take a log message apart into its event and its named values.

    Returns:
        The event, or ``log`` where the message names none; the values by name; and whether the message says more.
    """
    values = dict[str, Any]()
    spans = list[tuple[int, int]]()
    text_left = template
    number = 0
    # Each directive right behind "name=", and with nothing attached behind it, is a named value.
    for match in _DIRECTIVE.finditer(template):
        if match[0] == "%%":
            continue
        name = _NAMED.search(template, 0, match.start())
        is_whole = match.end() == len(template) or template[match.end()] in " :;,"
        if name is not None and name.end() == match.start() and is_whole and number < len(args):
            values[name[1]] = _value(match[0], args[number])
            spans.append((name.start(1), match.end()))
        number += 1
    # What is left without them, the event aside, is text of its own.
    for begin, end in reversed(spans):
        text_left = text_left[:begin] + text_left[end:]
    # The event itself may have values in it: 'release_%s release=%d'.
    first_word, _, following = template.partition(" ")
    if "%" in first_word:
        count = len(_DIRECTIVE.findall(first_word))
        filled_word = first_word % args[:count]
        template = f"{filled_word} {following}"
        text_left = text_left.replace(first_word, filled_word, 1)
    event = _EVENT.match(template)
    if event is None:
        return "log", values, True
    says_more = bool(text_left.removeprefix(event[1]).strip())
    return event[1], values, says_more


def _value(directive: str, value: Any) -> Any:
    """Return a value of a message as JSON: numbers stay numbers, rounded as ``directive`` writes them."""
    if isinstance(value, bool | int | None):
        return value
    if not isinstance(value, float):
        return directive % (value,)
    if not math.isfinite(value):
        return str(value)
    if directive[-1] in "fgeG":
        return float(directive % value)
    if directive[-1] in "di":
        return int(value)
    return value


class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object in ASCII for each record.

    Its keys are ``time`` (UTC), ``level``, ``logger``, ``event`` and the names of the values. ``text`` is the whole
    message, where event and values do not say all of it.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without a newline at its end."""
        args = record.args if isinstance(record.args, tuple) else ()
        try:
            event, values, has_more = parts_of(str(record.msg), args)
        except (TypeError, ValueError):  # a message of another library, which does not fit its values
            event = "log"
            values = {}
            has_more = True
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
            **{name: value for name, value in values.items() if name not in RESERVED},
        }
        if has_more:
            line["text"] = _message(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, allow_nan=False, default=str)


def is_power_of_two(count: int) -> bool:
    """Return whether an event that comes again and again is to be logged: the first, the second, the fourth and so on.

    Args:
        count: How often it has come, from 1.
    """
    return count & (count - 1) == 0


def _message(record: logging.LogRecord) -> str:
    """Return the whole text of a record; where its values do not fit the message, both one after the other."""
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        return f"{record.msg} {record.args}"


class LoggedStream(io.TextIOBase):
    """A stream that turns each line written to it, such as warnings and tracebacks, into a log record ``output``."""

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler
        self._begun = ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """Return True: text can be written to the stream."""
        return True

    def write(self, text: str) -> int:
        """Log the lines that are complete, and return the number of characters in ``text``."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                self._log(line)
        return len(text)

    def finish(self) -> None:
        """Log the last line if no newline ended it."""
        with self._lock:
            line = self._begun
            self._begun = ""
            self._log(line)

    def _log(self, line: str) -> None:
        content = line.strip("\r")
        if content:
            record = logging.LogRecord("stderr", logging.INFO, "", 0, "output line=%s", (content,), None)
            self._handler.handle(record)


def log_json(stream: TextIO | None = None) -> None:
    """Write everything that this process logs or writes to ``sys.stderr`` from now on as JSON lines to ``stream``.

    The default of ``stream`` is ``sys.stderr`` as it is now.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    stream_of_lines = LoggedStream(handler)
    sys.stderr = stream_of_lines
    atexit.register(stream_of_lines.finish)
