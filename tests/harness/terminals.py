"""Commands on a terminal that is not there: a pseudo-terminal, its size and kind, and what a program draws on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


class Terminal:
    """A program whose stdin, stdout and stderr are one pseudo-terminal. ``text``: all that it wrote."""

    def __init__(self, *words, columns=80, rows=24, term="xterm-256color", **environment):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *map(str, words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, "TERM": term, **environment},
            start_new_session=True,
        )
        os.close(theirs)
        self._ours = ours
        self.text = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def read(self, until=None, limit_s=60.0):
        """Read until the text has what is looked for, or until the program ends; returns all text."""
        end = time.monotonic() + limit_s
        while until is None or until not in self.text:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise AssertionError(f"not within {limit_s:.0f} s: {until!r}\n{self.text[-3000:]}")
            if select.select([self._ours], [], [], left_s)[0]:
                data = b""
                with contextlib.suppress(OSError):  # the other end is closed
                    data = os.read(self._ours, 1 << 16)
                if not data:
                    if until is not None and until not in self.text:
                        raise AssertionError(f"ended without {until!r}\n{self.text[-3000:]}")
                    break
                self.text += data.decode(errors="replace")
        return self.text

    def end(self, number=None):
        """Its exit code, after a signal if given; the rest of its text is read."""
        if number is not None:
            self.process.send_signal(number)
        self.read()
        return self.process.wait(20)

    @property
    def lines(self):
        """Lines without escape sequences."""
        return [line.rstrip() for line in ESCAPE.sub("", self.text).replace("\r", "\n").split("\n")]
