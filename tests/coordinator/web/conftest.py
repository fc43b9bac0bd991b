"""A state folder that a test fills, and the web view on it."""

from __future__ import annotations

import pytest
from web_site import FolderSite


@pytest.fixture
def site(tmp_path):
    made = FolderSite(tmp_path / "state")
    yield made
    made.close()
