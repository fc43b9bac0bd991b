"""Coordinators as real processes with one database and one state folder; a line to the database for each of them."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise

from cut_line import CutLine
from process_site import AGENTS, EVERYBODY, Site

from coordinator.state.store import StateFolder

COORDINATORS = ("c0", "c1")


class DatabaseSite(Site):
    """Coordinators that all began with ``--standby``: one serves, by the lease, and the others wait."""

    def __init__(self, folder, task, postgres, *, coordinators=COORDINATORS, agents=AGENTS, rules=EVERYBODY):
        super().__init__(folder, task, agents=agents, rules=rules)
        self.postgres = postgres
        self.url = postgres.database()
        self.database = self.url.rpartition("/")[2].partition("?")[0]
        self.coordinators = coordinators
        self.lines = {name: CutLine(postgres.port) for name in coordinators}

    def __enter__(self):
        self.broker.start()
        for name, line in self.lines.items():
            line.__enter__()
            journal = json.dumps(self.postgres.url(self.database, line.port))
            (self.folder / f"{name}.toml").write_text(f"journal = {journal}\n{self.coordinator_toml()}")
        self.serve(self.coordinators[0])
        self.until(lambda: self.leases(), "the first one has the lease")
        for name in self.coordinators[1:]:
            self.serve(name)
        self.state = StateFolder(self.folder / "state", self.url)
        for number, name in enumerate(self.agents):
            (self.folder / f"{name}.toml").write_text(
                f'id = "{name}"\ntier = "train"\nstate = "{name}"\nheartbeat_s = 2\n{self.broker_toml()}\n\n'
                f'[data]\nsource = "digits:optdigits?n=240&client={number}&clients={len(self.agents)}"\n'
            )
            self.agent(name)
        for name in self.coordinators[1:]:
            self.until(lambda name=name: "standing_by" in self.log(name), f"{name} waits")
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        super().__exit__()
        for line in self.lines.values():
            line.__exit__()

    def serve(self, name="c0"):
        self.start(name, "coordinator", "serve", "--standby", "--config", f"{name}.toml")

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def signal(self, name, which):
        os.kill(self.processes[name].pid, which)

    def query(self, text, values=()):
        return self.postgres.query(text, values, url=self.url)

    def leases(self):
        """(fence, holder, taken_at, renewed_at, ended_at) of all leases, oldest first; empty before the first."""
        if not self.query("SELECT 1 FROM pg_tables WHERE tablename = 'headwater_leases'"):
            return []
        return self.query("SELECT fence, holder, taken_at, renewed_at, ended_at FROM headwater_leases ORDER BY fence")

    def serving(self):
        """The coordinator that has the newest lease, by the process that the database names; None: nobody has it."""
        _, holder, _, _, ended_at = self.leases()[-1]
        if ended_at is not None:
            return None
        for name in self.coordinators:
            if holder.endswith(f"process {self.processes[name].pid})"):
                return name
        return None

    def takeover_s(self, since, before):
        """Seconds from a fault until another one has written its start, and serves agents at the broker.

        Args:
            since: When the fault was, by the monotonic clock.
            before: The number of coordinators that have begun to serve before the fault.
        """
        self.until(lambda: self.served() > before, "another coordinator serves", every_s=0.01)
        return time.monotonic() - since

    def served(self):
        """The number of times that a coordinator has said that it serves."""
        return sum(self.log(name).count("serving federation") for name in self.coordinators if self.has_log(name))

    def has_log(self, name):
        return (self.folder / f"{name}.log").exists()

    def starts(self):
        [(count,)] = self.query("SELECT count(*) FROM headwater_entries WHERE kind = 'coordinator_started'")
        return count

    def last_id(self):
        """The number of the newest entry."""
        [(number,)] = self.query("SELECT last_id FROM headwater_journal")
        return number

    def check_one_served_at_a_time(self):
        """Compare what the database has of leases and writers: no two leases overlap, and no late entry is there."""
        leases = self.leases()
        for (fence, _, _, renewed_at, ended_at), (following, _, taken_at, _, _) in pairwise(leases):
            assert following == fence + 1
            assert ended_at is not None
            assert renewed_at <= ended_at <= taken_at, f"lease {fence} was renewed after {following} was taken"
        fences = [fence for (fence,) in self.query("SELECT fence FROM headwater_entries WHERE fence > 0 ORDER BY id")]
        assert fences == sorted(fences), "an entry of an earlier lease came after one of a later"
        assert fences

    def closed_by(self, fence):
        """The number of rounds that the holder of a lease has closed."""
        query = "SELECT count(*) FROM headwater_entries WHERE kind = 'round_closed' AND fence = %s"
        [(count,)] = self.query(query, [fence])
        return count
