"""Coordinators with one database: the one that serves is killed, suspended or cut off, and another takes over."""

from __future__ import annotations

import signal
import time

import pytest
from database_site import DatabaseSite
from process_site import DIGITS

from coordinator.journal.postgres import AWAY_S

ROUNDS = 12
LIMIT_S = 15.0
"""Seconds in which a takeover is over on a machine with other work; `test_database_faults` measures what it takes."""

pytestmark = [pytest.mark.broker, pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, postgres):
    with DatabaseSite(tmp_path_factory.mktemp("undisturbed"), DIGITS, postgres) as site:
        encoder = site.finish(site.request(ROUNDS))
        assert len(site.leases()) == 1
    return encoder


def begun(site, number=3):
    """Request a run, and return it in the round with this number."""
    run = site.request(ROUNDS)
    site.until(lambda: any(opened >= number for opened, _ in site.opened(run)), f"round {number} opens")
    return run


def kill(site):
    site.kill("c0")


def suspend(site):
    site.signal("c0", signal.SIGSTOP)


def hold_packets(site):
    site.lines["c0"].hold()


def cut_connections(site):
    site.lines["c0"].cut()


def stop(site):
    site.signal("c0", signal.SIGTERM)


@pytest.mark.parametrize("fault", [kill, suspend, hold_packets, cut_connections, stop])
def test_another_one_takes_over_within_seconds_and_the_result_has_the_same_bits(tmp_path, postgres, undisturbed, fault):
    with DatabaseSite(tmp_path, DIGITS, postgres) as site:
        run = begun(site)
        before = site.starts()
        served = site.served()
        since = time.monotonic()
        fault(site)
        assert site.takeover_s(since, served) <= LIMIT_S
        assert site.serving() == "c1"
        # The one before comes back in the midst of the run: it finds that it has lost the lease, and ends.
        if fault in {suspend, hold_packets, cut_connections}:
            site.signal("c0", signal.SIGCONT)
            site.lines["c0"].heal()
            site.until(lambda: site.processes["c0"].poll() is not None, "the former one ends")
            assert site.processes["c0"].returncode == 2
            # By the word of the database, or of the other one at the broker, whichever it hears first.
            assert "has taken over" in site.log("c0")
        assert site.finish(run) == undisturbed
        site.check_one_served_at_a_time()
        assert site.closed_by(1) > 0
        assert site.closed_by(2) > 0
        assert site.starts() == before + 1
        with site.state.look() as state:
            assert state.journal.verify() == state.journal.last_id()


def test_a_restart_of_the_database_interrupts_the_run_and_nobody_has_to_take_over(tmp_path, postgres, undisturbed):
    with DatabaseSite(tmp_path, DIGITS, postgres) as site:
        run = begun(site)
        postgres.restart()
        assert site.finish(run) == undisturbed
        site.check_one_served_at_a_time()
        assert len(site.leases()) == 1
        assert site.serving() == "c0"


def test_without_the_database_the_coordinator_ends_and_the_one_that_finds_it_again_goes_on(
    tmp_path, postgres, undisturbed
):
    with DatabaseSite(tmp_path, DIGITS, postgres) as site:
        run = begun(site)
        postgres.stop("SIGQUIT")
        since = time.monotonic()
        site.until(lambda: site.processes["c0"].poll() is not None, "the coordinator ends")
        assert AWAY_S <= time.monotonic() - since <= 1.5 * AWAY_S, "it has waited once, and not with each entry again"
        assert site.processes["c0"].returncode == 75
        assert "cannot be reached" in site.log("c0")
        assert site.processes["c1"].poll() is None
        served = site.served()
        postgres.start()
        assert site.takeover_s(time.monotonic(), served) <= LIMIT_S
        assert site.finish(run) == undisturbed
        site.check_one_served_at_a_time()
