"""The yardsticks measure the right thing: shapes of results, arithmetic of figures. Never how fast it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import windows_of_formulas as formulas
import yardstick_brokers as brokers
import yardstick_loop as loop
import yardstick_memory as memory
import yardstick_new_clients as new_clients
import yardstick_new_devices as new_devices
import yardstick_own_classes as own_classes
import yardstick_peft as part_of_encoder
import yardstick_poisoning as poisoning
import yardstick_precision as precision
import yardstick_scikit_learn as scikit_learn
import yardstick_secure_sum as secure_sum
import yardstick_simulate as simulate
import yardstick_stacked as stacked
import yardstick_starter as starter
import yardstick_starter_windows as starter_windows
import yardstick_steps as steps
import yardstick_tcp as tcp
import yardstick_transport as transport
import yardstick_tuning as tuning

import coordinator
from coordinator.research.bench import device, workloads
from coordinator.research.bench import simulate as ours
from coordinator.research.bench.measuring import SimulationSize
from edge_agent import methods, models
from edge_agent.client import Arrays

pytestmark = pytest.mark.bench


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """What the benchmark registers in this process is forgotten after each test."""
    for registry in (methods.registry, models.registry):
        monkeypatch.setattr(registry, "_extra", dict(registry._extra))


def test_scikit_learn_is_measured_on_the_features_of_the_device(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 3
    means = 3 * rng.standard_normal((3, 8), np.float32)
    points = means[labels] + rng.standard_normal((80, 8), np.float32)
    paths = (tmp_path / "fit", tmp_path / "test")
    for path, part in zip(paths, (slice(40), slice(40, None)), strict=True):
        classifier = {"weight": means, "bias": np.zeros(3, np.float32)}
        device.Features(points[part], labels[part], classifier).write(path)
    found = scikit_learn.measure(paths, tmp_path)
    assert found["accuracy"] > 0.9
    assert found["peak_mb"] > 60


def test_a_secure_sum_is_measured_beside_a_plain_one():
    plain, masked = (secure_sum.rounds(3, is_secure=is_secure, count=2) for is_secure in (False, True))
    model_kb = 131_203 * 4 / 1e3
    assert plain.up_kb == pytest.approx(model_kb, rel=0.02)
    assert masked.up_kb == pytest.approx(2 * model_kb, rel=0.02)
    assert masked.down_kb == pytest.approx(plain.down_kb, rel=0.02)
    assert "| 3 | yes |" in secure_sum.page([plain, masked], [secure_sum.masks(4, 100)])


@pytest.mark.parametrize("method", ["fedpac", "dualfed"])
def test_new_clients_are_scored_by_every_way_on_the_same_samples(method):
    small = {"pool": 240, "clients": 4, "new": 2, "largest": (30, 30), "rounds": 1, "joined": 1}
    found = new_clients.measure(
        new_clients.Setting(method, source="digits:optdigits", encoder="small_cnn", alpha=5.0, **small)
    )
    own = {"combined"} if method == "fedpac" else set()
    assert set(found) == {"own", "own as before", "lr", "auto", "auto_s", "full"} | own
    assert all(0 <= value <= 1 for name, value in found.items() if name != "auto_s")
    assert found["auto"] > 0.3


def test_new_devices_are_tested_on_samples_that_nobody_learns_from(tmp_path):
    """Small parts of the domains; by every way on the same samples, in percent by hand."""
    clients = {
        name: (
            new_devices.Part(train.inputs[:30], train.labels[:30]),
            new_devices.Part(test.inputs[:20], test.labels[:20]),
        )
        for name, (train, test) in new_devices.domains(0).items()
        if name in {"a0-inverted", "a0-photo", "new-inverted"}
    }
    found = new_devices.measure(clients, tmp_path / "domains-0", 0, rounds=1)
    assert list(found) == ["new-inverted"]
    assert {name for name in new_devices.ROWS.values() if not name.startswith("int8")} <= set(found["new-inverted"])
    assert found["new-inverted"]["n_test"] == 20
    again = new_devices.measure(clients, tmp_path / "domains-0", 0, rounds=1)
    assert again == found, "what is there is not trained again"


def test_digits_of_test_samples_are_drawn_from_originals_that_nobody_learns_from():
    """Plain images are the originals; those of other styles come from the same two halves."""
    clients = new_devices.domains(1)
    sides = [
        {image.tobytes() for name, parts in clients.items() if name.endswith("-plain") for image in parts[side].inputs}
        for side in (0, 1)
    ]
    assert not sides[0] & sides[1]
    assert len(clients) == 20


def test_the_table_of_new_devices_by_hand(tmp_path):
    names = list(new_devices.ROWS.values())
    for seed, values in enumerate(((0.5, 0.7), (0.8, 0.8))):
        run = {f"new-{number}": dict.fromkeys(names, value) for number, value in enumerate(values)}
        (tmp_path / f"fonts-{seed}.json").write_text(json.dumps(run))
    lines = new_devices.table(tmp_path)
    assert lines[:2] == ["| | fonts |", "|---|---|"]
    assert lines[2] == "| best local model | 70.0 ± 10.0 |", "60 and 80"
    assert len(lines) == 2 + len(names)


def test_plain_tcp_moves_every_byte_both_ways(tmp_path):
    down, up = tcp.seconds(2, 300_000, tmp_path)
    assert down > 0
    assert up > 0


@pytest.mark.broker
def test_transport_is_measured_in_both_directions(tmp_path):
    found = transport.measure(1, 200_000, ["amqtt"], tmp_path, repeats=1)
    assert [(leg["broker"], leg["direction"]) for leg in found["legs"]] == [("amqtt", "broadcast"), ("amqtt", "upload")]
    for leg in found["legs"]:
        assert leg["mb_per_s"] > 0
        assert leg["of_tcp"] == pytest.approx(leg["mb_per_s"] / found["tcp_mb_per_s"][leg["direction"]], rel=0.01)
        assert set(leg["cpu_s"]) == set(leg["peak_mb"]) == {"broker", "coordinator", "agents"}
        assert all(10 < size < 1000 for size in leg["peak_mb"].values())
    json.dumps(found)


def test_ratios_are_medians_of_pairs_and_not_of_all():
    """Load that falls on one pair falls on both: 2 / 1, 30 / 20 and 3 / 2 have the median 1.5."""
    turns = simulate.Turns(
        "fedavg",
        ours=((2, 4.4), (30, 4), (3, 4)),
        bare=((1, 4), (20, 4), (2, 4)),
        keeping=((1, 3), (10, 3), (2, 3)),
    )
    found = {row.name: row for row in turns.rows()}
    assert found["fedavg: round over bare loop"].value == 1.5
    assert found["fedavg: round over bare loop, CPU of all processes"].value == 1.0
    assert found["fedavg: round over bare loop that keeps freed memory, too"].value == 2.0


def test_tuning_is_scored_from_the_very_state_of_the_run(tmp_path):
    """With the parameters of the run its own result comes out; others give other numbers, and nothing is trained."""
    params = {"local_epochs": 1, "lr": 0.05, "tune_lr": 0.02, "tune_epochs": 2}
    plan = {"method": "fedbabu", "data": ("digits:optdigits?n=200",), "clients": 2, "rounds": 1, "params": params}
    coordinator.simulate(**plan, engine="serial", device="cpu", local=False, out=tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    ours = tuning.Tuning(tmp_path / "run")
    same = ours.score(tune_lr=0.02)
    assert same.test == pytest.approx(100 * result["last"]["acc"]["personal"]["clients_mean"], abs=0.01)
    assert ours.score(tune_epochs=0).test != same.test
    data = tuning.ClientData.split(*[Arrays(np.arange(11)[:, None], np.arange(11))] * 2, np.random.default_rng(0))
    assert sorted([*data.tuning.labels, *data.validation.labels]) == list(range(11))
    assert len(data.validation.labels) == 2


def test_the_bare_loop_does_the_work_of_its_method(monkeypatch):
    """30 samples in batches of 20 are two steps: five epochs of all weights; FedPAC: one of the head, five without."""
    monkeypatch.setitem(workloads.W1_PARAMS, "batch_size", 20)
    steps = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self: (steps.append(len(self.param_groups[0]["params"])), step(self))
    )
    torch.manual_seed(0)
    inputs = torch.randn(30, 1, 28, 28)
    labels = torch.arange(30) % 10
    loop.fedavg(loop.fresh_model(), inputs, labels)
    assert steps == [8] * 10
    steps.clear()
    loop.fedpac(loop.fresh_model(), inputs, labels)
    assert steps == [2] * 2 + [6] * 10
    means = loop.class_means(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([4, 4, 9]))
    assert means[:, 0].tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0, 7]


def test_simulated_rounds_and_bare_ones_are_measured_in_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "has_fashion", lambda: False)
    size = SimulationSize(clients=2, samples=20, rounds=1, workers=1)
    found = simulate.measure("fedavg", ours.data_source(tmp_path, size), size, tmp_path / "run")
    assert [len(one) for one in (found.ours, found.bare, found.keeping)] == [1, 1, 1]
    assert [row.unit for row in found.rows()] == ["s", "s", "x", "x", "x"]
    assert all(row.value > 0 for row in found.rows())


def test_memory_of_few_clients_and_of_many_is_that_of_as_many_updates(tmp_path, monkeypatch):
    """8 clients in 2 rounds send as many updates as 4 in 4; each simulation has its own process."""
    asked = []
    most = {4: 1000.0, 8: 1050.0}
    monkeypatch.setattr(
        memory, "_in_a_process", lambda folder, clients, *rest: (asked.append((clients, *rest)), most[clients])[1]
    )
    rows = memory.memory_rows(8, 3, tmp_path / "memory")
    assert asked == [(4, 4, 3), (8, 2, 3)]
    assert [(row.value, row.unit) for row in rows] == [(1000, "MB"), (1050, "MB"), (1.05, "x")]


def test_memory_of_a_simulation_is_that_of_all_its_processes(tmp_path):
    with_one_worker = memory._in_a_process(tmp_path / "one", 1, 1, 1)
    assert 400 < with_one_worker < 3000


def test_stacked_rounds_are_measured_against_a_loop_on_the_same_device(tmp_path, monkeypatch):
    """Of 1 / 4 and 3 / 6 the median is 0.375."""
    turns = stacked.Against(7, (1.0, 3.0), (4.0, 6.0), {})
    assert [(row.name, row.value) for row in turns.rows()] == [
        ("7 clients: rounds a second, engine stacked", 0.5),
        ("7 clients: rounds a second, one client after another", 0.2),
        ("7 clients: round over that loop", 0.375),
    ]
    monkeypatch.setattr(ours, "has_fashion", lambda: False)
    found = stacked.report(SimulationSize(clients=1, samples=20, rounds=1), tmp_path, "cpu")
    assert found["device"] == "cpu"
    assert (found["engine"]["1"]["jobs"], found["engine"]["1"]["of"]) == (0, 2), "there is nobody beside it"
    assert found["engine"]["5"]["of"] == 10
    assert set(found["engine"]["5"]["seconds_of_a_step"]) == {"one by one", "grouped", "unfolded"}
    assert all(row.value > 0 for row in found["rows"])


def test_precisions_and_layouts_are_measured_in_turns(monkeypatch):
    monkeypatch.setattr(precision, "NETWORKS", {"small_cnn": (1, 8)})
    monkeypatch.setattr(precision, "SAMPLES", 60)
    calls = []
    autocast = torch.autocast

    def watched(*words, **how):
        calls.append(how["enabled"])
        return autocast(*words, **how)

    monkeypatch.setattr(torch, "autocast", watched)
    threads = torch.get_num_threads()
    try:
        found = precision.report(2, "cpu", 1)
    finally:
        torch.set_num_threads(threads)
    assert [row.unit for row in found["rows"]] == ["s", "x", "x"]
    assert all(row.value > 0 for row in found["rows"])
    assert calls == [False, False, True, True, False, False] * 3, "two batches of each variant, once to warm up"
    assert (found["device"], found["threads"]) == ("cpu", 1)


def test_auroc_is_scikit_learns_also_with_ties():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    usual = rng.integers(0, 9, 50).astype(float)
    strange = rng.integers(3, 12, 30).astype(float)
    expected = roc_auc_score([0] * 50 + [1] * 30, np.concatenate([usual, strange]))
    assert own_classes.auroc(usual, strange) == pytest.approx(expected)


def test_figures_of_seeds_are_summed_up_by_mean_and_spread():
    rows = [{"seed": seed, "head": "lr", "each": 5, "own": value} for seed, value in enumerate((0.5, 0.7))]
    assert own_classes.summary(rows, ("head", "each")) == [{"head": "lr", "each": 5, "own": [0.6, 0.1]}]


def poisoned_run(federation, attack, rule, attackers=1):
    return federation.run(poisoning.ATTACKS[attack], attackers, poisoning.RULES[rule])


AT_THE_BOUNDS = ("-4.9x, 4.9x samples", "-4.5x last step, 4.5x samples", "drip -1x, 4.9x samples", "sign flip")


@pytest.mark.parametrize("attack", AT_THE_BOUNDS)
def test_one_agent_of_four_at_the_bounds_does_not_destroy_the_model_under_the_defaults(attack):
    """Bounds of size and of samples alone left every one of these as it is: it cost 27 to 85 points on this split."""
    federation = poisoning.Federation("fedavg", 4, 1)
    alone = poisoned_run(federation, "absent", "no bounds").accuracy
    assert poisoned_run(federation, attack, "no bounds").accuracy < alone - 0.2
    bounded = poisoned_run(federation, attack, "mean (default)")
    assert bounded.accuracy > alone - 0.04
    assert bounded.attackers_suspect >= 2
    assert bounded.honest_left_out == 0


def test_four_of_twenty_at_the_bounds_cost_less_than_ten_points():
    federation = poisoning.Federation("fedavg", 20, 0)
    alone = poisoned_run(federation, "absent", "no bounds", 4).accuracy
    for attack in AT_THE_BOUNDS:
        assert poisoned_run(federation, attack, "mean (default)", 4).accuracy > alone - 0.1


def test_honest_clients_of_a_common_split_lose_nothing_by_the_bounds():
    federation = poisoning.Federation("fedavg", 20, 0)
    bounded = poisoned_run(federation, "none", "mean (default)", 0)
    assert bounded.accuracy > poisoned_run(federation, "none", "no bounds", 0).accuracy - 0.01
    assert (bounded.honest_suspect, bounded.honest_left_out) == (0, 0)


def test_training_a_part_of_the_encoder_is_tabled_by_task_and_choice(tmp_path):
    """Rows of several files, in any order: means and deviations by hand, bytes of a device in thousands."""
    of_run = {"task": "digits, 4 domains", "rounds": 9, "lr": 0.2, "up": 2000.0, "down_first": 8000.0, "down": 2100.0}
    bn = [{**of_run, "choice": "bn", "seed": seed, "acc": acc} for seed, acc in enumerate((0.5, 0.7))]
    frozen = {**of_run, "choice": "nothing (afl)", "rounds": 1, "seed": 0, "lr": None, "acc": 0.4, "down": None}
    costs = [{"encoder": "resnet18", "choice": "bn", "mb": mb, "seconds": 0.25} for mb in (90.0, 110.0)]
    paths = []
    for number, rows in enumerate(([bn[1], {"trial": bn[0]}], [*costs, bn[0], frozen])):
        paths.append(tmp_path / f"{number}.log")
        paths[-1].write_text("\n".join(map(json.dumps, rows)) + "\n\n| a table |\n")
    runs, spent = part_of_encoder.rows_in(paths)
    lines = part_of_encoder.table_of_runs(runs).splitlines()
    assert lines[2] == "| digits, 4 domains | nothing (afl) | 1 | – | 40.0 ± 0.0 | 2.0 | 8.0 | – |"
    assert lines[3] == "| digits, 4 domains | bn | 9 | 0.2 | 60.0 ± 10.0 | 2.0 | 8.0 | 2.1 |"
    assert part_of_encoder.table_of_costs(spent).splitlines()[2:] == ["| resnet18 | bn | 97 | 100 ± 10 | 250 ± 0 |"]
    # 19,200 numbers of batch norm, and the head's 512 x 10 + 10.
    assert part_of_encoder.update_kb("resnet18", "bn") == pytest.approx(4 * (19_200 + 5_130) / 1e3)


def test_the_samples_that_an_encoder_has_seen_before_are_no_clients():
    (images, labels), clients = part_of_encoder.fashion_clients(0)
    seen = {image.tobytes() for image in images}
    assert set(labels) == set(range(5))
    assert len(clients) == part_of_encoder.CLIENTS
    assert {int(label) for own in clients.values() for label in own[1]} == set(range(10))
    for train, known_labels, test, test_labels in clients.values():
        assert not seen.intersection(image.tobytes() for image in train)
        assert set(test_labels) == set(known_labels)
        assert len(test) == len(test_labels)


def test_the_table_of_hostile_updates_shows_what_was_lost():
    part = poisoning.PARTS[0]
    results = {}
    for key, name, _, _ in poisoning.keys_of(part, 0):
        accuracy = {"absent": 0.9, "none": 0.91}.get(name, 0.8)
        results[key] = {"accuracy": accuracy, "backdoor": 0.5, "attackers_left_out": 0, "honest_left_out": 0}
    lines = poisoning.table(results, 3).splitlines()
    assert lines[0] == f"### {part.title}"
    assert lines[2] == "Honest clients alone: 90.0 % (seeds: 1)."
    assert lines[6].startswith("| none | -1.0 (-1.0) |")
    assert lines[7].startswith(f"| {part.attacks[0]} | 10.0 (10.0) |")


def test_two_views_of_a_formula_are_more_alike_than_views_of_two():
    views, kinds = formulas.draw_views(np.random.default_rng(0), 300, 64)
    assert views.shape == (300, 2, 64)
    assert np.isfinite(views).all()
    assert len(np.unique(kinds)) == 3
    # Spectra, which a shift in time leaves as they are.
    spectra = np.abs(np.fft.rfft(views - views.mean(2, keepdims=True)))
    spectra /= np.linalg.norm(spectra, axis=2, keepdims=True)
    likeness = spectra[:, 0] @ spectra[:, 1].T
    assert np.diag(likeness).mean() > likeness.mean() + 0.1


def test_each_kind_of_formula_makes_two_different_views():
    for make in formulas.KINDS:
        signals = make(np.random.default_rng(1), 5, 96)
        assert signals.shape == (5, 2, 96)
        assert np.isfinite(signals).all()
        assert (np.abs(signals[:, 0] - signals[:, 1]).max(axis=1) > 0).all()


def test_a_window_encoder_takes_channels_one_by_one():
    encoder = formulas.train(0.02, seed=0)
    windows = torch.from_numpy(np.random.default_rng(0).normal(3, 2, (4, 3, 80)).astype(np.float32))
    with torch.no_grad():
        features = encoder(windows)
        second = encoder(windows[:, 1:2])
    assert features.shape == (4, 3 * (encoder.width + 2))
    np.testing.assert_allclose(features[:, encoder.width + 2 : 2 * (encoder.width + 2)], second, atol=1e-5)
    np.testing.assert_allclose(second[:, -2], windows[:, 1].mean(1), atol=1e-5)


def test_heads_on_a_window_encoder_are_measured_beside_local_models(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(160) % 2
    tones = np.sin(np.arange(64) * np.where(labels, 0.3, 1.2)[:, None] + rng.uniform(0, 6, (160, 1)))
    windows = (tones + rng.normal(0, 0.2, tones.shape))[:, None].astype(np.float32)
    pools = [(windows[part], labels[part]) for part in (slice(40), slice(40, None))]
    drawn = starter_windows.drawn_apart(pools[0], pools[1], rng)
    assert drawn.train_labels.tolist() == [0, 1] * 20
    assert len(drawn.test) == 80
    result = starter_windows.measure(formulas.WindowEncoder().eval(), drawn, tmp_path, seed=0)
    assert set(result) == {"1", "5", "10"}
    assert result["10"]["local"] > 0.9
    assert result["10"]["auto"] > 0.9


def test_the_table_of_steps_has_means_over_seeds_and_gains_over_the_step_before():
    """Two seeds by hand: 50 and 70 % alone, 80 and 90 % on the starter encoder, gains of 30 and 20 points."""
    traffic = {"linear_probe MB": 4.0, "afl MB": 10.0, "fedavg_ft MB": 90.0}
    rows = [
        {"alone": alone, "linear_probe": probe, "afl": 0.8, "fedavg_ft": 0.9, **traffic}
        for alone, probe in ((0.5, 0.8), (0.7, 0.9))
    ]
    lines = steps.table({10: rows})
    assert lines[0] == "| step | MB for each device | 5 photos of each, gain |"
    assert lines[2] == f"| {steps.NAMES['alone']} | 0.0 | 60.0 ± 14.1 |"
    assert lines[3] == f"| {steps.NAMES['linear_probe']} | 4.0 | 85.0 ± 7.1; +25.0 (-38.5 to +88.5) |"


def test_gains_over_local_models_are_those_of_the_same_seed():
    runs = [{"local": 0.5, "head": 0.4, "auto": 0.6}, {"local": 0.7, "head": 0.8, "auto": 0.8}]
    row = starter_windows.table_row("watch", runs)
    assert row == (
        "| watch | 60.0 ± 14.1 | 60.0 ± 28.3 | +0.0 (-127.1 to +127.1) | 70.0 ± 14.1 | **+10.0 (+10.0 to +10.0)** |"
    )
    assert starter.spread(np.array([0.5, 0.7])) == "60.0 ± 14.1"


def test_the_table_of_brokers_by_hand():
    """Two runs undisturbed, and one with a node killed, which has other bits and sent 2.5 MB more than their median."""
    common = {"broker": "NATS", "nodes": 3, "messages": 600, "memory_bytes": 40_000_000}
    calm = {**common, "disturbance": "undisturbed", "sha256": "aa"}
    runs = [
        brokers.Run(**calm, seconds=2.0, sent_bytes=10_000_000, broker_cpu_s=1.0, clients_cpu_s=3.0),
        brokers.Run(**calm, seconds=4.0, sent_bytes=11_000_000, broker_cpu_s=2.0, clients_cpu_s=5.0),
        brokers.Run(**{**calm, "disturbance": "node killed", "sha256": "bb"}, seconds=6.0, sent_bytes=13_000_000),
    ]
    assert brokers.table(runs).splitlines()[2:] == [
        "| NATS | 3 | undisturbed | A | 3.0 (2.0 to 4.0) | 1.5, 4.0 | 0.0 to 0.5 MB | 40 MB | 225 |",
        "| NATS | 3 | node killed | B | 6.0 (6.0 to 6.0) | –, – | 2.5 to 2.5 MB | 40 MB | 100 |",
    ]


@pytest.mark.broker
def test_a_broker_that_is_killed_is_measured_with_the_bits_of_one_that_is_not():
    killed = brokers.measure(brokers.Amqtt, "node killed", agents=2, feature_dim=8)
    undisturbed = brokers.measure(brokers.Amqtt, "undisturbed", agents=2, feature_dim=8)
    assert killed.sha256 == undisturbed.sha256
    # Three updates of each agent, and three models of the coordinator.
    assert undisturbed.sent_bytes > 9 * 4096 * 8 * 4
    assert undisturbed.memory_bytes > 1_000_000
