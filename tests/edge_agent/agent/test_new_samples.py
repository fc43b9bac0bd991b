"""Samples that a person adds while the agent runs: noticed, taken in, and learned from beside its work."""

from __future__ import annotations

import numpy as np
import pytest
from federation_harness import Federation
from PIL import Image

from edge_agent import bundle as bundles
from edge_agent.agent.local_state import COLLECT_EVERY_S, NewSamples
from edge_agent.agent.tasks import TaskRunner
from edge_agent.config import AgentConfig, DataConfig, HeadConfig
from edge_agent.data import from_files
from edge_agent.data.collected import Collection, labelled
from edge_agent.errors import DataError
from edge_agent.heads import saved
from edge_agent.storage import read_json
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Install


def picture(path, channel, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 60, (8, 8, 3), dtype=np.uint8)
    pixels[..., channel] += 190
    Image.fromarray(pixels).save(path)
    return str(path)


@pytest.fixture
def config(tmp_path, make_bundle):
    made = make_bundle(dim=48, global_head=True)
    bundles.install(made.path, tmp_path / "state" / "bundles")
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
    assert tasks.collect() is True
    assert [path.name for path in (tmp_path / "watch" / "scarf").iterdir()] == ["broken.png"]
    head = saved.load(config.state / "head")
    assert head.class_names == (*"0123456789", "scarf")
    assert (head.metrics["n_train"] + head.metrics["n_test"], head.metrics["n_collected"]) == (66, 6)
    assert tasks.collect() is False
    assert saved.restore(config.state / "head", bundles.current(config.state / "bundles").fingerprints).class_names == (
        *"0123456789",
    )
    assert tasks.collect() is False, "what was rolled back stays so until there are new samples"


def test_samples_that_cannot_be_learned_from_leave_the_head_in_use(config, tmp_path):
    tasks = TaskRunner(config, "head")
    tasks.refit()
    before = (config.state / "head" / "head.json").read_bytes()
    Collection(config.state / "samples").add(
        labelled(
            from_files([picture(tmp_path / "a.png", 0)], bundles.current(config.state / "bundles").manifest.task.input),
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
    return bundles.current(config.state / "bundles").manifest.task.input


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
        bundles.install(made.path, agent.config.state / "bundles")
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
        bundles.install(made.path, agent.config.state / "bundles")
        assert not agent.tasks.bundle_id
        collection = Collection(agent.config.state / "samples")
        collection.add(labelled(from_files([picture(tmp_path / "a.png", 0)], made.manifest.task.input), "scarf"))
        fed.until(lambda: bool(agent.tasks.bundle_id), limit_s=60)
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
    assert again.lacks_head
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
    good, poor = make_bundle("good.hwb", dim=48, seed=2), make_bundle("poor.hwb", dim=1, seed=1)
    tasks = TaskRunner(config, "head")
    for number, (made, kept) in enumerate([(good, good), (poor, good)]):
        picture(tmp_path / "watch" / "scarf" / f"{number}.png", 0, number)
        order = Install(run="r-1", bundle_id=made.manifest.bundle_id, blob=Outgoing.of(made.path.read_bytes()).ref)
        assert tasks.install(order, made.path).bundle_id == kept.manifest.bundle_id
    assert tasks.collect() is True
