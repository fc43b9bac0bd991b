"""An agent whose connection breaks again and again works on, and the status says so."""

from __future__ import annotations

from federation_harness import Federation

from coordinator.fleet.link_breaks import MOST_BREAKS, RECENT_S


def notes_of(fed, name):
    return next(agent["notes"] for agent in fed.coordinator.status()["agents"] if agent["id"] == name)


def reconnect(fed, name):
    """Lose the connection of an agent, which has another one at once."""
    fed.agents[name].transport.cut()
    fed.agents[name].transport.start()
    fed.wait(2)


def test_a_link_that_breaks_again_and_again_is_named_with_how_often_and_since_when(tmp_path):
    with Federation(tmp_path, agents=("a0", "a1")) as fed:
        fed.settle()
        for _ in range(MOST_BREAKS - 1):
            reconnect(fed, "a0")
        assert notes_of(fed, "a0") == [], "a few breaks are nothing to tell"
        for _ in range(70):
            reconnect(fed, "a0")
        (note,) = notes_of(fed, "a0")
        assert note.startswith(f"its connection to the broker has broken {MOST_BREAKS + 69} times since 20")
        assert "check its network" in note
        assert fed.coordinator.roster.get("a0").is_present
        assert notes_of(fed, "a1") == []
        fed.wait(RECENT_S + 1)
        assert notes_of(fed, "a0") == [], "it has stood for long enough"
        reconnect(fed, "a0")
        assert fed.coordinator.roster.get("a0").breaks.times == 1


def test_a_broker_that_restarts_makes_no_link_a_flapping_one(tmp_path):
    with Federation(tmp_path, agents=("a0",)) as fed:
        fed.settle()
        for _ in range(2 * MOST_BREAKS):
            fed.coordinator.transport.cut()
            fed.agents["a0"].transport.cut()
            fed.wait(1)
            fed.coordinator.transport.start()
            fed.agents["a0"].transport.start()
            fed.wait(3)
        assert notes_of(fed, "a0") == []


def test_a_round_that_waits_for_a_member_that_is_away_names_it(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}) as fed:
        fed.add("a0", seconds=30)
        fed.add("a1")
        fed.settle()
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("update_accepted"))
        fed.kill("a0")
        fed.until(lambda: "must come back" in fed.coordinator.waiting.what)
        assert "a0 must come back, or another train agent has to come" in fed.coordinator.waiting.what
        fed.add("a0")
        fed.finish()
