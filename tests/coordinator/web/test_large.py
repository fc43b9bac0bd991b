"""Ten thousand agents, five hundred rounds, a hundred runs: what a page costs the server, and how large it is."""

from __future__ import annotations

import time

import pytest
from web_site import LARGE_PAGES

MOST_S, MOST_BYTES = 0.05, 150_000


@pytest.mark.slow
def test_pages_of_a_large_federation_are_cheap_and_small(site, capsys):
    """In processor time, which other work on the machine does not change; the best of five."""
    site.large()
    with site.client() as client:
        for path in LARGE_PAGES:
            spent = []
            for _ in range(5):
                begin = time.process_time()
                answer = client.get(path)
                spent.append(time.process_time() - begin)
            with capsys.disabled():
                print(f"{path[:30]}: {min(spent) * 1000:.0f} ms, {len(answer.content) / 1000:.0f} kB")
            assert answer.status_code == 200
            assert min(spent) < MOST_S
            assert len(answer.content) <= MOST_BYTES
