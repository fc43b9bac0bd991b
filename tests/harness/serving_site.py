"""A personal model for tests of serving: coloured squares, a linear encoder, and a head fitted on them."""

from __future__ import annotations

import http.client
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from edge_agent.bundle import installed
from edge_agent.bundle.unpacked import Bundle
from edge_agent.heads import saved
from edge_agent.personal.personalizer import Personalizer
from edge_agent.serving.http_api.server import HttpLimits
from edge_agent.serving.pair_source import NamedPair, PairSource
from edge_agent.serving.service import HttpSettings, Service

TOKEN = "a-token-for-tests-only"
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 210)}


def square(label: str, seed: int = 0, size: int = 8) -> np.ndarray:
    """Return pixels (size, size, 3) uint8 of the class's colour, with some noise."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(-15, 16, (size, size, 3))
    return np.clip(np.array(COLOURS[label]) + noise, 0, 255).astype(np.uint8)


def png(pixels: np.ndarray, form: str = "PNG") -> bytes:
    """Return pixels as an encoded image."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def fit_squares(bundle_path: Path, folder: Path, cache: Path, head: str = "lr", count: int = 20, seed: int = 0) -> Path:
    """Fit a head on squares of each colour and save it; returns its folder."""
    labels = [label for label in COLOURS for _ in range(count)]
    inputs = np.stack([square(label, seed * 1000 + number) for number, label in enumerate(labels)])
    personal = Personalizer.open(bundle_path, cache=cache)
    personal.fit(inputs, np.array(labels), head=head, own_classes=True, seed=seed)
    personal.save(folder)
    return folder


def fill_state(state: Path, bundle_path: Path, cache: Path, head: str = "lr", seed: int = 0) -> Bundle:
    """Make a state folder with a bundle in use and a head fitted on it."""
    bundle = installed.install(bundle_path, state / "bundles")
    fit_squares(bundle_path, state / "head", cache, head, seed=seed)
    return bundle


@dataclass
class Site:
    """A service that runs, and a client for it."""

    service: Service

    @property
    def port(self) -> int:
        """The port of the service."""
        return self.service.http.port

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Return status, JSON content (or bytes, where it is none) and header fields of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            raw = response.read()
            fields = {name.lower(): value for name, value in response.getheaders()}
        finally:
            connection.close()
        content = json.loads(raw) if fields.get("content-type") == "application/json" and raw else raw
        return response.status, content, fields

    def classify(self, body: bytes) -> dict[str, Any]:
        """Return the answer to an input, which must be one."""
        status, content, _ = self.ask("POST", "/classify", body)
        assert status == 200, content
        answer: dict[str, Any] = content
        return answer


def settings_for_tests(limits: HttpLimits | None = None, **more: Any) -> HttpSettings:
    """Return settings of a server on a free port of this machine."""
    return HttpSettings(("127.0.0.1", 0), TOKEN, limits=HttpLimits() if limits is None else limits, **more)


def named_source(bundle: Bundle, head: Path | None) -> PairSource:
    """Return a source of the pair of a bundle and a head."""
    return NamedPair(bundle, head)


def learned(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of the head in a folder."""
    return saved.load(folder).head.arrays
