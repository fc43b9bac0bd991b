from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.errors import MessageError
from edge_agent.wire.topics import Topics, matches

AGENT = "porch-7"
DIGEST = "0123456789abcdef" * 4


def all_topics(topics: Topics, agent: str) -> dict[str, str]:
    return {
        "up": topics.up(agent),
        "dn": topics.down(agent),
        "ub": topics.up_chunks(agent),
        "db": topics.down_chunks(agent),
        "s": topics.presence(agent),
        "h": topics.heartbeat(agent),
        "b": topics.broadcast(DIGEST),
        "ann": topics.announce,
    }


def test_the_topics_are_those_of_the_protocol_page():
    assert all_topics(Topics("home"), AGENT) == {
        "up": "fl/1/home/a/porch-7/up",
        "dn": "fl/1/home/a/porch-7/dn",
        "ub": "fl/1/home/a/porch-7/ub",
        "db": "fl/1/home/a/porch-7/db",
        "s": "fl/1/home/s/porch-7",
        "h": "fl/1/home/h/porch-7",
        "b": "fl/1/home/b/0123456789abcdef",
        "ann": "fl/1/home/ann",
    }


def test_every_topic_keeps_to_seven_slashes_and_plain_characters():
    longest = Topics("f" * 63)
    everything = [*all_topics(longest, "a" * 63).values(), *longest.for_coordinator(), *longest.for_agent("a" * 63)]
    assert max(topic.count("/") for topic in everything) <= 7
    assert all(re.fullmatch(r"[a-z0-9_/+-]+", topic) and len(topic) < 256 for topic in everything)


@pytest.mark.parametrize("kind", ["up", "ub", "s", "h"])
def test_the_coordinator_reads_agent_and_kind_back_from_a_topic(kind):
    topics = Topics("home")
    assert topics.sender(all_topics(topics, AGENT)[kind]) == (AGENT, kind)


@given(st.from_regex(r"[a-z0-9][a-z0-9_-]{0,62}", fullmatch=True), st.sampled_from(["up", "ub", "s", "h"]))
def test_any_allowed_name_makes_the_round_trip(agent, kind):
    topics = Topics("home")
    assert topics.sender(all_topics(topics, agent)[kind]) == (agent, kind)


def test_filters_cover_what_each_side_must_hear_and_nothing_else():
    topics = Topics("home")
    heard = {
        side: {kind for kind, topic in all_topics(topics, AGENT).items() if any(matches(f, topic) for f in filters)}
        for side, filters in (("coordinator", topics.for_coordinator()), ("agent", topics.for_agent(AGENT)))
    }
    assert heard == {"coordinator": {"up", "ub", "s", "h"}, "agent": {"dn", "db", "ann"}}
    assert not any(matches(f, topics.down("other")) for f in topics.for_agent(AGENT))
    assert not any(matches(f, Topics("elsewhere").up(AGENT)) for f in topics.for_coordinator())


HOSTILE_NAMES = [
    "",
    "porch\n",
    "PORCH",
    "-porch",
    "porch/x",
    "..",
    "+",
    "#",
    "$SYS",
    "pörch",
    "a" * 64,
    "porch\0",
    " a",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize("form", ["fl/1/home/a/{}/up", "fl/1/home/s/{}", "fl/1/home/h/{}"])
def test_a_name_that_cannot_be_is_refused(name, form):
    with pytest.raises(MessageError):
        Topics("home").sender(form.format(name))


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "fl/1/home",
        "fl/1/home/",
        "fl/1/home/ann",
        "fl/1/home/b/0123456789abcdef",
        "fl/1/home/a/porch",
        "fl/1/home/a/porch/dn",
        "fl/1/home/a/porch/db",
        "fl/1/home/a/porch/zz",
        "fl/1/home/a/porch/up/x",
        "fl/1/home/x/porch",
        "fl/1/elsewhere/a/porch/up",
        "fl/2/home/a/porch/up",
        "fl/1/homes/porch",
        "a/porch/up",
        "s/porch",
        "/a/porch/up",
    ],
)
def test_what_no_agent_of_this_federation_says_is_refused(topic):
    with pytest.raises(MessageError):
        Topics("home").sender(topic)


def test_a_refusal_of_a_huge_topic_is_short():
    with pytest.raises(MessageError) as caught:
        Topics("home").sender("fl/1/home/a/" + "x" * 60_000 + "/up")
    assert len(str(caught.value)) < 300


def as_regex(topic_filter: str) -> str:
    """The same meaning by other means: one regular expression for each filter."""
    if topic_filter == "#":
        return r"(?s).*"
    parts = ["[^/]*" if level == "+" else re.escape(level) for level in topic_filter.removesuffix("/#").split("/")]
    return "(?s)" + "/".join(parts) + ("(/.*)?" if topic_filter.endswith("/#") else "")


levels = st.sampled_from(["a", "b", "", "ab"])


@given(
    st.lists(st.one_of(levels, st.just("+")), min_size=1, max_size=4),
    st.booleans(),
    st.lists(levels, min_size=1, max_size=5),
)
def test_matching_agrees_with_regular_expressions(wanted, rest, topic_levels):
    topic_filter = "/".join([*wanted, *(["#"] if rest else [])])
    topic = "/".join(topic_levels)
    assert matches(topic_filter, topic) is bool(re.fullmatch(as_regex(topic_filter), topic))


@pytest.mark.parametrize(
    "topic_filter, topic, expected",  # the examples of MQTT 3.1.1, section 4.7.1
    [
        ("sport/tennis/player1/#", "sport/tennis/player1", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
        ("#", "sport/tennis", True),
        ("sport/tennis/+", "sport/tennis/player1", True),
        ("sport/tennis/+", "sport/tennis/player1/ranking", False),
        ("sport/+", "sport", False),
        ("sport/+", "sport/", True),
        ("+/+", "/finance", True),
        ("/+", "/finance", True),
        ("+", "/finance", False),
    ],
)
def test_matching_agrees_with_the_examples_of_the_standard(topic_filter, topic, expected):
    assert matches(topic_filter, topic) is expected
