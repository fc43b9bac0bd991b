"""A real browser without a screen, for pages: what it requests, what it complains about, what axe-core finds."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = {"wide": 1280, "phone": 390}
VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in WIDTHS.values()]


@dataclass
class Seen:
    """A page, everything that it requested, and everything that went wrong on it."""

    page: object
    requests: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def violations(self):
        """What axe-core finds, all of its rules."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [(one["id"], [node["target"] for node in one["nodes"]]) for one in found]


@contextlib.contextmanager
def browser():
    """Chromium of the system; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
    if CHROMIUM is None:
        pytest.skip("no chromium on the path: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


@contextlib.contextmanager
def seen(chromium, url, scheme="light", width=1280, height=900):
    """The page at ``url``, after everything has been drawn."""
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        result = Seen(context.new_page())
        result.page.on("request", lambda request: result.requests.append(request.url))
        result.page.on("console", lambda message: result.troubles.append(f"{message.type}: {message.text}"))
        result.page.on("pageerror", lambda error: result.troubles.append(str(error)))
        result.page.goto(url)
        result.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        yield result
    finally:
        context.close()
