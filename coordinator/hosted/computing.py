"""The process behind a `Desk`: ``python -m coordinator.hosted.computing``. It answers until its owner hangs up."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from edge_agent.errors import HeadwaterError, cause

from ..processes.launch import heed_no_signals
from .line import Line

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    """Answer one question after another."""
    heed_no_signals()
    words = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a method of somebody prints is no answer
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    line, questions = Line(sys.stdin.buffer, words), queue.SimpleQueue[dict[str, Any]]()
    threading.Thread(target=_listen, args=(line, questions), daemon=True).start()
    while True:
        line.send(*_answer(questions.get()))


def _listen(line: Line, questions: queue.SimpleQueue[dict[str, Any]]) -> None:
    """A thread of its own hears at once when the owner is gone, whatever is being computed."""
    try:
        while True:
            questions.put(json.loads(line.receive()[1]))
    finally:
        os._exit(0)


def _answer(question: dict[str, Any]) -> tuple[str, bytes]:
    try:
        kind, answer = "answer", _answer_to(question["do"])(question)
    except Exception as error:
        if not isinstance(error, HeadwaterError):
            logging.getLogger(__name__).exception("computing_broke")
        text = str(error) if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {cause(error)}"
        kind, answer = "failed", {"message": text}
    return kind, json.dumps(answer).encode()


def _answer_to(what: str) -> Answer:
    if what == "warm":
        from .warm import train_warm

        return train_warm
    from .proxy import evaluate_on_proxy

    return evaluate_on_proxy


if __name__ == "__main__":
    main()
