"""The lock files name everything that an extra needs, each with a hash, and no place that it comes from."""

from __future__ import annotations

import importlib.metadata
import re
import sys

import lock_files
import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLATFORM = default_environment() | {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11"}


def locked(root, extra):
    text = (root / "configs/locks" / f"{extra}.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^(\S+)==(\S+) \\\n    --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    rest = re.sub(r"^\S+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}\n", "", text, flags=re.MULTILINE)
    assert all(line.startswith("#") for line in rest.splitlines()), "packages with hashes, and comments"
    return {name: Version(version) for name, version, _ in entries}


def needed(root, extra):
    """Requirements of an extra and all extras in it, and of the package itself."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [*project["dependencies"], f"headwater[{extra}]"]
    found = []
    while waiting:
        wanted = Requirement(waiting.pop())
        if wanted.name == "headwater":
            waiting += [one for name in wanted.extras for one in project["optional-dependencies"][name]]
        elif wanted.marker is None or wanted.marker.evaluate(PLATFORM):
            found.append(wanted)
    return found


@pytest.mark.parametrize("extra", lock_files.EXTRAS)
def test_lock_has_every_dependency_of_its_extra_in_an_allowed_version(root, extra):
    packages = locked(root, extra)
    wanted = needed(root, extra)
    assert wanted
    missing = [str(one) for one in wanted if lock_files.canonical(one.name) not in packages]
    assert missing == [], "python tests/harness/lock_files.py renews the locks"
    assert [str(one) for one in wanted if not one.specifier.contains(packages[lock_files.canonical(one.name)])] == []


@pytest.mark.parametrize("extra", lock_files.EXTRAS)
def test_lock_has_what_its_packages_need_themselves(root, extra):
    """As the packages that are installed here say it."""
    packages = locked(root, extra)
    missing = []
    for name in packages:
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for one in map(Requirement, requires):
            applies = one.marker is None or one.marker.evaluate({**PLATFORM, "extra": ""})
            if applies and lock_files.canonical(one.name) not in packages:
                missing.append(f"{name} needs {one}")
    assert missing == []


@pytest.mark.parametrize("extra", lock_files.EXTRAS)
def test_lock_names_no_host_and_agrees_with_the_constraints(root, extra):
    text = (root / "configs/locks" / f"{extra}.txt").read_text(encoding="utf-8")
    assert not re.search(r"https?:|file:|index-url|find-links|@ ", text)
    packages = locked(root, extra)
    constraints = (root / "configs/constraints-cpu.txt").read_text(encoding="utf-8")
    for one in (Requirement(line) for line in constraints.splitlines() if line and not line.startswith("#")):
        if lock_files.canonical(one.name) in packages:
            assert one.specifier.contains(packages[lock_files.canonical(one.name)])
