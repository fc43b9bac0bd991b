"""The guide about aggregators names the methods that are summed in parts, and the others, as they are."""

from __future__ import annotations

import re

from edge_agent import methods


def test_the_guide_lists_the_methods_whose_step_is_a_sum_and_those_whose_is_not(root):
    text = (root / "examples/guides/aggregators.md").read_text(encoding="utf-8")
    summed = re.search(r"^\| ([a-z0-9_, ]+) \| taken and summed by aggregators \|$", text, re.MULTILINE)
    single = re.search(r"^\| afl with `remember`, ([a-z0-9_, ]+) \| taken by aggregators;", text, re.MULTILINE)
    assert summed
    assert single
    sums = [name for name in methods.names() if methods.create(name).server_step_is_sum()]
    assert summed[1].split(", ") == sums
    assert single[1].split(", ") == [name for name in methods.names() if name not in sums]
    assert not methods.create("afl", {"remember": True}).server_step_is_sum()
