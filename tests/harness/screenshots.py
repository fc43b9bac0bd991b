"""Pictures of the guides, from a run of 'headwater demo': fleet page, run page and report, as Chromium shows them.

``headwater demo && python tests/harness/screenshots.py headwater-demo/coordinator`` writes examples/guides/pictures.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PICTURES = Path(__file__).parents[2] / "examples/guides/pictures"
CHROMIUM = "/usr/bin/chromium"
WIDTH, HEIGHT = 1280, 800


def main(state: Path) -> None:
    """Serve the state folder on a free port, and look at it."""
    PICTURES.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "coordinator", "web", "--state", str(state), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as web:
        try:
            address = next(found[0] for line in web.stdout or () if (found := re.search(r"http://127[\d.:]+", line)))
            report = (state / "runs/run-0001/report.html").resolve().as_uri()
            pages = {"fleet": address, "run": f"{address}/run?id=run-0001", "report": report}
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
                for name, url in pages.items():
                    page.goto(url)
                    page.wait_for_timeout(1500)
                    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(64)
                    picture.save(PICTURES / f"{name}.png", optimize=True)
                    print(name, (PICTURES / f"{name}.png").stat().st_size)
                chromium.close()
        finally:
            web.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
