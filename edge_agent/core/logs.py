"""Log lines of both programs, as text for people or as one JSON object a line for whatever collects them.

A message of ours is an event with named values, such as ``agent_lost agent=%s silent_s=%.0f``. The names are read from
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
"""Keys of every line, or of what a message does not name; no value in a message may be called so."""

_DIRECTIVE = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
_NAMED = re.compile(r"(?:^|\s)([A-Za-z][\w.]*)=$")
_EVENT = re.compile(r"([a-z][a-z0-9]*(?:_[a-z0-9]+)+|[a-z]+(?=:|$)|[a-z]+(?= [A-Za-z][\w.]*=))(?=$|[\s:])")


def parts_of(template: str, args: tuple[Any, ...]) -> tuple[str, dict[str, Any], bool]:
    """Event, named values, and whether the message has more than these; the event is ``log`` where none is named."""
    values = dict[str, Any]()
    spans = list[tuple[int, int]]()
    rest = template
    number = 0
    for match in _DIRECTIVE.finditer(template):
        if match[0] == "%%":
            continue
        name = _NAMED.search(template, 0, match.start())
        is_whole = match.end() == len(template) or template[match.end()] in " :;,"
        if name is not None and name.end() == match.start() and is_whole and number < len(args):
            values[name[1]] = _value(match[0], args[number])
            spans.append((name.start(1), match.end()))
        number += 1
    for begin, end in reversed(spans):
        rest = rest[:begin] + rest[end:]
    first, _, others = template.partition(" ")
    if "%" in first:  # 'release_%s release=%d'
        count = len(_DIRECTIVE.findall(first))
        template = f"{first % args[:count]} {others}"
        rest = rest.replace(first, first % args[:count], 1)
    event = _EVENT.match(template)
    if event is None:
        return "log", values, True
    return event[1], values, bool(rest.removeprefix(event[1]).strip())


def _value(directive: str, value: Any) -> Any:
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(directive % value) if directive[-1] in "fgeG" else int(value) if directive[-1] in "di" else value
    return directive % (value,)


class JsonLines(logging.Formatter):
    """One JSON object for each record, in ASCII: ``time`` (UTC), ``level``, ``logger``, ``event``, and its values.

    ``text`` is the whole message, where event and values do not say all of it.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        args = record.args if isinstance(record.args, tuple) else ()
        try:
            event, values, has_more = parts_of(str(record.msg), args)
        except (TypeError, ValueError):  # a message of somebody else's, which does not fit its values
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


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        return f"{record.msg} {record.args}"


class LoggedStream(io.TextIOBase):
    """A stream for what is not logged, warnings and tracebacks for example: each line becomes a record ``output``."""

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler
        self._begun = ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Log the lines that are complete; returns the number of characters."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                self._log(line)
        return len(text)

    def finish(self) -> None:
        """Log the last line, where nothing ended it."""
        with self._lock:
            line = self._begun
            self._begun = ""
            self._log(line)

    def _log(self, line: str) -> None:
        if line := line.strip("\r"):
            record = logging.LogRecord("stderr", logging.INFO, "", 0, "output line=%s", (line,), None)
            self._handler.handle(record)


def log_json(stream: TextIO | None = None) -> None:
    """From now on everything that this process logs, or writes to ``sys.stderr``, is JSON lines on ``stream``.

    Default: what ``sys.stderr`` is now.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    sys.stderr = stream_of_lines = LoggedStream(handler)
    atexit.register(stream_of_lines.finish)
