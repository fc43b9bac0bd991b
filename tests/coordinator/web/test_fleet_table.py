"""The table of agents against a twin that sorts everything and cuts it into pages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.state.fleet_rows import AgentRow, Presence
from coordinator.web.fleet_table import SORTS, Query, Totals, page_of
from edge_agent.core.errors import UsageError


def fleet(size, seed=0):
    draw = random.Random(seed)
    pick = lambda *values: draw.choice((None, *values))
    return [
        AgentRow(
            f"a{number:03d}",
            tier=draw.choice(("train", "head")),
            presence=draw.choice([*Presence]),
            seen_at=pick(1.0, 2.0, 3.0),
            software=draw.choice(("", "0.1.0", "0.2.0")),
            bundle_id=draw.choice(("", "b")),
            release=pick(1, 2),
            local=pick(0.5, 0.6),
            shared=pick(0.7),
            personal=pick(0.5, 0.65, 0.8),
            rss_mb=pick(100.0, 200.0),
            better_alone=draw.random() < 0.2,
            pinned=pick(1),
        )
        for number in range(size)
    ]


def parameters(address):
    from urllib.parse import parse_qsl

    return dict(parse_qsl(address.removeprefix("?")))


def walked(agents, query, size):
    """Ids of all pages, following the links to the next one, and back again."""
    pages = []
    page = page_of(agents, query, size)
    while True:
        pages.append([row.id for row in page.rows])
        if not page.following:
            break
        page = page_of(agents, Query.of(parameters(page.following)), size)
    back = [pages[-1]]
    while page.previous:
        page = page_of(agents, Query.of(parameters(page.previous)), size)
        back.append([row.id for row in page.rows])
    assert back[::-1] == pages
    return pages


def twin(agents, query):
    value = SORTS[query.sort]
    known = [row for row in agents if value(row) is not None]
    known = sorted(known, key=lambda row: row.id)
    known = sorted(known, key=value, reverse=query.descending)
    return [row.id for row in known] + [row.id for row in agents if value(row) is None]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 1000), st.sampled_from(sorted(SORTS)), st.booleans(), st.integers(1, 9))
def test_pages_in_both_directions_are_those_of_a_twin(count, seed, sort, descending, size):
    agents = fleet(count, seed)
    query = Query(sort=sort, descending=descending)
    pages = walked(agents, query, size)
    assert [name for one in pages for name in one] == twin(agents, query)
    assert all(len(one) == size for one in pages[:-1])


def test_agents_that_go_or_come_while_one_reads_shift_no_page():
    agents = fleet(30)
    query = Query(sort="id")
    first = page_of(agents, query, 10)
    fewer = [row for row in agents if row.id not in {"a001", "a009", "a015"}]
    second = page_of(fewer, Query.of(parameters(first.following)), 10)
    assert [row.id for row in second.rows][:6] == ["a010", "a011", "a012", "a013", "a014", "a016"]


def test_agents_are_searched_and_filtered_before_they_are_cut_into_pages():
    agents = fleet(60)
    page = page_of(agents, Query(find="A01", only="alone", tier="head"))
    expected = [r.id for r in agents if "a01" in r.id and r.better_alone and r.tier == "head"]
    assert sorted(row.id for row in page.rows) == expected != []
    assert page.selected == len(expected)


def test_first_are_those_that_somebody_should_look_at():
    rows = page_of(fleet(40), Query(), 40).rows
    assert [row.presence for row in rows[:2]] == ["fault", "fault"]
    assert rows[-1].presence == "online"


@pytest.mark.parametrize("after", ["x", "[", '["a"]', "[1,2,3]", '{"a":1}', '[{"a":1},"b"]', "[[[[", '["x","a"]'])
def test_key_of_no_page_is_a_clear_error(after):
    with pytest.raises(UsageError, match="names no page"):
        page_of(fleet(60), Query(sort="personal", after=after))


@pytest.mark.parametrize(
    "given, message",
    [({"sort": "secret"}, "sort=secret"), ({"only": "x"}, "only=x"), ({"tier": "x"}, "tier")],
)
def test_unknown_parameters_name_those_that_there_are(given, message):
    with pytest.raises(UsageError, match=message):
        Query.of(given)


def test_totals_are_over_all_agents_by_hand():
    rows = [
        AgentRow("a", presence=Presence.ONLINE, local=0.5, personal=0.7),
        AgentRow("b", presence=Presence.FAULT, local=0.6, shared=0.5, personal=0.5, better_alone=True),
        AgentRow("c", presence=Presence.OFFLINE, personal=0.9, pinned=2),
    ]
    totals = Totals.from_rows(rows)
    assert (totals.agents, totals.present, totals.faulty) == (3, 2, 1)
    assert (totals.pinned, totals.better_alone, totals.refused) == (1, 1, 0)
    assert (totals.local.value, totals.local.agents) == (pytest.approx(0.55), 2)
    assert (totals.personal.value, totals.personal.agents) == (pytest.approx(0.7), 3)
    assert (totals.gain.value, totals.gain.agents) == (pytest.approx(0.05), 2)
    assert (totals.shared.value, totals.shared.agents) == (0.5, 1)
