"""What the page of an analysis says where a picture would show one colour."""

from __future__ import annotations

import pytest

from coordinator.research.analyze.page import sentences


def result_with(value):
    """The result of an analysis of two clients whose features have this CKA."""
    pairs = {"mean": value, "clients": ["c0", "c1"], "matrix": [[1.0, value], [value, 1.0]]}
    states = [{"round": number, "separation": {}, "cka": {"encoder": pairs}} for number in (1, 2)]
    return {"rounds": states, "communication": None, "accuracy": {}, "probe": None, "targets": []}


@pytest.mark.parametrize("value, is_same", [(1.0, True), (0.999999, True), (0.998, False)])
def test_cka_of_one_shared_encoder_is_said_to_be_one_whatever_it_has_learned(value, is_same):
    ((_, text),) = sentences(result_with(value))
    assert ("these clients use one shared encoder, for which CKA is 1" in text) == is_same
    assert ("all pairs lie between 0.998 and 0.998" in text) != is_same
