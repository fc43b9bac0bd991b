"""Texts of others as sentences."""

import pytest

from coordinator.text import SaidBefore, plain, sentence


@pytest.mark.parametrize(
    "text, expected",
    [
        ("correct the data, or [data]", "Correct the data, or [data]."),
        ("free space, then restart", "Free space, then restart."),
        ("'headwater doctor' says why", "'headwater doctor' says why."),
        ("images:pictures: has classes 'katze'", "images:pictures: has classes 'katze'."),
        ("agent-1 was replaced", "agent-1 was replaced."),
        ("Is done.", "Is done."),
        ("why?", "why?"),
        ("", ""),
    ],
)
def test_sentence_begins_with_a_capital_but_for_names_and_ends_with_a_stop(text, expected):
    assert sentence(text) == expected


def test_plain_text_has_no_marks_of_bold_and_code_and_keeps_the_rest():
    assert plain("at most ``peers`` others. **Privacy: it shows**, 2 ** 3 and a``") == (
        "at most peers others. Privacy: it shows, 2 ** 3 and a``"
    )


def test_a_reason_is_said_in_full_once_and_again_when_it_changes():
    said = SaidBefore()
    given = [
        ("a", "no data"),
        ("a", "no data"),
        ("b", "no data"),
        ("a", "no data"),
        ("a", "full disk"),
        ("a", "no data"),
    ]
    assert [said.reason(about, why) for about, why in given] == [
        "no data",
        "as before (2 ×)",
        "no data",
        "as before (3 ×)",
        "full disk",
        "no data",
    ]
