from __future__ import annotations

import pytest

from edge_agent.bundle.figure_rows import variant_rows


def rows_of(accuracies: dict[str, tuple[float, float]]) -> list[tuple[str, object]]:
    domains = {name: {"support": 60, "fp32": fp32, "int8": int8} for name, (fp32, int8) in accuracies.items()}
    return variant_rows({"variants": {}, "domains": domains, "ranges": "", "note": ""})


LOSES = ("on a", "fp32 90.0 %, int8 80.0 % of 60 samples; of 3 domains int8 loses most here")
GAINS = ("on c", "fp32 80.0 %, int8 90.0 % of 60 samples; of 3 domains int8 gains most here")
NEITHER = ("on domains", "int8 is as often right as fp32 on each of 3 held-out domains")


@pytest.mark.parametrize(
    "accuracies, rows",
    [
        ({"a": (0.9, 0.8), "b": (0.9, 0.9), "c": (0.8, 0.9)}, [LOSES, GAINS]),
        ({"a": (0.9, 0.8), "b": (0.9, 0.9), "c": (0.9, 0.9)}, [LOSES]),
        ({"a": (0.9, 0.9), "b": (0.9, 0.9), "c": (0.8, 0.9)}, [GAINS]),
        ({"a": (1.0, 1.0), "b": (0.9, 0.9), "c": (0.8, 0.8)}, [NEITHER]),
        ({"a": (1.0, 1.0)}, [("on a", "fp32 100.0 %, int8 100.0 % of 60 samples")]),
    ],
)
def test_int8_loses_and_gains_only_where_there_is_a_difference(accuracies, rows):
    """It said 'int8 loses most here' of a domain with 100 % in both precisions."""
    assert rows_of(accuracies) == rows
