from __future__ import annotations

import os
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest

from edge_agent import heads, methods
from edge_agent.core.errors import UnknownName, UsageError
from edge_agent.core.registry import Registry, load_reference


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package with two members, one of them a folder, and some files that are none."""
    name = "registry_under_test"
    folder = tmp_path / name
    (folder / "large").mkdir(parents=True)
    for file, text in {
        "__init__.py": "",
        "base.py": "raise AssertionError('base is no member')",
        "_private.py": "raise AssertionError('private')",
        "listing.py": "",
        "small.py": "VALUE = 1",
        "broken.py": "raise ImportError('torch is not here')",
        "large/__init__.py": "VALUE = 2",
        "notes.txt": "",
    }.items():
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def test_a_file_or_a_folder_is_a_member_and_nothing_is_imported_to_list_them(package):
    registry = Registry("method", package, besides=("listing",))
    assert registry.names() == ("broken", "large", "small")
    assert not any(module.startswith(f"{package}.") for module in sys.modules)


def test_only_the_member_that_is_asked_for_is_imported(package):
    registry = Registry("method", package)
    assert registry.load("small").VALUE == 1
    assert registry.load("large").VALUE == 2
    assert f"{package}.broken" not in sys.modules
    with pytest.raises(ImportError, match="torch is not here"):
        registry.load("broken")


@pytest.mark.parametrize("name", ["smal", "base", "_private", "", "small.VALUE", "..os", "os", "small/../small"])
def test_what_is_no_member_is_refused_and_what_is_known_listed(package, name):
    with pytest.raises(UnknownName) as caught:
        Registry("method", package, besides=("listing",)).load(name)
    assert f"unknown method '{name}'" in str(caught.value)
    assert "known: broken, large, small" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_typo_is_answered_with_the_nearest_name(package):
    with pytest.raises(UnknownName, match=r"did you mean 'small'\?"):
        Registry("method", package).load("smal")


def test_ones_own_member_is_found_in_this_registry_alone(package):
    registry = Registry("head", package)
    member = SimpleNamespace()
    registry.add("mine", member)
    assert registry.load("mine") is member
    assert "mine" in registry.names()
    assert "mine" not in Registry("head", package).names()


def test_packages_of_others_join_through_their_entry_points(package, monkeypatch):
    points = [
        metadata.EntryPoint("theirs", "json:dumps", "headwater.test"),
        metadata.EntryPoint("small", "json:loads", "headwater.test"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: [p for p in points if p.group == group])
    registry = Registry("method", package, entry_points="headwater.test")
    assert "theirs" in registry.names()
    assert registry.load("theirs").__name__ == "dumps"
    assert registry.load("small").VALUE == 1, "a package of others cannot replace one of ours"
    assert "theirs" not in Registry("method", package, entry_points="headwater.else").names()
    assert "theirs" not in Registry("method", package).names()


def test_method_of_another_package_is_called_as_its_entry_point_and_not_as_its_file(tmp_path, monkeypatch):
    source = "from edge_agent.methods.fedavg import FedAvg\n\nclass Own(FedAvg):\n    pass\n"
    (tmp_path / "others_module.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    point = metadata.EntryPoint("theirs", "others_module:Own", "headwater.methods")
    monkeypatch.setitem(vars(methods.registry), "_plugins", {"theirs": point})
    assert methods.create("theirs").name == "theirs"
    assert methods.create("fedavg").name == "fedavg"


def test_what_is_installed_is_read_once(package, monkeypatch):
    asked = []
    monkeypatch.setattr(metadata, "entry_points", lambda group: asked.append(group) or [])
    registry = Registry("method", package, entry_points="headwater.test")
    assert registry.names() == registry.names()
    registry.load("small")
    assert asked == ["headwater.test"]


def test_members_of_others_that_lack_something_are_told_by_what_they_lack(monkeypatch):
    monkeypatch.setitem(heads.registry._extra, "lacking", type("Mine", (heads.Head,), {}))
    expected = r"'lacking' \(.*\.Mine\) has no _fit, _predict; edge_agent\.heads\.base\.Head describes"
    with pytest.raises(UsageError, match=expected):
        heads.create("lacking")


@pytest.mark.parametrize("package", [methods, heads])
@pytest.mark.parametrize("member", [dict, "no class", SimpleNamespace(local_update=print)])
def test_members_of_others_of_another_kind_are_refused(monkeypatch, package, member):
    monkeypatch.setitem(package.registry._extra, "other", member)
    with pytest.raises(UsageError, match=r"'other' .* expected one subclass of edge_agent\.\w+\.base\.\w+, found none"):
        package.get("other")


def test_a_module_with_two_classes_of_the_kind_is_ambiguous(monkeypatch):
    module = ModuleType("theirs")
    for name in ("One", "Two"):
        setattr(module, name, type(name, (methods.Method,), {"__module__": "theirs"}))
    monkeypatch.setitem(methods.registry._extra, "theirs", module)
    with pytest.raises(UsageError, match="found One, Two"):
        methods.get("theirs")


def test_a_file_is_imported_once_and_again_when_its_content_has_changed(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("VALUE = object()\nNUMBER = 1\n")
    first = load_reference("data", f"{file}:VALUE")
    assert load_reference("data", f"{file}:VALUE") is first
    stamp = file.stat()
    file.write_text("VALUE = object()\nNUMBER = 2\n")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # a compiled file would pass for up to date
    assert load_reference("data", f"{file}:NUMBER") == 2
