"""A new bundle is prepared in a process beside the agent's, which may hang, crash or be killed at any moment."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from federation_harness import Clock

from edge_agent.agent import candidate as module
from edge_agent.agent.candidate import children_of, prepare_beside
from edge_agent.agent.head_tier import install_bundle
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.bundle import installed
from edge_agent.core import children, limits
from edge_agent.core.config import AgentConfig, DataConfig, HeadConfig
from edge_agent.core.errors import BundleDamaged, BundleError, DataError
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.personalize import load_head
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Install

PROBE = np.random.default_rng(5).normal(size=(6, 3, 8, 8)).astype(np.float32)


@pytest.fixture
def config(tmp_path):
    return AgentConfig(
        id="dev",
        state=tmp_path / "state",
        data=DataConfig(source="digits:optdigits?n=80"),
        head=HeadConfig(name="prototype", precision="fp32", local=False, min_gain=-1),
    )


@pytest.fixture
def old(config, make_bundle):
    made = make_bundle("old.hwb", dim=24, seed=2)
    install_bundle(config, order(made), made.path)
    return made


@pytest.fixture
def new(make_bundle):
    return make_bundle("new.hwb", dim=48, seed=2)


def order(made):
    return Install(run="run-0001", bundle_id=made.manifest.bundle_id, blob=Outgoing.of(made.path.read_bytes()).ref)


def install(config, made, heard=lambda _step: None):
    def prepare(*arguments):
        return prepare_beside(*arguments, heard)

    return install_bundle(config, order(made), made.path, prepare=prepare)


def answers_of(config):
    """The bundle in use, and what it and its head answer; refuses a pair of two halves."""
    bundle = installed.current(config.state / "bundles")
    head = load_head(config.state / "head", bundle)
    assert head.fingerprint == bundle.variant(head.precision).fingerprint
    return bundle.id, head.predict_proba(Encoder.open(bundle, "fp32").features(PROBE))


def left_over(config):
    """What is in the state folder beside the pair in use."""
    names = json.loads((config.state / "bundles" / "current.json").read_text())["bundles"]
    folders = {path.name for path in (config.state / "bundles").iterdir() if path.is_dir()}
    return [*sorted(folders - {*names}), *(["candidate"] if (config.state / "candidate").exists() else [])]


def is_alive(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def fresh(config, before):
    shutil.rmtree(config.state)
    shutil.copytree(before, config.state)


def sessions_of(processes):
    """Processes in the sessions that these began."""
    lines = subprocess.check_output(["ps", "-eo", "pid=,sess="], text=True).splitlines()
    return [int(line.split()[0]) for line in lines if int(line.split()[1]) in processes]


def wait_until(condition, seconds=20):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds
        threading.Event().wait(0.02)


def test_a_bundle_prepared_beside_is_the_one_that_is_prepared_here(config, old, new, tmp_path):
    elsewhere = config.model_copy(update={"state": tmp_path / "elsewhere"})
    for made in (old, new):
        here = install_bundle(elsewhere, order(made), made.path)
    steps = []
    beside = install(config, new, steps.append)
    assert beside.metrics.pop("install.peak_mb") > 2 * 20, "of two processes"
    assert {**beside.metrics, "seconds": 0} == {**here.metrics, "seconds": 0}
    assert beside.model_dump(exclude={"metrics"}) == here.model_dump(exclude={"metrics"})
    np.testing.assert_array_equal(answers_of(config)[1], answers_of(elsewhere)[1])
    assert [step.split()[0] for step in dict.fromkeys(steps)][:3] == ["unpack", "trial", "samples"]
    assert {"features", "compare", "save"} <= {step.split()[0] for step in steps}
    assert left_over(config) == []


def test_the_old_pair_is_compared_on_the_same_samples_beside_as_well(config, make_bundle):
    good = make_bundle("good.hwb", dim=48, seed=2)
    poor = make_bundle("poor.hwb", dim=1, seed=1)
    strict = config.model_copy(update={"head": config.head.model_copy(update={"min_gain": 0.0})})
    first = install(strict, good)
    report = install(strict, poor)
    assert report.metrics["acc.before"] == first.acc_personal > report.acc_personal
    assert report.rolled_back == (
        f"keeps bundle {good.manifest.bundle_id[:12]} because acc.personal is {report.acc_personal:.3f} with the new "
        f"encoder, {first.acc_personal:.3f} with the old one (+0 allowed)"
    )
    assert answers_of(strict)[0] == good.manifest.bundle_id
    assert left_over(strict) == []


# Each step costs two or three new interpreters: by default every third one is hit, from the first to the last.
SWEEPS = pytest.mark.parametrize(
    "stride", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["every third step", "every step"]
)


@SWEEPS
def test_row_38_a_kill_of_the_process_beside_at_any_step_leaves_the_old_pair(config, old, new, tmp_path, stride):
    bundle_id, before = answers_of(config)
    shutil.copytree(config.state, tmp_path / "before")
    seen = []
    for at in itertools.count(step=stride):
        steps = []

        def kill(step, at=at, steps=steps):
            steps.append(step)
            if len(steps) == at + 1:
                os.kill(children_of(os.getpid())[0], signal.SIGKILL)
                wait_until(lambda: not children_of(os.getpid()) or not is_alive(children_of(os.getpid())[0]))

        report = install(config, new, kill)
        if report.bundle_id == new.manifest.bundle_id:
            break
        assert report.bundle_id == bundle_id
        assert report.samples == 60
        assert f"in step '{steps[-1]}': it ended by signal 9" in report.rolled_back, (
            "it may have gone on until the kill"
        )
        assert answers_of(config)[0] == bundle_id
        np.testing.assert_array_equal(answers_of(config)[1], before)
        assert left_over(config) == []
        seen.append(steps[at])
        fresh(config, tmp_path / "before")
    first_steps = ["unpack", "trial", "samples"][::stride]
    assert seen[: len(first_steps)] == first_steps
    assert len(seen) * stride >= 5
    assert answers_of(config)[0] == new.manifest.bundle_id


DIES = """
import os, signal, sys
from pathlib import Path
from edge_agent.agent.candidate import children_of, prepare_beside
from edge_agent.agent.head_tier import install_bundle
from edge_agent.core.config import AgentConfig
from edge_agent.wire.messages.down import Install
config, message = AgentConfig.model_validate_json(sys.argv[1]), Install.model_validate_json(sys.argv[2])
steps = []
def heard(step):
    steps.append(step)
    if len(steps) == int(sys.argv[4]):
        print(children_of(os.getpid())[0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
install_bundle(config, message, Path(sys.argv[3]), prepare=lambda *given: prepare_beside(*given, heard))
"""


@SWEEPS
def test_row_38_a_kill_of_the_agent_at_any_step_ends_the_process_beside_and_leaves_the_old_pair(
    config, old, new, tmp_path, stride
):
    bundle_id, before = answers_of(config)
    shutil.copytree(config.state, tmp_path / "before")
    count = 0
    while True:
        words = [config.model_dump_json(), order(new).model_dump_json(), str(new.path), str(count + 1)]
        done = subprocess.run([sys.executable, "-c", DIES, *words], capture_output=True, text=True, check=False)
        if done.returncode != -signal.SIGKILL:
            assert done.returncode == 0, done.stderr
            break
        wait_until(lambda child=int(done.stdout): not is_alive(child))
        tasks = TaskRunner(config, "head")
        assert tasks.bundles.bundle_id == bundle_id
        tasks.bundles.note_start()
        assert left_over(config) == []
        np.testing.assert_array_equal(answers_of(config)[1], before)
        fresh(config, tmp_path / "before")
        count += stride
    assert count > 6
    assert answers_of(config)[0] == new.manifest.bundle_id


ENDS = """
import os, signal, sys
from pathlib import Path
from edge_agent.agent import candidate
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.config import AgentConfig
from edge_agent.wire.messages.down import Install
config, message = AgentConfig.model_validate_json(sys.argv[1]), Install.model_validate_json(sys.argv[2])
prepare = candidate.prepare_beside
candidate.prepare_beside = lambda *given: prepare(*given, lambda step: os.kill(os.getpid(), signal.SIGKILL))
tasks = TaskRunner(config, "head", beside=True)
tasks.bundles.note_start()
print(tasks.install(message, Path(sys.argv[3])).rolled_back)
"""


def test_an_agent_that_is_killed_with_the_process_beside_three_times_refuses_the_bundle(config, old, new):
    """As by systemd, which stops the whole service where one of its processes was killed for lack of memory."""
    bundle_id, before = answers_of(config)
    words = [sys.executable, "-c", ENDS, config.model_dump_json(), order(new).model_dump_json(), str(new.path)]
    for code in (-signal.SIGKILL, -signal.SIGKILL, -signal.SIGKILL, 0):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert answers_of(config)[0] == bundle_id
    assert f"keeps bundle {bundle_id[:12]} because the agent ended 3 times while it prepared" in done.stdout
    np.testing.assert_array_equal(answers_of(config)[1], before)


def test_a_second_kill_after_a_new_head_was_put_there_does_not_lose_the_old_one(config, old, new, make_bundle):
    """Each of two new bundles is killed between its head and the pointer: the head before the last is the old one."""
    bundle_id, before = answers_of(config)
    for made in (new, make_bundle("other.hwb", dim=32, seed=3)):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(installed, "switch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            patch.setattr("edge_agent.agent.head_tier.clean", lambda _config: None)  # as a kill has it
            install_bundle(config, order(made), made.path)
        TaskRunner(config, "head").bundles.note_start()
        assert answers_of(config)[0] == bundle_id
        np.testing.assert_array_equal(answers_of(config)[1], before)


TROUBLES = {
    "hangs": ("import time; time.sleep(600)", "made no progress for 900 s"),
    "hangs with a child of its own": (
        "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)",
        "made no progress for 900 s",
    ),
    "computes for ever": ("while True: pass", "it ended by signal 24"),
    "takes all memory": (
        """import numpy as np
    images = np.broadcast_to(np.zeros((1, 8, 8, 3), np.uint8), (10**8, 8, 8, 3))
    return images, np.broadcast_to(np.zeros(1, int), 10**8)""",
        "more memory than there is",
    ),
    "is killed for lack of memory": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9"),
    "crashes": ("import os; os.abort()", "it ended by signal 6"),
    "exits": ("import os; os._exit(3)", "it ended with code 3"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_row_37_a_preparation_that_goes_wrong_is_refused_with_its_reason(
    config, old, new, tmp_path, monkeypatch, trouble
):
    """The data come from a function, which stands for anything that passed the checks before."""
    code, expected = TROUBLES[trouble]
    (tmp_path / "source.py").write_text(f"def made():\n    {code}\n")
    monkeypatch.setattr(module, "CPU_S", 2 if trouble == "computes for ever" else 600)
    monkeypatch.setattr(module, "available_bytes", lambda: 300 << 20)
    bad = config.model_copy(update={"data": DataConfig(source=f"python:{tmp_path / 'source.py'}:made")})
    processes = set()
    begun = []
    clock = Clock(0.0)

    def heard(step):
        processes.update(children_of(os.getpid()))
        begun.append(step)

    def time_of_hanging():
        """Stands still until the step that hangs has begun, however slow this machine is; then some minutes a look."""
        clock.now += 240.0 if trouble.startswith("hangs") and "samples" in begun else 0.0
        return clock()

    monkeypatch.setattr(module, "Watch", partial(children.Watch, clock=time_of_hanging))
    tasks = TaskRunner(bad, "head", beside=True)
    monkeypatch.setattr(module, "prepare_beside", lambda *given: prepare_beside(*given, heard))
    report = tasks.install(order(new), new.path)
    assert expected in report.rolled_back
    assert f"keeps bundle {old.manifest.bundle_id[:12]} because the process that prepares it" in report.rolled_back
    assert "'samples'" in report.rolled_back
    assert (report.bundle_id, report.metrics["rolled_back"]) == (old.manifest.bundle_id, 1.0)
    assert tasks.bundles.bundle_id == answers_of(config)[0] == old.manifest.bundle_id
    assert [one.bundle_id for one in tasks.bundles.releases.refused()] == [new.manifest.bundle_id]
    assert processes
    wait_until(lambda: not any(map(is_alive, processes)))
    wait_until(lambda: not any(is_alive(process) for process in sessions_of(processes)))
    assert left_over(config) == []
    # The refusal was that of one preparation: the same bundle is installed as soon as the data are right.
    assert install_bundle(config, order(new), new.path).bundle_id == new.manifest.bundle_id


def test_without_an_old_pair_its_end_is_a_fault(config, new, tmp_path):
    (tmp_path / "source.py").write_text("def made():\n    import os; os._exit(3)\n")
    bad = config.model_copy(update={"data": DataConfig(source=f"python:{tmp_path / 'source.py'}:made")})
    with pytest.raises(BundleError, match="it ended with code 3") as caught:
        install(bad, new)
    assert caught.value.is_public
    assert installed.current(config.state / "bundles") is None


def test_errors_beside_are_those_of_here(config, old, new, make_bundle, tmp_path):
    away = config.model_copy(update={"data": DataConfig(source=f"npz:{tmp_path / 'gone.npz'}")})
    with pytest.raises(DataError, match=r"gone\.npz"):
        install(away, new)
    failing = make_bundle("failing.hwb", golden_error=0.5)
    with pytest.raises(BundleDamaged, match="self-test") as caught:
        install(config.model_copy(update={"state": tmp_path / "fresh"}), failing)
    assert caught.value.is_public
    assert "self-test" in install(config, failing).rolled_back
    features = config.state / "features"
    for path in features.iterdir():
        path.unlink()
    features.rmdir()
    features.write_bytes(b"in the way")
    with pytest.raises(FileExistsError, match="features"):
        install(config, new)
    assert answers_of(config)[0] == old.manifest.bundle_id
    assert left_over(config) == []


def test_what_is_logged_beside_is_logged_here(config, new, caplog):
    caplog.set_level("INFO")
    install(config, new)
    by = {record.name: record.getMessage() for record in caplog.records}
    assert by["edge_agent.agent.head_tier"].startswith("installed bundle=")
    assert any(message.startswith("encoder_loaded precision=fp32") for message in caplog.messages)
    assert by["edge_agent.agent.candidate"].startswith(f"prepared bundle={new.manifest.bundle_id[:12]} peak_mb=")


def test_the_process_beside_gives_way_and_is_the_first_to_go(config, new):
    found = {}

    def heard(_step):
        process = children_of(os.getpid())[0]
        found["nice"] = os.getpriority(os.PRIO_PROCESS, process) - os.getpriority(os.PRIO_PROCESS, 0)
        found["oom"] = int(Path(f"/proc/{process}/oom_score_adj").read_text())

    install(config, new, heard)
    assert found == {"nice": 5, "oom": 1000}


def test_answers_go_on_during_an_install_and_are_of_one_pair(config, old, new):
    """Another thread predicts from the folder all the time."""
    pairs = []
    stop = threading.Event()
    failures = []

    def predict():
        while not stop.is_set():
            try:
                pairs.append(answers_of(config))
            except Exception as error:  # noqa: BLE001 - any failure counts
                failures.append(error)

    before = answers_of(config)
    thread = threading.Thread(target=predict)
    thread.start()
    install(config, new)
    enough = len(pairs)
    wait_until(lambda: len(pairs) > enough + 1)
    stop.set()
    thread.join()
    assert not failures
    known = dict([before, answers_of(config)])
    for bundle_id, answers in pairs:
        np.testing.assert_array_equal(answers, known[bundle_id])
    ids = [bundle_id for bundle_id, _ in pairs]
    assert [one for one, _ in itertools.groupby(ids)] == [old.manifest.bundle_id, new.manifest.bundle_id]


def pretend_files(monkeypatch, files):
    """Let these files, path -> text, be all that can be read."""

    def read(path, *_, **__):
        try:
            return files[str(path)]
        except KeyError:
            raise FileNotFoundError from None

    monkeypatch.setattr(limits.Path, "read_text", read)


def test_available_memory_is_the_least_of_system_and_groups(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 512000 kB\nMemAvailable: 300000 kB\n",
        "/proc/self/cgroup": "1:cpu:/x\n0::/system.slice/agent.service\n",
        "/sys/fs/cgroup/system.slice/agent.service/memory.max": "200000000\n",
        "/sys/fs/cgroup/system.slice/agent.service/memory.current": "90000000\n",
        "/sys/fs/cgroup/system.slice/agent.service/memory.stat": "active_file 10000000\ninactive_file 5000000\n",
        "/sys/fs/cgroup/system.slice/memory.max": "max\n",
    }
    pretend_files(monkeypatch, files)
    assert limits.available_bytes() == 200_000_000 - 90_000_000 + 15_000_000
    files["/sys/fs/cgroup/system.slice/memory.max"] = "80000000"
    files["/sys/fs/cgroup/system.slice/memory.current"] = "79000000"
    files["/sys/fs/cgroup/system.slice/memory.stat"] = "anon 1"
    assert limits.available_bytes() == 1_000_000
    del files["/proc/self/cgroup"], files["/proc/meminfo"]
    assert limits.available_bytes() is None


@pytest.mark.parametrize("folder", ["/docker/4f2a", ""], ids=["on the host", "in a container"])
def test_groups_of_version_1_bound_available_memory(folder, monkeypatch):
    """A container sees its own group at the top, whatever the path on the host."""
    group = f"/sys/fs/cgroup/memory{folder}"
    files = {
        "/proc/meminfo": "MemTotal: 512000 kB\nMemAvailable: 300000 kB\n",
        "/proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/4f2a\n0::/\n",
        f"{group}/memory.limit_in_bytes": "200000000\n",
        f"{group}/memory.usage_in_bytes": "90000000\n",
        f"{group}/memory.stat": "active_file 1\ntotal_active_file 10000000\ntotal_inactive_file 5000000\n",
    }
    pretend_files(monkeypatch, files)
    assert limits.available_bytes() == 200_000_000 - 90_000_000 + 15_000_000
    files[f"{group}/memory.limit_in_bytes"] = "9223372036854771712"
    assert limits.available_bytes() == 300_000 * 1024


@pytest.mark.parametrize(
    "lines, words",
    [
        (("{}", "nothing"), "holds no JSON object"),
        (("[1]",), "holds no JSON object"),
        (('{"step": 1}',), "it ended with code 0"),
    ],
)
def test_a_child_that_answers_otherwise_has_failed(tmp_path, monkeypatch, lines, words):
    (tmp_path / "child_module.py").write_text(f"def main():\n    import sys\n    for line in {lines!r}: print(line)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    heard = []
    with pytest.raises(children.ChildFailed, match=words):
        children.answer_of_watched("child_module", "main", {}, heard.append, children.Watch(60, 60))
    assert heard == [json.loads(line) for line in lines[:1] if line.startswith("{")]


def test_a_child_that_talks_for_too_long_is_ended(tmp_path, monkeypatch):
    code = "def main():\n    import time\n    while True: print('{}', flush=True); time.sleep(0.05)\n"
    (tmp_path / "child_module.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen = set()
    with contextlib.suppress(AssertionError), pytest.raises(children.ChildFailed, match="it took longer than 1 s"):
        watch = children.Watch(silent_s=60, limit_s=1, look=lambda process: seen.add(process))
        children.answer_of_watched("child_module", "main", {}, lambda _: None, watch)
    assert len(seen) == 1
    assert not is_alive(*seen)
