"""Write configs/locks: what pip resolves for each extra on this platform, with hashes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "configs" / "locks"
EXTRAS = ("agent", "heads", "train", "export", "coordinator")
"""Those that people install. What 'research' adds is in the coordinator's lock already, and 'all' is their union."""

HEAD = """\
# What pip resolves for '.[{extra}]' on Linux, x86-64, Python {version}; made by tests/harness/lock_files.py.
# pip install --require-hashes -r configs/locks/{extra}.txt && pip install --no-deps .
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolved(extra: str) -> dict[str, tuple[str, str]]:
    """Package -> version and SHA-256 of its file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", "--report", str(report), "-c", "configs/constraints-cpu.txt", f".[{extra}]"]
        subprocess.run(command, cwd=ROOT, check=True)
        items = json.loads(report.read_bytes())["install"]
    found = {}
    for item in items:
        name = canonical(item["metadata"]["name"])
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if name != "headwater":
            found[name] = item["metadata"]["version"], hashes["sha256"]
    return found


def text(extra: str, packages: dict[str, tuple[str, str]]) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"{name}=={number} \\\n    --hash=sha256:{sha}\n" for name, (number, sha) in sorted(packages.items())]
    return HEAD.format(extra=extra, version=version) + "".join(lines)


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    for extra in sys.argv[1:] or EXTRAS:
        (LOCKS / f"{extra}.txt").write_text(text(extra, resolved(extra)), encoding="utf-8")
        print(f"wrote {LOCKS / extra}.txt")


if __name__ == "__main__":
    main()
