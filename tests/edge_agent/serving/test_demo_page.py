"""The page at the end of ``headwater demo --serve``."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest
from serving_site import fill_state

from coordinator.cli.demo_page import PHOTOS, served
from edge_agent.core.task import ImageInput


def test_a_new_device_answers_pictures_on_a_page_until_it_is_ended(make_bundle, tmp_path):
    bundle = make_bundle(global_head=True).path
    fill_state(tmp_path / "device", bundle, tmp_path / "cache")
    config = tmp_path / "device.toml"
    config.write_text(
        'id = "d"\nfederation = "demo"\ntier = "head"\nstate = "device"\n\n[broker]\nurl = "mqtt://127.0.0.1:1"\n\n'
        '[data]\nsource = "digits:rendered?n=20"\n',
        encoding="utf-8",
    )
    spec = ImageInput(channels=3, height=8, width=8)
    with served(config, "digits:rendered?n=20", spec, tmp_path / "serve.log") as page:
        address, _, token = page.partition("#token=")
        assert token
        answers = wait_for_answers(address, PHOTOS)
        assert {answer["source"].split()[-1] for answer in answers} == {f"{number:02}.png" for number in range(PHOTOS)}
    with pytest.raises(OSError, match=r"refused|reset"):
        urllib.request.urlopen(f"{address}live", timeout=5)


def wait_for_answers(address, count):
    """Ask for the last answers until there are enough, which fails when no more come for half a minute."""
    pause = threading.Event()
    answers = []
    for _ in range(300):
        with urllib.request.urlopen(f"{address}history", timeout=30) as response:
            answers = json.load(response)["answers"]
        if len(answers) >= count:
            break
        pause.wait(0.1)
    assert len(answers) == count
    return answers
