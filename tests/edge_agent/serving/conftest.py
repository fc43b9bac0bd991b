"""A personal model of three colours, and a service that answers with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_site import Site, fit_squares, named_source, settings_for_tests

from edge_agent.bundle.unpacked import Bundle
from edge_agent.personal.personalizer import load_bundle
from edge_agent.serving.pair_source import PairSource
from edge_agent.serving.service import Device, Service


@pytest.fixture
def bundle_path(make_bundle) -> Path:
    return make_bundle(int8=True, global_head=True).path


@pytest.fixture
def bundle(bundle_path, tmp_path) -> Bundle:
    return load_bundle(bundle_path, tmp_path / "cache")


@pytest.fixture
def head(bundle_path, tmp_path) -> Path:
    return fit_squares(bundle_path, tmp_path / "head", tmp_path / "cache")


@pytest.fixture
def source(bundle, head) -> PairSource:
    return named_source(bundle, head)


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    """A function that starts a service; all of them are closed at the end."""
    running: list[Service] = []

    def start(source: PairSource, device: Device = Device(), **settings: Any) -> Site:  # noqa: B008 - it is frozen
        service = Service(source, settings_for_tests(**settings), device)
        running.append(service)
        service.start()
        return Site(service)

    yield start
    for service in running:
        service.close()


@pytest.fixture
def site(serve, source) -> Site:
    return serve(source)
