"""A federation whose devices really verify, test and fit, whose bundles are a file each, and an operator's commands."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from federation_harness import Federation

from coordinator.cli import main
from coordinator.cli import release as command_line
from coordinator.fleet import release_commands as commands
from coordinator.journal.entries import fact_of
from coordinator.state.release_rows import device_rows
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.bundle import installed
from edge_agent.cli import main as edge_agent_main
from edge_agent.core import locks
from edge_agent.core.config import DataConfig, HeadConfig


class HeadDuties(TaskRunner):
    """A device with 60 digits."""

    def __init__(self, config: Any, tier: str, min_gain: float = -1.0, now: Any = time.time, **changes: Any) -> None:
        """``min_gain``: -1 takes any encoder, -0.02 is the default of a device."""
        head = HeadConfig(name="prototype", precision="fp32", min_gain=min_gain, local=False)
        changes |= {"data": DataConfig(source="digits:optdigits?n=60"), "head": head}
        super().__init__(config.model_copy(update=changes), tier, now=now)

    def check(self, task: Any) -> None:
        pass


class ReleaseSite(Federation):
    """A federation with devices of tier ``head`` alone, and the commands of its operator."""

    def __init__(self, folder: Any, capsys: pytest.CaptureFixture[str], **options: Any) -> None:
        super().__init__(folder, agents=(), tasks=HeadDuties, **options)
        self.shortest_pause_s = self.longest_pause_s  # a coordinator without a run would look for one each 0.2 s
        self._capsys = capsys
        self._exported = 0

    def export(self, made: Any) -> str:
        """A finished run whose bundle is this one; returns its name."""
        digest = self.state.blobs.put(made.path.read_bytes())
        journal = self.state.journal
        run = journal.request_run(fact_of("run_requested", {"id": f"run-{self._exported:04}-{'0' * 32}"}))
        self._exported += 1
        body = {"bundle_id": made.manifest.bundle_id}
        journal.append(fact_of("bundle_exported", body), run=run, round=1, digest=digest)
        journal.append(fact_of("run_cancelled", {}), run=run)
        return run

    def release(self, *words: object) -> dict[str, Any]:
        """``headwater release``, as an operator types it on the coordinator's machine, whose clock it has."""
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            for module in (commands, command_line):
                patch.setattr(module, "utc_now", self.now)
            # The coordinator that holds the folder is stepped by this thread: it lets nothing go while a command waits.
            patch.setattr(locks, "LOCK_PAUSES_S", ())
            main(["release", *map(str, words), "--state", str(self.config.state), "--json"])
        said = self._capsys.readouterr()
        assert not ended.value.code, said.err
        return json.loads(said.out)

    def table(self) -> dict[str, tuple[int | None, int | None]]:
        """Device -> the release that it says it runs, and the one that it is to run."""
        rows = device_rows(self.coordinator.releases.book, self.now())
        return {row.id: (row.runs, row.wanted) for row in rows}

    def running(self) -> dict[str, int | None]:
        """Device -> the newest release of the bundle that is in its folder."""
        known = {release.bundle_id: release.number for release in self.coordinator.releases.book.releases}
        return {name: known.get(installed.current_id(self.folder / name / "bundles")) for name in sorted(self.agents)}

    def stages(self) -> list[str]:
        """The stage of each release."""
        return [release.stage for release in self.coordinator.releases.book.releases]

    def device(self, name: str, **options: Any) -> None:
        """A device starts, for the first time or again; its wall clock is that of the federation."""
        self.add(name, tier="head", now=lambda: self.now().timestamp(), **options)

    def on_device(self, *words: object) -> dict[str, Any]:
        """``edge-agent``, as the owner of a device types it there."""
        assert edge_agent_main([*map(str, words), "--json"]) == 0, self._capsys.readouterr().err
        return json.loads(self._capsys.readouterr().out)

    def restart(self, *names: str) -> None:
        """Kill the coordinator and these devices, and start them again."""
        self.kill_coordinator()
        for name in names:
            self.kill(name)
        self.start_coordinator()
        for name in names:
            self.device(name)
