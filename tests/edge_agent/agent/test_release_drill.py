"""A release drill (run with -s to see the table of every device after each step); both sides restart in between."""

from __future__ import annotations

from datetime import timedelta

import pytest
from federation_harness import NOON
from release_site import ReleaseSite

from edge_agent.agent.release_record import PROVEN_S
from edge_agent.bundle import installed

NAMES = ("d0", "d1", "d2", "d3", "d4", "d5")


@pytest.fixture
def site(tmp_path, capsys):
    with ReleaseSite(tmp_path, capsys) as opened:
        # Two hours pass, in which seven devices mostly send heartbeats.
        opened.longest_pause_s = opened.shortest_pause_s = 5.0
        yield opened


class Drill:
    """Executes steps, and shows after each what every device runs and is to run."""

    def __init__(self, site, made):
        self.site = site
        self.letters = {one.manifest.bundle_id: letter for one, letter in zip(made, "ABC", strict=True)}
        self.lines = [f"{'step':44}" + "".join(f"{name:>8}" for name in (*NAMES, "new"))]

    def step(self, what, expected):
        """Every device runs the release that it is to run, and still does after both sides were killed."""
        self._wait(what, expected)
        self.site.restart(*self.site.agents)
        self._wait(f"{what}, after a restart", expected)
        cells = [f"{expected.get(name, ''):>8}" for name in (*NAMES, "new")]
        self.lines.append(f"{what:44}" + "".join(cells))

    def _wait(self, what, expected):
        self.site.wait(PROVEN_S + 30)
        in_use = {name: installed.current_id(self.site.folder / name / "bundles") for name in self.site.agents}
        assert {name: self.letters[one] for name, one in in_use.items()} == expected, what
        rows = self.site.release("status")["devices"]
        assert {row["device"]: self.letters[row["bundle_id"]] for row in rows} == expected, f"{what}: as it is reported"


def test_release_drill(site, make_bundle):
    made = [make_bundle(f"{name}.hwb", dim=16, seed=seed) for seed, name in enumerate("abc")]
    drill = Drill(site, made)
    site.export(made[0])
    site.release("create", "--canary", "all")
    for name in NAMES:
        site.device(name)
    everybody = dict.fromkeys(NAMES, "A")
    drill.step("1 = A for everybody", everybody)

    site.export(made[1])
    site.release("create", "--canary", "2", "--note", "more data")
    site.until(lambda: site.stages() == ["everybody", "paused"], limit_s=60)
    canary = site.coordinator.releases.book.releases[1].canary
    assert len(canary) == 2
    drill.step("2 = B: canary of two, pause after success", everybody | dict.fromkeys(canary, "B"))

    site.device("new")
    drill.step("a new device joins", everybody | dict.fromkeys(canary, "B") | {"new": "A"})

    site.release("promote")
    everybody = dict.fromkeys((*NAMES, "new"), "B")
    drill.step("promote 2", everybody)

    pinned = next(name for name in NAMES if name not in canary)
    until = NOON + timedelta(hours=6)
    site.release("pin", pinned, "--reason", "measurements", "--until", until.isoformat())
    site.export(made[2])
    site.release("create", "--canary", "50%")
    site.until(lambda: site.stages() == ["everybody", "everybody", "paused"], limit_s=60)
    canary = site.coordinator.releases.book.releases[2].canary
    assert len(canary) == 4, "half of seven"
    assert pinned not in canary
    drill.step(f"pin {pinned}; 3 = C: canary of half", everybody | dict.fromkeys(canary, "C"))

    site.release("hold", "--reason", "complaints")
    drill.step("hold 3: who runs it keeps it", everybody | dict.fromkeys(canary, "C"))

    site.release("resume", 3)
    site.release("promote", 3)
    drill.step("resume and promote 3", dict.fromkeys(everybody, "C") | {pinned: "B"})

    site.release("rollback", 3, "--reason", "wrong labels")
    drill.step("roll back 3 everywhere: 4 = B", dict.fromkeys(everybody, "B"))

    site.export(made[0])
    site.release("create", "--canary", "all")
    drill.step("5 = A for everybody, one is pinned", dict.fromkeys(everybody, "A") | {pinned: "B"})

    assert site.now() < until
    site.clock.now += (until - site.now()).total_seconds()
    drill.step("the pin ends by its date", dict.fromkeys(everybody, "A"))
    assert site.stages() == ["everybody", "everybody", "rolled back", "everybody", "everybody"]
    print("", *drill.lines, sep="\n")
