"""One step of a check, such as those of both ``doctor`` commands: what was tried, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .errors import BrokerAway, HeadwaterError, cause


@dataclass(frozen=True)
class Step:
    """A thing that was tried.

    Attributes:
        name: What it is, in a word.
        is_ok: Whether it succeeded.
        detail: What was found, or what went wrong and what to do next.
        exit_code: The exit code of the error; 0 where there was none.
        meaning: What a failure means, as the end of a sentence about what was tried; empty: the detail says it.
    """

    name: str
    is_ok: bool
    detail: str
    exit_code: int = 0
    meaning: str = ""


def try_step(name: str, attempt: Callable[[], object], detail: str = "", meaning: str = "") -> Step:
    """Try one step, and return what came of it: it fails where it raises an error of ours or of the system.

    Args:
        name: What it is, in a word.
        attempt: Tries it.
        detail: What is said where it succeeds; empty: what ``attempt`` returns.
        meaning: As `Step.meaning`.
    """
    try:
        result = attempt()
        return Step(name, is_ok=True, detail=detail or str(result))
    except HeadwaterError as error:
        text = str(error).removeprefix(f"{name}: ")
        return Step(name, is_ok=False, detail=text, exit_code=error.exit_code, meaning=meaning)
    except OSError as error:  # name, connection and certificate errors are all kinds of OSError
        return Step(name, is_ok=False, detail=cause(error), exit_code=BrokerAway.exit_code, meaning=meaning)
