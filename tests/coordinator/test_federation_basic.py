from __future__ import annotations

import pytest
from federation_harness import Federation


def test_smoke(tmp_path):
    with Federation(tmp_path) as fed:
        fed.request()
        print(fed.finish())
        print(fed.metrics())
        print(fed.encoder_sha256)
