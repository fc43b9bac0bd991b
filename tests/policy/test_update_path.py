"""The table in coordinator/README.md of the files that an update passes is the one that is measured."""

from __future__ import annotations

import re
import subprocess
import sys

import update_path


def test_the_table_names_the_files_that_an_update_passes(root):
    command = [sys.executable, update_path.__file__]  # its own process: files that are imported on the way count
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    measured = sorted(line.partition(": ")[0] for line in done.stdout.splitlines()[:-1])
    text = (root / "coordinator/README.md").read_text(encoding="utf-8")
    section = text.partition("## The way of an update through the code\n")[2].partition("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("|"))
    named = [(root / "coordinator" / link).resolve().relative_to(root) for link in re.findall(r"\]\(([^)]+)\)", table)]
    assert sorted(map(str, named)) == measured
    assert f"passes {len(measured)} files" in section
