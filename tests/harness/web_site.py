"""State folders as a coordinator leaves them, written directly, and a client of the web view on them."""

from __future__ import annotations

import contextlib
import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

from coordinator.journal.entries import fact_of
from coordinator.journal.store import utc_now
from coordinator.state.status_file import EVERYONE, MOST_LISTED
from coordinator.state.store import StateFolder
from coordinator.web.access import Access
from coordinator.web.app import make_app
from coordinator.web.events import Watch
from coordinator.web.folder_view import FolderView
from coordinator.web.served import Site
from edge_agent.core.storage import without_syncs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would rather use a successor of httpx
    from starlette.testclient import TestClient

BASE = "http://127.0.0.1:8470"
LARGE_PAGES = (
    "/",
    "/?sort=personal&order=desc",
    "/?find=99&only=fault",
    "/runs",
    "/run?id=run-0001",
    "/agent?id=agent-00050",
    "/compare?" + "&".join(f"run=run-{number:04d}" for number in range(1, 101)),
)
"""Pages of `FolderSite.large`."""


def agent_status(name: str, **changes: Any) -> dict[str, Any]:
    """One agent as ``status.json`` has it."""
    return {
        "id": name,
        "tier": "train",
        "transport": "mqtt",
        "present": True,
        "samples": 100,
        "bundle_id": "",
        "software": "0.1.0",
        "notes": [],
        "condition": "ok",
        "fault": None,
        "silent_s": 3.0,
        "bytes_up": 1000,
        "bytes_down": 2000,
        **changes,
    }


class FolderSite:
    """A state folder that grows as a test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.folder = StateFolder(path)
        self.journal = self.folder.journal
        with without_syncs():
            self.journal.open()
        self.journal.append(fact_of("coordinator_started", {"federation": "f" * 32, "epoch": 1, "boot": "b"}))

    def close(self) -> None:
        self.journal.close()

    def run(
        self, rounds: int = 3, cohort: tuple[str, ...] = ("a", "b"), *, wanted: int = 0, end: str = "", **request: Any
    ) -> str:
        """A run with so many closed rounds, of ``wanted`` ones or no more; ``end``: the kind of its last entry."""
        body = {"id": "x", "method": "fedavg", "rounds": max(rounds, wanted, 1), "seed": 0}
        body |= {"params": {"lr": 0.1}, **request}
        name = self.journal.request_run(fact_of("run_requested", body))
        self.journal.append(fact_of("run_started", {}), run=name)
        folder = self.folder.run(name)
        draw = random.Random(name)
        folder.folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(round_line(number, cohort, draw)) for number in range(1, rounds + 1)]
        folder.metrics_path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if end:
            self.journal.append(fact_of(end, {"reason": "by a test"} if end != "run_finished" else {}), run=name)
        return name

    def report(self, run: str, agent: str, local: float, shared: float, personal: float, **more: Any) -> None:
        """An agent's figures at the end of a run."""
        acc = {"local": local, "global": shared, "personal": personal}
        body = {"id": agent, "tier": "train", "samples": 50, "acc": acc, "rss_mb": 123.4, "support": 40, **more}
        self.journal.append(fact_of("release_reported", body), run=run, agent=agent)

    def device(self, agent: str, runs: str = "", release: int = 0, outcome: str = "", **result: Any) -> None:
        """What a device of tier ``head`` says."""
        told = {"release": release, "result": {"outcome": outcome, **result}} if outcome else {}
        self.journal.append(fact_of("device_reported", {"runs": runs * 64, "channel": "stable", **told}), agent=agent)

    def release(self, letter: str, run: str = "run-0001", **plan: Any) -> None:
        """A release of a bundle whose file is a blob."""
        digest = self.folder.blobs.put(letter.encode())
        body = {"bundle_id": letter * 64, "plan": plan, "by": "ann"}
        self.journal.append(fact_of("release_made", body), run=run, round=1, digest=digest)

    def status(self, agents: list[dict[str, Any]] | None = None, **changes: Any) -> None:
        """The status file of a coordinator that was just heard."""
        known = agents or []
        content = {
            "federation": "home",
            "at": utc_now().isoformat(timespec="milliseconds"),
            "run": None,
            "waiting": {"for": "no run is queued", "idle": True, "whom": [], "count": 0, "seconds_left": None},
            "fleet": {"agents": len(known), "online": len(known), "fault": 0, "stalled": 0},
            "agents": known[:MOST_LISTED],
            **changes,
        }
        (self.path / "status.json").write_text(json.dumps(content), encoding="utf-8")
        if len(known) > MOST_LISTED:
            (self.path / EVERYONE).write_text(json.dumps(known), encoding="utf-8")

    def large(self, agents: int = 10_000, rounds: int = 500, runs: int = 100) -> None:
        """So many agents and runs, the first one of so many rounds."""
        names = [f"agent-{number:05d}" for number in range(agents)]
        with without_syncs(), self.journal.deferring():
            run = self.run(rounds, tuple(names[:100]), end="run_finished")
            for number, name in enumerate(names):
                body = {"samples": 50, "metrics": {"acc.global": 0.6, "acc.personal": number % 40 / 100, "loss": 0.5}}
                self.journal.append(fact_of("update_accepted", body), run=run, round=rounds, agent=name)
            self.journal.append(fact_of("round_closed", {"clients": agents}), run=run, round=rounds, digest="0" * 64)
            for number, name in enumerate(names):
                self.report(run, name, 0.5 + number % 40 / 100, 0.6, 0.7 + number % 20 / 100)
            for number in range(runs - 1):
                self.run(50, tuple(names[:10]), end="run_finished", params={"lr": 0.01 * number})
        self.journal.flush()
        fault = {"error": "DataError", "message": "no class folders", "remedy": "make them", "at": ""}
        self.status([agent_status(name, fault=None if number % 100 else fault) for number, name in enumerate(names)])

    @contextlib.contextmanager
    def client(self, **changes: Any) -> Any:
        """A browser without a session, and the token in ``client.token``."""
        view = FolderView(self.path, **changes)
        access, _ = Access.of(self.path)
        site = Site(view, Watch(view), access, names=frozenset({"coordinator.example"}))
        with TestClient(make_app(site), base_url=BASE, follow_redirects=False) as client:
            while not view.is_loaded:  # the application reads it as well, in another thread
                view.refresh()
            client.view = view
            client.site = site
            client.token = access.token if access is not None else ""
            yield client


def sign_in(client: Any) -> None:
    """A session for the client."""
    answer = client.post("/login", data={"token": client.token}, headers={"origin": BASE})
    assert answer.status_code == 303, answer.text


def fields(page: str) -> dict[str, str]:
    """The hidden fields of the last form on a page."""
    form = page[page.rindex("<form") :]
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form))


def act(client: Any, do: str, **given: Any) -> Any:
    """What an operator does in two steps: look at the page of an action, and send its form."""
    shown = client.get("/act", params={"do": do, **given})
    assert shown.status_code == 200, shown.text
    return client.post(
        "/act", data=fields(shown.text) | {k: str(v) for k, v in given.items()}, headers={"origin": BASE}
    )


def round_line(number: int, cohort: tuple[str, ...], draw: random.Random) -> dict[str, Any]:
    """A line of ``metrics.jsonl``."""
    base = 0.9 - 0.6 / number
    return {
        "kind": "round",
        "round": number,
        "seconds": 1.5,
        "waiting_s": 0.25,
        "bytes_up": 1_000_000 + 1000 * number * 100,
        "bytes_down": 2_000_000,
        "agents": list(cohort),
        "missing": [],
        "rejected": [],
        "left_out": [],
        "acc": {s: {a: round(min(1.0, base + draw.random() / 10), 4) for a in cohort} for s in ("global", "personal")},
        "loss": {a: round(1 / number, 4) for a in cohort},
    }
