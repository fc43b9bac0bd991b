"""Fifty faults on three coordinators with one database: seconds until the run goes on, bits, and who served when."""

from __future__ import annotations

import random
import signal
import statistics
import time

import pytest
from database_site import DatabaseSite
from process_site import DIGITS

ROUNDS = 6
FAULTS = 50
LIMIT_S = 5.0
"""Seconds that a takeover may take."""

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def suspend_and_wake(site, name):
    site.signal(name, signal.SIGSTOP)


def hold_packets(site, name):
    site.lines[name].hold()


def cut_connections(site, name):
    site.lines[name].cut()


def kill(site, name):
    site.kill(name)


def stop(site, name):
    site.signal(name, signal.SIGTERM)


def restart_database(site, _):
    site.postgres.restart("SIGINT")


def crash_database(site, _):
    site.postgres.restart("SIGQUIT")


TAKEN_OVER = (kill, suspend_and_wake, hold_packets, cut_connections, stop)
RESTARTED = (restart_database, crash_database)


def bring_back(site, name):
    """Let the coordinator of a fault return to its machine, find that it serves no more, and begin again as standby."""
    if site.processes[name].poll() is None:
        site.signal(name, signal.SIGCONT)
    site.lines[name].heal()
    site.until(lambda: site.processes[name].poll() is not None, f"{name}, which has lost its lease, ends")
    code = site.processes[name].returncode
    before = site.log(name).count("standing_by")
    site.serve(name)
    site.until(lambda: site.log(name).count("standing_by") > before, f"{name} waits again")
    return code


def test_fifty_faults_change_no_bit_and_two_never_serve(tmp_path, postgres):
    """The random moments of the faults are those of one seed; the undisturbed run is the first one."""
    rng = random.Random(31)
    seconds = {}
    encoders = set()
    with DatabaseSite(tmp_path, DIGITS, postgres, coordinators=("c0", "c1", "c2")) as site:
        undisturbed = site.finish(site.request(ROUNDS))
        for number in range(FAULTS):
            # The faults of one kind come one after the other in turn, each in another round of a run of its own.
            fault = (*TAKEN_OVER, *RESTARTED)[number % 7]
            run = site.request(ROUNDS)
            round_of_fault = rng.randint(1, ROUNDS - 1)
            site.until(lambda run=run, to=round_of_fault: any(opened >= to for opened, _ in site.opened(run)), "opened")
            serving = site.serving()
            assert serving is not None
            served = site.served()
            entries = site.last_id()
            since = time.monotonic()
            fault(site, serving)
            if fault in TAKEN_OVER:
                taken_s = site.takeover_s(since, served)
                assert site.serving() != serving
                code = bring_back(site, serving)
                assert code == {kill: -signal.SIGKILL, stop: 0}.get(fault, 2), site.log(serving)[-1000:]
            else:
                site.until(lambda after=entries: site.last_id() > after, "the run goes on", every_s=0.01)
                taken_s = time.monotonic() - since
                assert site.serving() == serving
            seconds.setdefault(fault.__name__, []).append(taken_s)
            encoders.add(site.finish(run))
            print(f"{number + 1} {fault.__name__} in round {round_of_fault} of {run}: {taken_s:.2f} s", flush=True)
        site.check_one_served_at_a_time()
        leases = site.leases()
        with site.state.look() as state:
            assert state.journal.verify() == state.journal.last_id()
    for name, values in seconds.items():
        print(f"{name}: n={len(values)} median {statistics.median(values):.2f} s, largest {max(values):.2f} s")
    print(f"encoders: {sorted(encoders)}, undisturbed {undisturbed}; {len(leases)} leases, none overlaps")
    assert encoders == {undisturbed}
    assert max(max(values) for values in seconds.values()) <= LIMIT_S
