"""What large blobs by HTTP cost beyond their own bytes, in small."""

from __future__ import annotations

import yardstick_blobs


def test_a_fleet_receives_little_more_than_its_blobs(tmp_path):
    measured = yardstick_blobs.measure(tmp_path, agents=20, size_bytes=500_000)
    assert measured.needed == 20 * 500_000
    assert 1.0 < measured.ratio <= 1.05


def test_a_link_that_is_cut_costs_what_was_under_way(tmp_path):
    """A link of 20 MB/s, with up to one second of it in the buffers of two connections at each cut."""
    measured = yardstick_blobs.measure(tmp_path, agents=1, size_bytes=40_000_000, rate=20e6, cuts=3)
    assert measured.cuts == 3
    assert 1.0 < measured.ratio <= 1.5
