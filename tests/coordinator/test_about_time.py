from __future__ import annotations

import pytest

from coordinator.text import about_time


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (0.2, "0 s"),
        (99.4, "99 s"),
        (100, "2 min"),
        (3569, "59 min"),
        (3570, "1 h"),
        (3599, "1 h"),
        (7200, "2 h"),
        (19_300, "5 h 22 min"),
    ],
)
def test_estimates_are_in_the_unit_that_people_would_use(seconds, expected):
    assert about_time(seconds) == expected
