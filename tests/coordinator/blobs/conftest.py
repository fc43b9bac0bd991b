"""What tests of stores share: a server that speaks S3 and checks every signature."""

from __future__ import annotations

import pytest
from s3_site import S3Site, use_keys


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3 and checks every signature, with a bucket 'models'."""
    pytest.importorskip("s3fs")
    site = S3Site()
    yield site
    site.close()


@pytest.fixture(autouse=True)
def as_owner(request, monkeypatch):
    """The environment has the keys of the bucket's owner."""
    if "s3" in request.fixturenames:
        use_keys(monkeypatch, *request.getfixturevalue("s3").keys["owner"])
