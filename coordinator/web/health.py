"""Whether a coordinator works, for load balancers, containers and people: ``/live`` and ``/ready``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..journal.store import utc_now
from ..state.status_file import Status, StatusFiles, read_status

if TYPE_CHECKING:
    from starlette.routing import Route

FRESH_S = 30.0
"""A coordinator writes its status each second, in large fleets every 10 s, and less often during an aggregation."""


def is_fresh(status: Status, now: datetime) -> bool:
    """Return whether the coordinator that wrote this status is heard."""
    age = status.age_s(now)
    return age is not None and age <= FRESH_S


def objection(status: Status, now: datetime) -> str:
    """Return why agents cannot be served now; empty where they can."""
    age = status.age_s(now)
    if age is None:
        return "the coordinator has not written a status yet"
    if age > FRESH_S:
        return f"nothing heard from the coordinator for {age:.0f} s"
    if status.is_broker_away:
        return f"the broker at {status.broker} does not answer"
    if status.other_coordinator:
        return f"another coordinator serves: {status.other_coordinator}"
    if status.run is not None and status.run.stall is not None:
        return f"{status.run.id} is stalled: {status.run.stall}"
    return ""


def routes(state: Path, now: Callable[[], datetime] = utc_now) -> list[Route]:
    """``/live``: 200 while this process answers. ``/ready``: of the coordinator, 200, or 503 with the reason."""
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    files = StatusFiles(state)

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    def ready(_: Request) -> Response:
        reason = objection(files.status(), now())
        return JSONResponse({"ready": not reason, "reason": reason or None}, status_code=503 if reason else 200)

    return [Route("/live", live), Route("/ready", ready)]


def main(argv: Sequence[str] | None = None, now: Callable[[], datetime] = utc_now) -> int:
    """0 while the coordinator of a state folder is heard, else 1 with the reason: the health check of containers."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.web.health")
    parser.add_argument("--state", type=Path, required=True, help="state folder of the coordinator")
    parser.add_argument("--ready", action="store_true", help="also whether agents can be served, as /ready says")
    arguments = parser.parse_args(argv)
    status = read_status(arguments.state)
    reason = objection(status, now())
    if reason and (arguments.ready or not is_fresh(status, now())):
        sys.stderr.write(f"{reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
