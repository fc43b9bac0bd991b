"""Times in one form for people."""

import pytest

from edge_agent.core.time_and_text import moment_of, show_time, utc_text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("2026-11-23T20:06:00+00:00", "2026-11-23 20:06:00 UTC"),
        ("2026-11-23T20:06:00.999Z", "2026-11-23 20:06:00 UTC"),
        ("2026-11-23T01:06:00+02:00", "2026-11-22 23:06:00 UTC"),
        ("2030-01-31", "2030-01-31 00:00:00 UTC"),
        ("0001-01-01T00:00+14:00", "0001-01-01T00:00+14:00"),
        ("soon", "soon"),
        ("", ""),
        (None, "None"),
    ],
)
def test_times_are_shown_in_one_form_and_other_texts_as_they_are(text, expected):
    assert show_time(text) == expected


def test_a_time_in_seconds_is_written_as_text_in_utc():
    assert utc_text(0.0) == "1970-01-01T00:00:00+00:00"
    assert moment_of(utc_text(1_900_000_000.9)).timestamp() == 1_900_000_000
