from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_agent.core import locks
from edge_agent.core import storage as storage_module
from edge_agent.core.errors import StateError, TensorsError
from edge_agent.wire.tensors import encode


class PowerCut(BaseException):
    """Everything ends here: nothing that runs afterwards may count."""


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_written_with_its_folders_and_nothing_beside_it(tmp_path, durable):
    path = tmp_path / "deep" / "er" / "file"
    storage_module.write_atomic(path, b"first", durable=durable)
    storage_module.write_atomic(path, memoryview(b"second"), durable=durable)
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_may_be_written_in_pieces(tmp_path):
    storage_module.write_atomic(tmp_path / "file", b"one", memoryview(b"two"), b"", b"three")
    assert (tmp_path / "file").read_bytes() == b"onetwothree"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has none")
def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "null").symlink_to(os.devnull)
    for path in (pipe, tmp_path / "null"):
        with pytest.raises(OSError, match="it is a FIFO, socket or device"):
            storage_module.write_atomic(path, b"content")
    assert pipe.is_fifo()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["null", "pipe"]


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_full_disk_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch, step, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    if step == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    elif step == "replace":
        monkeypatch.setattr(Path, "replace", full)
    else:
        monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        storage_module.write_atomic(path, b"new")
    monkeypatch.undo()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == ([("file", before)] if before else [])


MOMENTS = [(0, False), *((step, after) for step in range(1, 5) for after in (False, True))]
"""Just before and just after each of the five calls; an open file that nobody holds would only warn."""

CALLS = [(Path, "open"), (os, "fsync"), (Path, "replace"), (os, "open")]


def steps_of_a_write(monkeypatch, path: Path) -> list[str]:
    """The names of the system calls that matter, in the order in which one write makes them."""
    seen: list[str] = []
    for owner, name in CALLS:
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, real=real, name=name, **kw: (seen.append(name), real(*args, **kw))[1]
        )
    storage_module.write_atomic(path, b"new")
    monkeypatch.undo()
    return seen


def test_the_content_is_on_disk_before_it_gets_its_name_and_the_name_before_it_counts(tmp_path, monkeypatch):
    assert steps_of_a_write(monkeypatch, tmp_path / "file") == ["open", "fsync", "replace", "open", "fsync"]


@pytest.mark.parametrize("crash_at, after", MOMENTS)
def test_a_crash_at_any_step_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, crash_at, after):
    path = tmp_path / "file"
    count = [0]
    path.write_bytes(b"old")

    def counted(real):
        def call(*args, **kw):
            here = count[0]
            count[0] = count[0] + 1
            if here == crash_at and not after:
                raise PowerCut
            result = real(*args, **kw)
            if here == crash_at:
                raise PowerCut
            return result

        return call

    for owner, name in CALLS:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    with pytest.raises(PowerCut):
        storage_module.write_atomic(path, b"new")
    monkeypatch.undo()
    replaced = crash_at + after > 2
    assert path.read_bytes() == (b"new" if replaced else b"old")


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = (
        "import os, signal, sys; from pathlib import Path; from edge_agent.core import storage\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "storage.write_atomic(Path(sys.argv[1]), b'new' * 1000)"
    )
    child = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert child.returncode == -9
    assert path.read_bytes() == b"old"
    storage_module.write_atomic(path, b"newer")
    assert path.read_bytes() == b"newer"


def test_json_makes_the_round_trip(tmp_path):
    content = {"b": [1, None, 0.5], "a": {"ü": "☃"}}
    storage_module.write_json(tmp_path / "file", content)
    assert storage_module.read_json(tmp_path / "file") == content
    assert storage_module.read_json(tmp_path / "none") is None


def test_json_without_a_word_for_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="nan"):
        storage_module.write_json(tmp_path / "file", {"a": float("nan")})
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"1", b'"text"', b"\xff", b"[" * 100_000, b'{"a":' * 50_000], ids=repr
)
def test_a_damaged_json_file_is_named_and_the_way_out_told(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(StateError, match="remove it to start afresh") as caught:
        storage_module.read_json(path)
    assert str(path) in str(caught.value)


def test_a_folder_in_the_place_of_a_json_file_is_told(tmp_path):
    with pytest.raises(StateError):
        storage_module.read_json(tmp_path)


def test_tensors_make_the_round_trip_and_their_hash_is_that_of_the_file(tmp_path):
    tensors = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7)}
    digest = storage_module.write_tensors(tmp_path / "file", tensors, {"kind": "x"})
    found = storage_module.read_tensors(tmp_path / "file")
    assert {name: array.tolist() for name, array in found.items()} == {"w": [[0, 1, 2], [3, 4, 5]], "n": 7}
    assert (
        digest
        == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
        == storage_module.sha256_file(tmp_path / "file")
    )
    assert (tmp_path / "file").read_bytes() == encode(tensors, {"kind": "x"})


def test_tensors_that_are_not_there_or_damaged_are_told_apart(tmp_path):
    with pytest.raises(StateError, match="cannot be read"):
        storage_module.read_tensors(tmp_path / "none")
    (tmp_path / "file").write_bytes(encode({"a": np.zeros(3)})[:-1])
    with pytest.raises(TensorsError):
        storage_module.read_tensors(tmp_path / "file")


HOLD = (
    "import sys; from pathlib import Path; from edge_agent.core.locks import folder_lock\n"
    "with folder_lock(Path(sys.argv[1]), 'edge-agent porch'):\n"
    "    print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of ``tmp_path / 'state'``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "state")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "held\n"
        yield child
        child.kill()


def test_a_folder_belongs_to_one_process_and_the_other_is_named(tmp_path, holder):
    expected = rf"is in use by edge-agent porch \(process {holder.pid}\); stop it, or choose another state folder"
    for _ in range(2):  # asking must not take the holder's name away
        with pytest.raises(StateError, match=expected):
            with locks.folder_lock(tmp_path / "state", "me"):
                pytest.fail("the lock was given twice")


def test_a_lock_goes_with_its_process_also_when_that_is_killed(tmp_path, holder):
    holder.kill()
    holder.wait()
    with locks.folder_lock(tmp_path / "state", "me"):
        assert (tmp_path / "state" / "lock").read_text() == f"me (process {os.getpid()})"


def test_a_lock_is_given_back_when_the_work_ends_in_an_error(tmp_path):
    with pytest.raises(RuntimeError):
        with locks.folder_lock(tmp_path, "me"):
            raise RuntimeError
    with locks.folder_lock(tmp_path, "me again"):
        pass


def test_sweeping_removes_what_writes_left_behind_and_nothing_else(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    left = [tmp_path / ".a.json.0012abcd.tmp", tmp_path / "deep" / "er" / ".b.77.tmp"]
    kept = [tmp_path / "a.json", tmp_path / "deep" / "notes.tmp", tmp_path / ".hidden", tmp_path / "lock"]
    for path in [*left, *kept]:
        path.write_bytes(b"x")
    (tmp_path / ".folder.tmp").mkdir()
    (tmp_path / ".link.tmp").symlink_to(kept[0])
    assert storage_module.sweep(tmp_path) == 2
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)
    assert storage_module.sweep(tmp_path) == 0


def test_what_a_killed_write_leaves_is_what_sweeping_removes(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        storage_module.write_atomic(tmp_path / "a.json", b"x")
    monkeypatch.undo()
    assert storage_module.sweep(tmp_path) == 1


def test_a_lock_that_is_given_back_is_free_although_a_child_still_holds_a_copy_of_its_file(tmp_path, monkeypatch):
    """Between fork and exec every child has all open files; on a busy machine that moment is long."""
    copies = []
    lock = locks._lock
    monkeypatch.setattr(locks, "_lock", lambda number: lock(number) or copies.append(os.dup(number)))
    with locks.folder_lock(tmp_path, "first"):
        monkeypatch.undo()
        with pytest.raises(StateError, match="in use by first") as caught, locks.folder_lock(tmp_path, "too early"):
            pass
        assert caught.value.holder == f"first (process {os.getpid()})"
    with locks.folder_lock(tmp_path, "second"):
        os.close(copies[0])


def test_without_syncs_nothing_waits_for_the_disk_until_the_end(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(os, "fsync", lambda _: waited.append("file"))
    with storage_module.without_syncs(tmp_path):
        with storage_module.without_syncs(tmp_path):
            storage_module.write_atomic(tmp_path / "deep" / "a", b"one")
            (tmp_path / "deep" / "b").write_bytes(b"by somebody else")
        storage_module.sync_folder(tmp_path)
        assert waited == []
        assert not storage_module.is_synced()
        assert (tmp_path / "deep" / "a").read_bytes() == b"one"
    assert len(waited) == 4  # two folders and two files
    storage_module.write_atomic(tmp_path / "a", b"two")
    assert len(waited) == 6  # the file and its folder


def test_a_file_that_may_not_be_looked_at_does_not_end_what_waits_for_the_disk(tmp_path, monkeypatch):
    """A folder of another user may be listed and not be entered."""
    closed = tmp_path / "closed"
    is_dir = Path.is_dir
    closed.write_bytes(b"")

    def look(path, *given, **named):
        if path == closed:
            raise PermissionError(13, "Permission denied")
        return is_dir(path, *given, **named)

    with storage_module.without_syncs(tmp_path):
        (tmp_path / "a").write_bytes(b"one")
        monkeypatch.setattr(Path, "is_dir", look)
