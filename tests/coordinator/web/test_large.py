"""Ten thousand agents, five hundred rounds, a hundred runs: what a page costs the server, and how large it is."""

from __future__ import annotations

import re
import time

import asgi_client
import pytest
from starlette.applications import Starlette
from web_site import LARGE_PAGES

from coordinator.web import metrics

MOST_S = 0.05
MOST_BYTES = 150_000


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


@pytest.mark.slow
def test_a_scrape_of_a_large_federation_is_cheap(site, monkeypatch, capsys):
    """In processor time; the first one reads the journal and the updates of the round that was closed last."""
    site.large()
    monkeypatch.setattr(metrics, "LEAST_PAUSE_S", 0.0)
    app = Starlette(routes=metrics.routes(site.path))
    spent = []
    for _ in range(6):
        begin = time.process_time()
        answer = asgi_client.get(app, "/metrics")
        spent.append(time.process_time() - begin)
        assert b'headwater_agents{state="online",tier="train"} 10000.0' in answer.content
        mean = re.search(rb'headwater_accuracy_ratio{scope="personal",statistic="mean"} (.*)', answer.content)[1]
        assert float(mean) == pytest.approx(0.195), "of 0.00 to 0.39"
    with capsys.disabled():
        print(f"/metrics: first {spent[0] * 1000:.0f} ms, then {min(spent[1:]) * 1000:.0f} ms")
    assert min(spent[1:]) < MOST_S
