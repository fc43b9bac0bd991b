"""The guides: every command is run and its output compared with the page, or the page says why it is not run.

Blocks without a language are commands, run by bash in one folder for a page. A comment before a block says more:
``not run: REASON``, ``setup: NAME`` (a function here makes what a reader has), ``background`` (until the page ends).
A block ``text`` is output of the block before; ``…`` stands for anything. A block that begins with ``# NAME.EXT`` is
that file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from foreign_networks import hugging_face_export
from PIL import Image

from coordinator import simulate
from coordinator.cli import COMMANDS as HEADWATER
from coordinator.journal.entries import fact_of
from coordinator.rounds.request import Request
from coordinator.state.store import StateFolder
from edge_agent import data
from edge_agent.cli import COMMANDS as EDGE_AGENT
from edge_agent.core.task import ImageInput, Task

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "examples/guides"
PAGES = sorted(path.stem for path in GUIDES.glob("*.md"))
SLOW = {
    "data-center",
    "data-sets",
    "five-minutes",
    "method-without-torch",
    "own-parts",
    "own-photos",
    "photos-together",
    "research",
    "sensor-data",
}
"""Pages that take more than some ten seconds."""

PROGRAMS = {"headwater": ("coordinator", HEADWATER), "edge-agent": ("edge_agent", EDGE_AGENT)}
BLOCK = re.compile(r"^(?:<!-- ([^\n]*?) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMAGES = ImageInput(channels=3, height=32, width=32)


@dataclass(frozen=True)
class Block:
    """A fenced block with the comment before it."""

    note: str
    language: str
    text: str

    @property
    def unrun(self) -> str:
        return self.note.partition("not run: ")[2]

    @property
    def file(self) -> str:
        """Name of the file that the block is, or nothing."""
        named = re.match(r"# ([\w.-]+\.\w+)\n", self.text)
        return named[1] if named and self.language in {"toml", "python", "yaml"} else ""


def blocks(page: str) -> list[Block]:
    text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
    return [Block(note or "", language, body) for note, language, body in BLOCK.findall(text)]


def photos(folder: Path) -> None:
    """Folders ``photos`` and ``new-photos`` of PNG files, as a reader's camera would leave them."""
    samples = data.load("digits:slanted?n=500&seed=3", IMAGES, tuple("0123456789"))
    names = ("cat", "cup", "door", "shoe")
    for number, (image, label) in enumerate(zip(samples.inputs, samples.labels, strict=True)):
        if label < len(names):
            path = folder / "photos" / names[label] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = np.asarray(image)
            if picture.dtype != np.uint8:
                picture = np.clip((picture * 0.5 + 0.5) * 255, 0, 255).astype(np.uint8)
            Image.fromarray(picture.transpose(1, 2, 0) if picture.shape[0] == 3 else picture).save(path)
    (folder / "new-photos").mkdir()
    for path in sorted((folder / "photos/cat").iterdir())[:3]:
        shutil.move(path, folder / "new-photos" / path.name)


def recording(folder: Path) -> None:
    """``recording.csv``: three movements, sampled at 50 Hz, six recordings of each."""
    rng = np.random.default_rng(0)
    lines = ["time,ax,ay,az,activity,recording"]
    for number in range(18):
        name, rate, size = (("still", 0, 0.0), ("walking", 2, 1.0), ("running", 3, 2.5))[number % 3]
        for step in range(500):
            at = step / 50
            values = size * np.sin(2 * np.pi * rate * at + np.arange(3)) + rng.normal(0, 0.2, 3) + (0, 0, 9.81)
            cells = ",".join(f"{value:.3f}" for value in values)
            lines.append(f"{at:.2f},{cells},{name},{number}")
    (folder / "recording.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def leaf_set(folder: Path) -> None:
    """``femnist``: four writers of LEAF's layout, who draw bars in two directions."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        data_of = {}
        for writer in range(4):
            images = rng.integers(0, 60, (count, 28, 28))
            labels = np.arange(count) % 2
            for image, label in zip(images, labels, strict=True):
                at = int(rng.integers(4, 22))
                if label:
                    image[at : at + 3] = 255
                else:
                    image[:, at : at + 3] = 255
            pixels = (images.reshape(count, 784) / 255).tolist()
            data_of[f"f{writer:04d}_{writer:02d}"] = {"x": pixels, "y": labels.tolist()}
        content = {"users": [*data_of], "num_samples": [count] * 4, "user_data": data_of}
        (folder / "femnist" / part).mkdir(parents=True)
        (folder / "femnist" / part / f"all_data_0_{part}.json").write_text(json.dumps(content), encoding="utf-8")


@functools.cache
def small_bundle() -> bytes:
    """An encoder that was trained for two rounds: pages show what is done with it, not how good it is."""
    with tempfile.TemporaryDirectory() as folder:
        params = {"lr": 0.05, "momentum": 0.9}
        result = simulate(
            "fedavg", data="digits:optdigits?n=300", clients=2, rounds=2, params=params, out=folder, engine="serial"
        )
        return result.export(Path(folder) / "encoder.hwb").read_bytes()


def demo(folder: Path) -> None:
    """The bundle where 'headwater demo' leaves it."""
    path = folder / "headwater-demo/coordinator/runs/run-0001/run-0001.hwb"
    path.parent.mkdir(parents=True)
    path.write_bytes(small_bundle())


def coordinator(folder: Path) -> None:
    """``coordinator.toml`` with a state folder in which a run waits."""
    shutil.copy(ROOT / "configs/coordinator.toml", folder)
    task = Task(input=IMAGES, class_names=("a", "b"), encoder="small_cnn")
    with StateFolder(folder / "state").look(create=True) as state:
        state.journal.request_run(fact_of("run_requested", Request("fedavg", {}, 3, 0, task).body()))


def repository(folder: Path) -> None:
    """What is read of the repository, for a page that begins in it."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)


def networks(folder: Path) -> None:
    """A network in the form of Hugging Face's, with random weights, and the file that says what its inputs are."""
    hugging_face_export(folder)


SETUPS = {one.__name__: one for one in (photos, recording, demo, coordinator, repository, networks, leaf_set)}


@pytest.fixture
def environment(tmp_path_factory):
    """PATH with both programs of this copy; nothing of the reader's own settings."""
    programs = tmp_path_factory.mktemp("bin")
    for name, command in {
        "headwater": "-m coordinator",
        "edge-agent": "-m edge_agent",
        "python": "",
        "python3": "",
    }.items():
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("HEADWATER")},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "configs/package"))),
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "COLUMNS": "140",
        "NO_COLOR": "1",
    }


@pytest.fixture
def background(tmp_path, environment):
    """Start commands that are ended, with all their processes, after the page."""
    started = []

    def start(script: str) -> None:
        log = (tmp_path / f"background-{len(started)}.log").open("w")
        started.append(
            subprocess.Popen(
                ["bash", "-c", script], cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        )
        log.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # what ends so early has failed
            assert started[-1].wait(timeout=2) == 0

    yield start
    for process in reversed(started):
        os.killpg(process.pid, signal.SIGTERM)
    for process in started:
        process.wait(timeout=30)


def free_ports() -> dict[str, str]:
    """The ports of the pages, each with a free one to use in its place."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    found = dict(zip(("8883", "8884", "8480"), (str(one.getsockname()[1]) for one in sockets), strict=True))
    for one in sockets:
        one.close()
    return found


def pattern(shown: str) -> re.Pattern[str]:
    """What output has to contain: the lines shown, with any number of blanks, and anything for each ellipsis."""
    lines = [re.escape(" ".join(line.split())).replace("…", ".*?").replace(r"\ ", " ") for line in shown.splitlines()]
    return re.compile("\n".join(lines).replace("\n.*?\n", "\n.*?\n?"), re.DOTALL)


def one_blank(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def parameters():
    return [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in PAGES]


@pytest.mark.parametrize("page", parameters())
def test_commands_do_what_the_page_says(page, tmp_path, environment, background):
    ports = free_ports()
    output = ""
    for block in blocks(page):
        for name in re.findall(r"setup: (\w+)", block.note):
            SETUPS[name](tmp_path)
        if block.unrun:
            continue
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "text":
            assert pattern(block.text).search(one_blank(output)), f"the page shows\n{block.text}\nbut it is\n{output}"
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif not block.language:
            script = re.sub("|".join(ports), lambda match: ports[match[0]], f"set -euo pipefail\n{block.text}")
            if "background" in block.note:
                background(script)
                continue
            command = ["bash", "-c", script]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=400
            )
            output = done.stdout + done.stderr
            assert done.returncode == 0, f"{block.text}\n{output}"


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_run_or_says_why_not(page):
    for block in blocks(page):
        assert block.language in {"", "text", "toml", "ini", "json", "python", "yaml"}, block
        assert block.language != "python" or block.file or block.unrun, block
        assert re.fullmatch(r"((not run: .{10,}|background|setup: \w+)(; )?)*", block.note), block
        assert all(name in SETUPS for name in re.findall(r"setup: (\w+)", block.note)), block


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_not_run_exist_with_their_options(page, help_of):
    unrun = [block.text for block in blocks(page) if block.unrun and not block.language]
    lines = [line for text in unrun for line in re.split(r"\n| && | \| ", text)]
    for line in lines:
        words = line.split()
        for position, word in enumerate(words[:-1]):
            if position and words[position - 1] not in {"sudo", "coordinator"}:
                continue
            module, commands = PROGRAMS.get(word.rpartition("/")[2], ("", ()))
            command = words[position + 1]
            if module and re.fullmatch(r"[a-z]+", command):
                assert command in commands, line
                options = [one for one in words[position + 2 :] if re.fullmatch(r"--[a-z-]+", one)]
                assert all(option in help_of(module, command, words[position + 2 :]) for option in options), line


@pytest.fixture(scope="module")
def help_of():
    """Return a function that gives the ``--help`` of a command, or of its sub-command."""
    texts = {}

    def show_help(module, command, after):
        words = (command, *after[: command in {"release", "keys", "bench"}])
        if (module, words) not in texts:
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
                importlib.import_module(f"{module}.cli").main([*words, "--help"])
            assert not ended.value.code, words
            texts[module, words] = shown.getvalue()
        return texts[module, words]

    return show_help


STAND_INS = {
    "sudo": 'exec "$@"',
    "python3": 'mkdir -p "$3/bin"; for name in pip headwater edge-agent; do '
    'printf "#!/bin/sh\\necho $3\\n" >"$3/bin/$name"; chmod +x "$3/bin/$name"; done',
}
"""Programs of another machine: a virtual environment is a folder whose programs print its name."""


@pytest.mark.parametrize(
    "install, upgrade, program",
    [("data-center", "operations", "headwater"), ("raspberry-pi", "raspberry-pi", "edge-agent")],
)
def test_an_upgrade_changes_what_the_service_starts_and_the_way_back_works(tmp_path, install, upgrade, program):
    """The link was set inside of the folder that the installation had made, and the old version went on serving."""
    programs = tmp_path / "stand-ins"
    opt = tmp_path / "opt"
    programs.mkdir()
    opt.mkdir()
    for name, script in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (programs / name).chmod(0o755)

    def run(lines):
        script = "\n".join(lines).replace("/opt/", f"{opt}/").replace("/usr/local/bin", str(tmp_path))
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, check=True, timeout=60)

    def lines_about_a_version(page, version):
        """What makes the folder of a version and sets the link."""
        found = [block for block in blocks(page) if f"-m venv /opt/headwater-{version}" in block.text]
        assert len(found) == 1
        return [line for line in found[0].text.splitlines() if "-m venv" in line or "ln -" in line]

    def version_that_is_served():
        done = subprocess.run([opt / "headwater/bin" / program], check=True, capture_output=True, text=True, timeout=60)
        return Path(done.stdout.strip()).name

    run(lines_about_a_version(install, "0.1"))
    assert version_that_is_served() == "headwater-0.1"
    run(lines_about_a_version(upgrade, "0.2"))
    assert version_that_is_served() == "headwater-0.2"
    run(["ln -sfnT /opt/headwater-0.1 /opt/headwater"])
    assert version_that_is_served() == "headwater-0.1"
    assert sorted(path.name for path in opt.iterdir()) == ["headwater", "headwater-0.1", "headwater-0.2"]


def test_index_has_every_page_and_each_page_says_what_is_next():
    index = (GUIDES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+)\.md\)", index)) == set(PAGES) - {"README"}
    for page in set(PAGES) - {"README", "commands"}:
        last = (GUIDES / f"{page}.md").read_text(encoding="utf-8").strip().split("\n\n")[-1]
        assert last.startswith("Next: "), page
        assert "](" in last, page


@pytest.mark.parametrize(
    "shown, printed, same",
    [
        ("acc.personal  0.…  fitted", "acc.personal 0.912 fitted", True),
        ("first\n…\nlast", "first\nsecond\nthird\nlast", True),
        ("first\n…\nlast", "first\nsecond", False),
        ("0.91 of (x)", "0.92 of (x)", False),
    ],
)
def test_output_is_compared_as_said(shown, printed, same):
    assert bool(pattern(shown).search(one_blank(printed))) is same
