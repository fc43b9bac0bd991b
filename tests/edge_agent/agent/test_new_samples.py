"""Samples that a person adds while the agent runs: noticed, taken in, and learned from beside its work."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from federation_harness import Federation
from PIL import Image

from edge_agent.agent import head_tier as module
from edge_agent.agent.new_samples import COLLECT_EVERY_S, SETTLED_S, NewSamples
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.bundle import installed
from edge_agent.core.config import AgentConfig, DataConfig, HeadConfig
from edge_agent.core.errors import DataError
from edge_agent.core.storage import read_json
from edge_agent.core.task import Task, WindowInput
from edge_agent.data import from_files
from edge_agent.data.collected import Collection, labelled
from edge_agent.heads import saved
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Install


def picture(path, channel, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 60, (8, 8, 3), dtype=np.uint8)
    pixels[..., channel] += 190
    Image.fromarray(pixels).save(path)
    os.utime(path, (0, 0))  # long ago
    return str(path)


@pytest.fixture
def config(tmp_path, make_bundle):
    made = make_bundle(dim=48, global_head=True)
    installed.install(made.path, tmp_path / "state" / "bundles")
    data = DataConfig(source="digits:optdigits?n=60", watch=tmp_path / "watch")
    return AgentConfig(id="dev", state=tmp_path / "state", data=data, head=HeadConfig(precision="fp32", local=False))


def test_files_in_the_watch_folder_become_samples_and_the_head_learns_from_them(config, tmp_path):
    tasks = TaskRunner(config, "head")
    tasks.refit()
    assert tasks.collect() is False
    for number in range(6):
        picture(tmp_path / "watch" / "scarf" / f"{number}.png", 0, number)
    broken = tmp_path / "watch" / "scarf" / "broken.png"
    broken.write_bytes(b"half a fi")
    os.utime(broken, (0, 0))
    assert tasks.collect() is True
    assert [path.name for path in (tmp_path / "watch" / "scarf").iterdir()] == ["broken.png"]
    head = saved.load(config.state / "head")
    assert head.class_names == (*"0123456789", "scarf")
    assert (head.metrics["n_train"] + head.metrics["n_test"], head.metrics["n_collected"]) == (66, 6)
    assert tasks.collect() is False
    assert saved.restore(
        config.state / "head", installed.current(config.state / "bundles").fingerprints
    ).class_names == (*"0123456789",)
    assert tasks.collect() is False, "what was rolled back stays so until there are new samples"


def test_samples_that_cannot_be_learned_from_leave_the_head_in_use(config, tmp_path):
    tasks = TaskRunner(config, "head")
    tasks.refit()
    before = (config.state / "head" / "head.json").read_bytes()
    Collection(config.state / "samples").add(
        labelled(
            from_files(
                [picture(tmp_path / "a.png", 0)], installed.current(config.state / "bundles").manifest.task.input
            ),
            "x",
        )
    )
    broken = TaskRunner(config.model_copy(update={"data": DataConfig(source="npz:gone.npz")}), "head")
    with pytest.raises(DataError):
        broken.collect()
    assert (config.state / "head" / "head.json").read_bytes() == before
    assert tasks.collect() is True


def test_only_a_change_is_noticed_and_not_at_every_turn(config, tmp_path):
    now = [0.0]
    new = NewSamples(config, lambda: now[0])
    assert not new.is_due()
    picture(tmp_path / "watch" / "hat" / "1.png", 1)
    assert not new.is_due(), "it has just looked"
    now[0] += COLLECT_EVERY_S
    assert new.is_due()
    now[0] += COLLECT_EVERY_S
    assert not new.is_due()
    (tmp_path / "watch" / "hat" / "1.png").unlink()
    now[0] += COLLECT_EVERY_S
    assert not new.is_due()
    Collection(config.state / "samples").add(
        labelled(from_files([picture(tmp_path / "a.png", 0)], config_input(config)), "x")
    )
    now[0] += COLLECT_EVERY_S
    assert new.is_due()


def config_input(config):
    return installed.current(config.state / "bundles").manifest.task.input


class HeadDuties(TaskRunner):
    """A device with digits that has a bundle already."""

    def __init__(self, config, tier):
        changes = {
            "data": DataConfig(source="digits:optdigits?n=60", watch=config.state / "watch"),
            "head": HeadConfig(name="prototype", precision="fp32", local=False),
        }
        super().__init__(config.model_copy(update=changes), tier)

    def check(self, task):
        pass


def test_a_running_agent_learns_in_the_background(tmp_path, make_bundle):
    made = make_bundle(dim=16)
    with Federation(tmp_path / "fed", agents=(), tasks=HeadDuties) as fed:
        agent = fed.add("porch", tier="head")
        installed.install(made.path, agent.config.state / "bundles")
        agent.tasks.refit()
        collection = Collection(agent.config.state / "samples")
        collection.add(labelled(from_files([picture(tmp_path / "a.png", 0)], made.manifest.task.input), "scarf"))
        card = agent.config.state / "head" / "head.json"
        fed.until(lambda: "scarf" in (read_json(card) or {}).get("class_names", ()), limit_s=60)
        assert agent.condition.name == "ok"


class AddedSamplesAlone(HeadDuties):
    """A device without any samples but those that are added."""

    def __init__(self, config, tier):
        super().__init__(config, tier)
        folder = config.state.absolute() / "samples"
        data = DataConfig(source=f"collected:{folder}", watch=config.state / "watch")
        self.config = self.config.model_copy(update={"data": data})


def test_the_first_samples_of_a_running_agent_give_its_first_head(tmp_path, make_bundle):
    made = make_bundle(dim=16)
    with Federation(tmp_path / "fed", agents=(), tasks=AddedSamplesAlone) as fed:
        agent = fed.add("porch", tier="head")
        installed.install(made.path, agent.config.state / "bundles")
        assert not agent.tasks.bundles.bundle_id
        collection = Collection(agent.config.state / "samples")
        collection.add(labelled(from_files([picture(tmp_path / "a.png", 0)], made.manifest.task.input), "scarf"))
        fed.until(lambda: bool(agent.tasks.bundles.bundle_id), limit_s=60)
        assert (saved.load(agent.config.state / "head").class_names, agent.condition.name) == (("scarf",), "ok")


def test_a_file_that_cannot_be_removed_is_learned_from_once(config, tmp_path, monkeypatch):
    tasks = TaskRunner(config, "head")
    tasks.refit()
    picture(tmp_path / "watch" / "scarf" / "1.png", 0)

    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "unlink", refuse)
        patch.setattr("edge_agent.heads.saved._replace", lambda folder, card: (folder / "head.json").write_bytes(card))
        assert [tasks.collect(), tasks.collect()] == [True, False]


class Growing:
    """A file of the watch folder that another program writes, at times of a clock that both are shown."""

    def __init__(self, path):
        self.path = path
        self.now = 1_000_000.0

    def write(self, content):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(content)
        os.utime(self.path, (self.now, self.now))


def watched(tmp_path, made, clock):
    """A device without other samples than those of its watch folder, and what notices files there."""
    installed.install(made.path, tmp_path / "state" / "bundles")
    data = DataConfig(source=f"collected:{tmp_path / 'samples'}", watch=tmp_path / "watch")
    head = HeadConfig(name="prototype", precision="fp32", local=False)
    config = AgentConfig(id="dev", state=tmp_path / "state", data=data, head=head)
    return TaskRunner(config, "head", now=clock), NewSamples(config, clock, clock)


def test_a_table_that_grows_between_two_looks_is_taken_in_whole(tmp_path, make_bundle):
    task = Task(input=WindowInput(channels=2, length=4, stride=4), class_names=("run",), encoder="linear")
    table = Growing(tmp_path / "watch" / "walk" / "1.csv")
    tasks, new = watched(tmp_path, make_bundle(task=task), lambda: table.now)
    table.write(b"x,y\n" + b"1,2\n" * 8)
    for _ in range(3):  # what follows comes in pieces, as by a slow copy
        table.now += SETTLED_S - 1
        assert not new.is_due()
        assert tasks.collect() is False
        table.write(b"".join(b"%d,%d\n" % (step, table.now % 7) for step in range(8)))
    table.now += SETTLED_S
    assert new.is_due()
    assert tasks.collect() is True
    assert not table.path.exists()
    assert len(Collection(tmp_path / "samples").index().samples) == 7, "of 32 rows, the first two windows are equal"


def test_an_image_that_grows_between_two_looks_is_not_tried_before_it_is_whole(tmp_path, make_bundle, caplog):
    image = Growing(tmp_path / "watch" / "scarf" / "1.png")
    tasks, new = watched(tmp_path, make_bundle(), lambda: image.now)
    content = Path(picture(tmp_path / "whole.png", 0)).read_bytes()
    image.write(content[:100])
    image.now += 1
    assert not new.is_due()
    assert tasks.collect() is False
    assert "not_taken_in" not in caplog.text
    image.write(content[100:])
    image.now += SETTLED_S
    assert new.is_due()
    assert tasks.collect() is True


def test_a_file_that_changes_while_it_is_read_stays_for_the_next_time(tmp_path, make_bundle, monkeypatch):
    image = Growing(tmp_path / "watch" / "scarf" / "1.png")
    tasks, _ = watched(tmp_path, make_bundle(), lambda: image.now)
    image.write(Path(picture(tmp_path / "whole.png", 0)).read_bytes())
    image.now += 100
    read = module.from_files

    def slow(*given, **options):
        result = read(*given, **options)
        image.write(b"more")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(module, "from_files", slow)
        assert tasks.collect() is False
    assert image.path.exists()
    image.now += SETTLED_S
    assert tasks.collect() is True


def test_a_clock_that_was_set_back_leaves_no_file_waiting(config, tmp_path):
    tasks = TaskRunner(config, "head", now=lambda: -1e9)
    tasks.refit()
    picture(tmp_path / "watch" / "scarf" / "1.png", 0)
    assert tasks.collect() is True


def test_a_first_fit_that_failed_is_made_up_for_without_new_samples(config):
    """As the agent's next try: its source was not there when it started."""
    gone = TaskRunner(config.model_copy(update={"data": DataConfig(source="npz:gone.npz")}), "head")
    with pytest.raises(DataError):
        gone.refit()
    tasks = TaskRunner(config, "head")
    assert [tasks.collect(), tasks.collect()] == [True, False]


def test_a_fit_that_failed_is_tried_again_with_growing_pauses(config, tmp_path):
    """By hand: pauses of 60, 120, … s, an hour at most, from one try to the next."""
    now = [0.0]
    tries = []
    new = NewSamples(config, lambda: now[0], lambda: now[0])
    assert new.failure() is None
    picture(tmp_path / "watch" / "hat" / "1.png", 1)
    while len(tries) < 9:
        if new.is_due():
            tries.append(now[0])
            new.tried(DataError("no source"))
        now[0] += COLLECT_EVERY_S
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert new.failure()["tries"] == 9
    assert new.failure()["reason"] == "DataError: no source"
    picture(tmp_path / "watch" / "hat" / "2.png", 1)
    assert new.is_due(), "new samples are learned from at once"
    new.tried(None)
    assert new.failure() is None
    now[0] += 10_000
    assert not new.is_due()


def test_a_fit_that_always_fails_is_tried_every_hour_for_ever(config):
    now = [0.0]
    new = NewSamples(config, lambda: now[0], lambda: now[0])
    for _ in range(1100):  # 46 days
        new.tried(DataError("no source"))
    assert new.failure()["tries"] == 1100
    now[0] += 3599
    assert not new.is_due()
    now[0] += COLLECT_EVERY_S
    assert new.is_due()


def test_new_samples_end_the_pause_of_a_fit_that_fails_once_a_minute_at_most(config, tmp_path):
    """A camera adds an image every 5 s. By hand: the first fit, one at once for the next image, then one a minute."""
    now = [10_000.0]
    tries = []
    new = NewSamples(config, lambda: now[0], lambda: now[0])
    for number in range(60):
        image = Path(picture(tmp_path / "watch" / "hat" / f"{number}.png", 1))
        os.utime(image, (now[0] - SETTLED_S, now[0] - SETTLED_S))
        if new.is_due():
            tries.append(now[0] - 10_000)
            new.tried(DataError("no source"))
        now[0] += COLLECT_EVERY_S
    assert tries == [0, 5, 65, 125, 185, 245]
    new.tried(None)
    assert new.is_due(), "what came during the last pause"


class FailingTasks(HeadDuties):
    """The data source is not there at the first two tries."""

    fails = 0

    def collect(self):
        if self.fails:
            self.fails -= 1
            raise DataError("npz:day.npz: there is no such file")
        return super().collect()


def test_a_running_agent_repeats_a_fit_that_failed_and_says_when(tmp_path, make_bundle):
    with Federation(tmp_path / "fed", agents=(), tasks=FailingTasks) as fed:
        agent = fed.add("porch", tier="head")
        installed.install(make_bundle(dim=16).path, agent.config.state / "bundles")
        agent.tasks.refit()
        agent.tasks.fails = 2
        given = labelled(from_files([picture(tmp_path / "a.png", 0)], config_input(agent.config)), "scarf")
        Collection(agent.config.state / "samples").add(given)
        fed.until(lambda: agent.tasks.fails == 1, limit_s=60)
        agent.write_status()
        refit = json.loads((agent.config.state / "status.json").read_bytes())["refit"]
        assert (refit["tries"], refit["reason"]) == (1, "DataError: npz:day.npz: there is no such file")
        card = agent.config.state / "head" / "head.json"
        fed.until(lambda: "scarf" in (read_json(card) or {}).get("class_names", ()), limit_s=400)
        fed.until(lambda: not agent.jobs.is_working, limit_s=60)
        agent.write_status()
        assert json.loads((agent.config.state / "status.json").read_bytes())["refit"] is None
        assert agent.condition.name == "ok"


def test_a_folder_that_goes_while_it_is_looked_at_does_not_end_the_agent(config, tmp_path, monkeypatch):
    now = [0.0]
    new = NewSamples(config, lambda: now[0])

    def gone(*_):
        raise FileNotFoundError(2, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "glob", gone)
        assert not new.is_due()
    picture(tmp_path / "watch" / "hat" / "1.png", 1)
    now[0] += COLLECT_EVERY_S
    assert new.is_due()


def test_a_damaged_head_does_not_keep_added_samples_from_a_new_one(config, tmp_path):
    tasks = TaskRunner(config, "head")
    picture(tmp_path / "watch" / "scarf" / "1.png", 0)
    assert tasks.collect()
    (config.state / "head" / "head.json").write_bytes(b"\0" * 100)
    again = TaskRunner(config, "head")
    assert again.bundles.lacks_head
    again.refit()
    assert saved.load(config.state / "head").class_names == (*"0123456789", "scarf")


def test_the_watch_folder_gives_the_samples_for_the_first_bundle(tmp_path, make_bundle):
    made = make_bundle(dim=16)
    for number in range(3):
        picture(tmp_path / "watch" / "scarf" / f"{number}.png", 0, number)
    data = DataConfig(source=f"collected:{tmp_path / 'samples'}", watch=tmp_path / "watch")
    head = HeadConfig(precision="fp32", local=False)
    tasks = TaskRunner(AgentConfig(id="dev", state=tmp_path / "state", data=data, head=head), "head")
    ref = Outgoing.of(made.path.read_bytes()).ref
    report = tasks.install(Install(run="run-0001", bundle_id=made.manifest.bundle_id, blob=ref), made.path)
    assert (report.bundle_id, report.samples, report.support) == (made.manifest.bundle_id, 2, 1)
    card = (tmp_path / "state" / "head" / "head.json").read_bytes()
    assert tasks.collect() is False, "the install has fitted the head on these samples"
    assert (tmp_path / "state" / "head" / "head.json").read_bytes() == card


def test_a_release_that_is_rolled_back_leaves_new_samples_to_the_next_fit(config, tmp_path, make_bundle):
    good = make_bundle("good.hwb", dim=48, seed=2)
    poor = make_bundle("poor.hwb", dim=1, seed=1)
    tasks = TaskRunner(config, "head")
    for number, (made, kept) in enumerate([(good, good), (poor, good)]):
        picture(tmp_path / "watch" / "scarf" / f"{number}.png", 0, number)
        order = Install(run="r-1", bundle_id=made.manifest.bundle_id, blob=Outgoing.of(made.path.read_bytes()).ref)
        assert tasks.install(order, made.path).bundle_id == kept.manifest.bundle_id
    assert tasks.collect() is True
