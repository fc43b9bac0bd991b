"""A new encoder on a head-tier device: the better pair stays, whatever happens on the way."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent import data
from edge_agent.agent import head_tier as module
from edge_agent.agent.data_check import check
from edge_agent.agent.head_tier import install_bundle
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.bundle import installed as installed_module
from edge_agent.core.config import AgentConfig, DataConfig, HeadConfig
from edge_agent.core.errors import BundleDamaged, BundleError, DataError
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.fitting import FitOptions
from edge_agent.personal.personalize import features_of, load_head
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Install


@pytest.fixture
def config(tmp_path):
    return AgentConfig(
        id="dev",
        state=tmp_path / "state",
        data=DataConfig(source="digits:optdigits?n=200"),
        head=HeadConfig(name="prototype", precision="fp32"),
    )


def order(made, bundle_id=None):
    ref = Outgoing.of(made.path.read_bytes()).ref
    return Install(run="run-0001", bundle_id=bundle_id or made.manifest.bundle_id, blob=ref)


def running(config):
    current = installed_module.current(config.state / "bundles")
    return None if current is None else current.manifest.bundle_id


def score_by_hand(config):
    """acc.personal of what is installed, worked out from the files alone."""
    bundle = installed_module.current(config.state / "bundles")
    saved = load_head(config.state / "head", bundle)
    task = bundle.manifest.task
    samples = data.load(config.data.source, task.input, task.class_names)
    _, test = data.split(samples, config.data.test_fraction, config.data.seed)
    rows = features_of(test, Encoder.open(bundle, "fp32", 1), None)
    return float((saved.head.predict_proba(rows).argmax(1) == test.labels).mean())


def test_the_first_bundle_is_installed_with_a_head_fitted_on_it(config, make_bundle):
    made = make_bundle()
    report = install_bundle(config, order(made), made.path)
    assert running(config) == report.bundle_id == made.manifest.bundle_id
    assert report.head == "prototype"
    assert report.acc_personal == pytest.approx(score_by_hand(config))
    assert report.samples == 150
    assert report.metrics["rolled_back"] == 0.0


def test_an_agent_says_when_its_device_is_better_off_alone_and_uses_that_where_it_may(config, make_bundle, caplog):
    weak = make_bundle(dim=2)
    report = install_bundle(config, order(weak), weak.path)
    assert (report.better_alone, report.head) == (True, "prototype")
    assert report.acc_local > report.acc_personal + 0.3
    assert f"acc.local={report.acc_local:.3f} model='{report.local_model}'" in caplog.text
    allowed = config.model_copy(update={"head": config.head.model_copy(update={"allow_local": True})})
    again = install_bundle(allowed, order(weak), weak.path)
    assert again.head == report.local_model
    saved = load_head(config.state / "head", installed_module.current(config.state / "bundles"))
    assert saved.title == report.local_model
    assert install_bundle(allowed, order(weak), weak.path).rolled_back == "", "the old pair is scored by what it uses"
    quiet = config.model_copy(update={"head": config.head.model_copy(update={"local": False, "min_gain": -1.0})})
    assert install_bundle(quiet, order(weak), weak.path).acc_local is None


def test_a_device_may_have_classes_that_the_encoder_was_not_trained_for(config, make_bundle, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    images = (labels[:, None, None, None] * 80 + rng.integers(0, 60, (60, 8, 8, 3))).astype(np.uint8)
    np.savez(tmp_path / "pets.npz", inputs=images, labels=np.array(["cat", "dog", "tree"])[labels])
    mine = config.model_copy(update={"data": DataConfig(source=f"npz:{tmp_path / 'pets.npz'}")})
    made = make_bundle(global_head=True)
    with pytest.raises(DataError, match="'cat', 'dog', 'tree'"):
        install_bundle(mine, order(made), made.path)
    with pytest.raises(DataError, match="'cat', 'dog', 'tree'"):
        check(mine, made.manifest.task)
    own = mine.model_copy(update={"head": mine.head.model_copy(update={"own_classes": True})})
    check(own, made.manifest.task)
    report = install_bundle(own, order(made), made.path)
    assert report.acc_global is None
    assert report.acc_personal > 0.9
    assert load_head(own.state / "head", installed_module.current(own.state / "bundles")).class_names == (
        "cat",
        "dog",
        "tree",
    )
    again = install_bundle(own, order(made), made.path)
    assert again.acc_personal == report.acc_personal, "the pair in use is scored under its own classes"


def test_a_better_pair_replaces_the_old_one(config, make_bundle):
    poor = make_bundle("poor.hwb", dim=2, seed=1)
    good = make_bundle("good.hwb", dim=48, seed=2)
    first = install_bundle(config, order(poor), poor.path)
    second = install_bundle(config, order(good), good.path)
    assert second.acc_personal > first.acc_personal
    assert running(config) == good.manifest.bundle_id
    assert second.acc_personal == pytest.approx(score_by_hand(config))


def test_a_worse_pair_is_rolled_back_and_the_old_one_goes_on(config, make_bundle):
    good = make_bundle("good.hwb", dim=48, seed=2)
    poor = make_bundle("poor.hwb", dim=1, seed=1)
    first = install_bundle(config, order(good), good.path)
    before = {path.name: path.read_bytes() for path in (config.state / "head").iterdir()}
    report = install_bundle(config, order(poor), poor.path)
    assert report.metrics["rolled_back"] == 1.0
    assert report.bundle_id == running(config) == good.manifest.bundle_id
    elsewhere = config.model_copy(update={"state": config.state.parent / "other"})
    alone = install_bundle(elsewhere, order(poor), poor.path)
    assert report.acc_personal == alone.acc_personal < first.acc_personal, "the figures are of the new encoder"
    kept = good.manifest.bundle_id[:12]
    assert report.rolled_back == (
        f"keeps bundle {kept} because acc.personal is {alone.acc_personal:.3f} with the new encoder, "
        f"{first.acc_personal:.3f} with the old one (-0.02 allowed)"
    )
    assert {path.name: path.read_bytes() for path in (config.state / "head").iterdir()} == before
    assert score_by_hand(config) == pytest.approx(first.acc_personal)


def test_cached_features_go_with_their_bundle(config, make_bundle):
    """Two bundles stay installed; features of the third oldest, and of one that was rolled back, are of no use."""
    made = [make_bundle(f"{dim}.hwb", dim=dim, seed=dim) for dim in (2, 8, 48)]
    for one in made:
        install_bundle(config, order(one), one.path)
    poor = make_bundle("poor.hwb", dim=1)
    assert install_bundle(config, order(poor), poor.path).rolled_back
    cached = [path.name for path in (config.state / "features").iterdir()]
    own = {one.manifest.variants["fp32"].fingerprint[:32] for one in made[1:]}
    assert {name.split("-")[1] for name in cached} == own
    installed_module.rollback(config.state / "bundles")
    TaskRunner(config, "head").refit()
    only = {made[1].manifest.variants["fp32"].fingerprint[:32]}
    assert {path.name.split("-")[1] for path in (config.state / "features").iterdir()} == only


def test_the_choice_of_the_encoder_is_part_of_the_time_of_a_fit(config, make_bundle, monkeypatch):
    open_at_once = module.open_encoder
    seconds = [0.0]

    def open_slowly(*words, **options):
        seconds[0] += 7
        return open_at_once(*words, **options)

    monkeypatch.setattr(module.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(module, "open_encoder", open_slowly)
    made = make_bundle()
    install_bundle(config, order(made), made.path)
    metrics = load_head(config.state / "head", installed_module.current(config.state / "bundles")).metrics
    assert metrics["encoder_seconds"] == 7
    assert metrics["seconds"] > 7


def test_a_refit_computes_no_features_again_where_one_file_fills_their_bound(config, make_bundle, monkeypatch):
    """150 training samples take more than features_bytes, and those held out are written after them."""
    computed = []
    whole = Encoder.features
    made = make_bundle(dim=2000)
    head = config.head.model_copy(update={"local": False})
    own = config.model_copy(update={"features_bytes": 1 << 20, "head": head})

    def counted(encoder, inputs, *rest):
        computed.append(len(inputs))
        return whole(encoder, inputs, *rest)

    monkeypatch.setattr(Encoder, "features", counted)
    install_bundle(own, order(made), made.path)
    assert {50, 150} <= {*computed}
    computed.clear()
    TaskRunner(own, "head").refit()
    assert not {50, 150} & {*computed}, "the self-test alone"


def test_how_much_worse_is_too_much_is_configured(config, make_bundle):
    good = make_bundle("good.hwb", dim=48, seed=2)
    poor = make_bundle("poor.hwb", dim=1, seed=1)
    lenient = config.model_copy(update={"head": config.head.model_copy(update={"min_gain": -1.0})})
    install_bundle(lenient, order(good), good.path)
    report = install_bundle(lenient, order(poor), poor.path)
    assert report.metrics["rolled_back"] == 0.0
    assert running(lenient) == poor.manifest.bundle_id


@pytest.fixture
def installed(config, make_bundle):
    made = make_bundle("good.hwb", dim=48, seed=2)
    install_bundle(config, order(made), made.path)
    return made


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("where", [0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_damaged_bundle_keeps_the_old_pair_byte_for_byte(config, make_bundle, installed, where):
    new = make_bundle("new.hwb", dim=24, seed=5)
    data = bytearray(new.path.read_bytes())
    data[int(where * len(data))] ^= 0x40
    new.path.write_bytes(data)
    before = files(config.state / "head")
    with pytest.raises(BundleError):
        install_bundle(config, order(new), new.path)
    assert running(config) == installed.manifest.bundle_id
    assert files(config.state / "head") == before


def test_a_bundle_that_computes_something_else_here_keeps_the_old_pair(config, make_bundle, installed, caplog):
    new = make_bundle("new.hwb", seed=5, golden_error=0.5)
    report = install_bundle(config, order(new), new.path)
    assert report.bundle_id == running(config) == installed.manifest.bundle_id
    assert report.rolled_back.startswith(f"keeps bundle {running(config)[:12]} because self-test: fp32 features differ")
    assert (report.acc_local, report.acc_global, report.acc_personal) == (None, None, None), "nothing was measured"
    assert f"rolled_back tried={new.manifest.bundle_id[:12]}" in caplog.text


@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_a_device_that_fails_the_self_test_of_int8_alone_installs_with_fp32(config, make_bundle, precision, caplog):
    new = make_bundle(int8=True, int8_golden_error=1.0)
    wanted = config.model_copy(update={"head": HeadConfig(name="prototype", precision=precision)})
    report = install_bundle(wanted, order(new), new.path)
    assert (report.precision, report.fingerprint) == ("fp32", new.manifest.variants["fp32"].fingerprint)
    assert report.rolled_back == ""
    assert running(config) == new.manifest.bundle_id
    if precision == "int8":
        assert f"int8_not_used bundle={new.manifest.bundle_id[:12]} reason=self-test: int8" in caplog.text


def test_a_first_bundle_that_computes_something_else_here_is_a_fault(config, make_bundle):
    """There is nothing to go back to."""
    new = make_bundle("new.hwb", seed=5, golden_error=0.5)
    with pytest.raises(BundleDamaged, match="self-test"):
        install_bundle(config, order(new), new.path)
    assert running(config) is None


def test_data_of_one_class_are_marked(config, make_bundle):
    made = make_bundle()
    one = config.model_copy(update={"data": DataConfig(source="digits:optdigits?n=50&classes=3")})
    assert install_bundle(one, order(made), made.path).one_class
    assert not install_bundle(config, order(made), made.path).one_class


def test_another_encoder_than_the_announced_one_is_refused(config, make_bundle, installed):
    new = make_bundle("new.hwb", seed=5)
    with pytest.raises(BundleDamaged, match="announced was"):
        install_bundle(config, order(new, "a" * 64), new.path)
    assert running(config) == installed.manifest.bundle_id


def test_a_refit_that_fails_goes_back_to_the_old_pair(config, make_bundle, installed, monkeypatch):
    def fails(*arguments, **options):
        raise DataError("all labels are gone")

    monkeypatch.setattr(module, "personalize", fails)
    new = make_bundle("new.hwb", seed=5)
    with pytest.raises(DataError):
        install_bundle(config, order(new), new.path)
    assert running(config) == installed.manifest.bundle_id
    assert score_by_hand(config) > 0.3


def test_a_refit_that_breaks_in_any_way_goes_back_to_the_old_pair(config, make_bundle, installed, monkeypatch):
    """Not only errors of ours: an encoder without its head must never be what runs."""

    def breaks(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(module, "personalize", breaks)
    new = make_bundle("new.hwb", seed=5)
    with pytest.raises(MemoryError):
        install_bundle(config, order(new), new.path)
    assert running(config) == installed.manifest.bundle_id


def test_a_first_refit_that_fails_leaves_no_encoder_without_a_head(config, make_bundle, monkeypatch):
    def fails(*arguments, **options):
        raise DataError("all labels are gone")

    monkeypatch.setattr(module, "personalize", fails)
    new = make_bundle("new.hwb", seed=5)
    with pytest.raises(DataError):
        install_bundle(config, order(new), new.path)
    assert running(config) is None


def test_a_head_that_cannot_be_written_goes_back_to_the_old_pair(config, make_bundle, installed, monkeypatch):
    """The disk is full at the last step: encoder and head are switched together or not at all."""
    from edge_agent.personal import personalize

    def full(self, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(personalize.Result, "save", full)
    new = make_bundle("new.hwb", dim=96, seed=6)
    with pytest.raises(OSError, match="No space"):
        install_bundle(config, order(new), new.path)
    assert running(config) == installed.manifest.bundle_id
    assert score_by_hand(config) > 0.3


def test_a_kill_between_the_new_head_and_its_bundle_leaves_the_old_pair(config, make_bundle, installed, monkeypatch):
    before = score_by_hand(config)

    def killed(*_):
        raise KeyboardInterrupt

    new = make_bundle("new.hwb", dim=96, seed=6)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(installed_module, "write_json", killed)  # the pointer to the bundle in use
        install_bundle(config, order(new), new.path)
    assert TaskRunner(config, "head").bundles.bundle_id == running(config) == installed.manifest.bundle_id
    assert score_by_hand(config) == before
    assert install_bundle(config, order(new), new.path).bundle_id == new.manifest.bundle_id


def test_a_damaged_old_head_does_not_stand_in_the_way(config, make_bundle, installed):
    for path in (config.state / "head").iterdir():
        path.write_bytes(b"x")
    poor = make_bundle("poor.hwb", dim=1, seed=1)
    report = install_bundle(config, order(poor), poor.path)
    assert report.bundle_id == running(config) == poor.manifest.bundle_id


def test_a_duty_tells_the_running_bundle_from_then_on(config, make_bundle):
    tasks = TaskRunner(config, "head")
    made = make_bundle()
    report = tasks.install(order(made), made.path)
    assert tasks.bundles.bundle_id == report.bundle_id == made.manifest.bundle_id
    assert tasks.samples == 150
    assert report.rss_mb > 10
    assert TaskRunner(config, "head").bundles.bundle_id == made.manifest.bundle_id, "also after a restart"


def test_features_used_for_the_score_are_those_of_the_bundle(config, make_bundle):
    """The linear encoder can be worked out with numpy: the installed pair scores what numpy scores."""
    made = make_bundle(dim=24, seed=3)
    report = install_bundle(config, order(made), made.path)
    task = made.manifest.task
    samples = data.load(config.data.source, task.input, task.class_names)
    train, test = data.split(samples, config.data.test_fraction, config.data.seed)
    saved = load_head(config.state / "head", installed_module.current(config.state / "bundles"))
    answers = saved.head.predict_proba(made.features(test.inputs)).argmax(1)
    assert float(np.mean(answers == test.labels)) == pytest.approx(report.acc_personal, abs=0.021)
    assert len(train) == report.samples


def current_folder(config):
    return installed_module.current(config.state / "bundles").folder


BREAKS = {
    "the heads are of another encoder": lambda config, other: (
        other.save(config.state / "head"),
        (config.state / "head" / "before.json").unlink(),
    ),
    "the head is gone": lambda config, _: [path.unlink() for path in (config.state / "head").iterdir()],
    "the head is torn": lambda config, _: [path.write_bytes(b"{") for path in (config.state / "head").glob("*.json")],
    "the encoder is damaged": lambda config, _: (current_folder(config) / "encoder.onnx").write_bytes(b"x"),
    "the pointer is torn": lambda config, _: (config.state / "bundles" / "current.json").write_bytes(b"{"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_device_whose_pair_is_broken_starts_and_says_that_it_runs_none(config, make_bundle, installed, case):
    """Killed between two writes, or failing flash memory: the coordinator then offers its release again."""
    other = make_bundle("other.hwb", dim=8, seed=9)
    samples = data.load(config.data.source, other.manifest.task.input, other.manifest.task.class_names)
    folder = config.state.parent / "elsewhere"
    bundle = installed_module.install(other.path, folder)
    result = module.personalize(bundle, samples, Encoder.open(bundle, "fp32", 1), FitOptions("prototype"))
    assert TaskRunner(config, "head").bundles.bundle_id == installed.manifest.bundle_id
    BREAKS[case](config, result)
    tasks = TaskRunner(config, "head")
    assert tasks.bundles.bundle_id == ""
    if case != "the pointer is torn":
        report = tasks.install(order(installed), installed.path)
        assert report.bundle_id == tasks.bundles.bundle_id == installed.manifest.bundle_id
        assert score_by_hand(config) == pytest.approx(report.acc_personal)
