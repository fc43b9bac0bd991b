"""Pictures of the guides, from 'headwater demo --web': fleet and run under way, and the report, as Chromium shows them.

``python tests/harness/screenshots.py`` runs a demo in a temporary folder and writes examples/guides/pictures.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

PICTURES = Path(__file__).parents[2] / "examples/guides/pictures"
CHROMIUM = "/usr/bin/chromium"
WIDTH = 1280
HEIGHT = 800
ROUND = 4
"""Of 6: the curves have a shape, and the run is still under way."""

LIMIT_MS = 600_000


def main() -> None:
    """Look at a demo while it runs, and at its report."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "headwater-demo"
        command = [sys.executable, "-m", "coordinator", "demo", "--web", "--dir", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
            try:
                address = next(
                    found[0] for line in demo.stdout or () if (found := re.search(r"http://127[\d.:]+", line))
                )
                with sync_playwright() as playwright:
                    chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                    page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
                    page.set_default_timeout(LIMIT_MS)
                    page.goto(address)
                    page.get_by_role("link", name="run-0001").click()
                    page.locator("#rounds").get_by_role("rowheader", name=str(ROUND), exact=True).wait_for()
                    _save(page, "run")
                    page.goto(address)
                    _save(page, "fleet")
                    page.goto(f"{address}/run?id=run-0001")
                    page.get_by_role("link", name="Report of this run").wait_for()
                    page.goto(f"{address}/report?id=run-0001")
                    _save(page, "report")
                    chromium.close()
            finally:
                demo.terminate()


def _save(page: Page, name: str) -> None:
    page.locator("figure canvas, figure .rows").first.wait_for()
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(PICTURES / f"{name}.png", optimize=True)
    print(name, (PICTURES / f"{name}.png").stat().st_size)


if __name__ == "__main__":
    main()
