"""Hosted clients in the configuration: what is asked for is checked before anything is done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.cli.run import request_for
from coordinator.config import CoordinatorConfig, ProxyConfig, WarmStartConfig
from coordinator.hosted.transport import HostedTransport
from coordinator.service import preflight
from coordinator.service.preflight import check_defaults, overlaps
from edge_agent import data
from edge_agent.client import choose_device
from edge_agent.core import capabilities
from edge_agent.core.config import load, parse
from edge_agent.core.errors import ConfigError
from edge_agent.data import partition

CONFIGS = Path(__file__).parents[3] / "configs"
TASK = {"class_names": ["a", "b"], "encoder": "linear", "input": {"kind": "image", "channels": 1}}
DIGITS = {"source": "digits:optdigits?n=20"}


def configured(*hosted, base=None, **more):
    raw = {"task": TASK, "hosted": [{"id": "h", "data": DIGITS, **one} for one in hosted], **more}
    return parse(CoordinatorConfig, raw, where="test", base=base)


def test_the_example_file_is_valid_and_shows_defaults():
    config = load(CoordinatorConfig, CONFIGS / "coordinator-hosted.toml")
    check_defaults(config, None)
    assert [client.id for client in config.hosted] == ["archive", "scans"]
    short = config.hosted[1].model_copy(update={"id": "archive", "data": config.hosted[0].data})
    assert short == config.hosted[0], "what it shows as settings is what is there without them"
    for name, kind in (("warm_start", WarmStartConfig), ("proxy", ProxyConfig)):
        shown = getattr(config, name)
        assert shown == kind(data=shown.data, folder=CONFIGS), name


def test_relative_places_count_from_the_file(tmp_path):
    config = configured({"data": {"source": "npz:x.npz", "partition": "p.json"}}, base=tmp_path)
    (client,) = config.hosted
    assert (client.data.folder, client.data.partition) == (tmp_path, tmp_path / "p.json")


def test_a_hosted_client_is_an_agent_with_its_folder_below_the_coordinators(tmp_path):
    config = configured({"device": "cpu", "threads": 2}, state=tmp_path, federation="lab")
    agent = config.hosted[0].agent(config.federation, config.state, lease_s=9.0)
    assert (agent.id, agent.federation, agent.tier) == ("h", "lab", "train")
    assert (agent.state, agent.heartbeat_s) == (tmp_path / "hosted" / "h", 3.0)
    assert (agent.training.device, agent.training.threads) == ("cpu", 2)


def test_mistakes_are_told_with_the_nearest_key():
    with pytest.raises(ConfigError, match=r"hosted\.0\.data\.sorce: unknown key; did you mean 'source'\?"):
        configured({"data": {**DIGITS, "sorce": "x"}})
    with pytest.raises(ConfigError, match=r"hosted\.1\.devise: unknown key; did you mean 'device'\?"):
        configured({}, {"id": "g", "devise": "cpu"})


def test_two_hosted_clients_need_two_ids():
    with pytest.raises(ConfigError, match="hosted clients h occur twice"):
        configured({}, {}, {"id": "g"})


def test_all_mistakes_of_hosted_clients_are_told_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pool = partition.Pool.of(np.zeros(3, np.int64), None)
    partition.divided("iid", {}, pool, {"c0": (np.array([0]), np.array([1]))}).write(tmp_path / "p.json")
    config = configured(
        {"id": "a", "data": {"source": "npz:nowhere.npz"}},
        {"id": "b", "device": "cuda:1"},
        {"id": "c", "data": {**DIGITS, "partition": str(tmp_path / "p.json")}},
        {"id": "d", "device": "tpu"},
        {"id": "e", "device": "auto"},
    )
    with pytest.raises(ConfigError) as caught:
        check_defaults(config, None)
    assert len(caught.value.mistakes) == 4
    report = str(caught.value)
    assert "a: npz:nowhere.npz: there is no /" in report
    assert "b: device = 'cuda:1': this machine has 0 CUDA devices; use 'auto' or 'cpu'" in report
    assert "c: " in report
    assert "no client 'c' among 1" in report
    assert "d: device = 'tpu': Expected one of cpu" in report


@pytest.mark.parametrize(
    "theirs, warm, is_told",
    [
        ("digits:optdigits?n=20", "digits:optdigits?n=30", True),
        ("digits:optdigits?n=20", "digits:photo?n=30", False),
        ("digits:optdigits?client=0&clients=3", "digits:optdigits?client=1&clients=3", False),
        ("digits:optdigits?client=0&clients=3", "digits:optdigits?client=1&clients=2", True),
        ("digits:optdigits?client=0&clients=3", "digits:optdigits?client=1&clients=3&seed=4", True),
        ("idx:a/../b?split=test", "idx:b", False),
        ("idx:a/../b?split=all", "idx:b", True),
        ("idx:a", "idx:b", False),
        ("ucihar:x?subject=3", "ucihar:x?subject=4", False),
    ],
)
def test_samples_that_serve_twice_are_told(tmp_path, theirs, warm, is_told):
    config = configured(
        {"data": {"source": theirs}}, base=tmp_path, warm_start={"data": warm}, proxy={"data": "npz:other.npz"}
    )
    assert len(overlaps(config)) == is_told
    assert overlaps(config.model_copy(update={"warm_start": None})) == []
    if is_told:
        assert f"[warm_start] learns from {warm}, and 'h' holds back samples of {theirs}" in overlaps(config)[0]
    proxy = config.model_copy(update={"warm_start": None, "proxy": ProxyConfig(data=warm, folder=tmp_path)})
    assert [line.partition(" ")[0] for line in overlaps(proxy)] == ["[proxy]"] * is_told


def test_the_example_file_gives_nobody_samples_that_others_test_on():
    """By the samples themselves: of the handwritten ones those of a row are the same in all styles."""
    config = load(CoordinatorConfig, CONFIGS / "coordinator-hosted.toml")
    assert overlaps(config) == []
    sources = (config.hosted[0].data.source, config.warm_start.data, config.proxy.data)
    plain = [data.load(source.replace("photo", "optdigits")).inputs.reshape(-1, 3 * 32 * 32) for source in sources]
    rows = [{row.tobytes() for row in inputs} for inputs in plain]
    assert len(rows[0] | rows[1] | rows[2]) == sum(map(len, rows))
    assert config.hosted[1].data.source.startswith("digits:rendered")


def test_a_run_says_so_before_it_begins(tmp_path, capsys):
    config = configured({}, warm_start={"data": "digits:optdigits?n=30"})
    request_for(config, None, None, None, {})
    assert "note: [warm_start] learns from digits:optdigits?n=30" in capsys.readouterr().err


def test_auto_takes_the_gpu_where_there_is_one_and_else_the_cpu(monkeypatch):
    assert preflight.missing_device("auto") == preflight.missing_device("cpu") == ""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert preflight.missing_device("cuda:1") == ""
    assert preflight.missing_device("cuda:2") == "this machine has 2 CUDA devices"


def test_one_process_serves_a_gpu_and_several_serve_cores(tmp_path, monkeypatch):
    config = configured({"id": "a"}, {"id": "b"}, {"id": "c"}, state=tmp_path)
    able = capabilities.find()

    def processes(accelerators, cores, **changes):
        found = able.model_copy(update={"accelerators": accelerators, "cores": cores})
        monkeypatch.setattr(capabilities, "find", lambda: found)
        hosts = HostedTransport.of(config.model_copy(update=changes), lambda: None)
        return [[client.id for client in process.configs] for process in hosts.processes]

    assert processes(("nvidia gpu",), 8) == [["a", "b", "c"]]
    assert processes((), 2) == [["a", "c"], ["b"]]
    assert processes((), 8) == [["a"], ["b"], ["c"]]
    assert processes((), 8, hosted_processes=2) == [["a", "c"], ["b"]]


def placed(*clients, devices, state):
    """Return (client, device) of each process."""
    config = configured(*clients, state=state, hosted_devices=list(devices))
    hosts = HostedTransport.of(config, lambda: None)
    return [[(client.id, client.training.device) for client in process.configs] for process in hosts.processes]


def test_hosted_clients_are_spread_over_the_devices_of_the_configuration(tmp_path):
    clients = [{"id": name} for name in "abcde"]
    assert placed(*clients, devices=("cuda:0", "cuda:1"), state=tmp_path) == [
        [("a", "cuda:0"), ("c", "cuda:0"), ("e", "cuda:0")],
        [("b", "cuda:1"), ("d", "cuda:1")],
    ]
    # A device that is named twice has two processes; one that gets no client has none.
    assert placed(*clients[:2], devices=("cpu", "cpu", "cpu"), state=tmp_path) == [[("a", "cpu")], [("b", "cpu")]]


def test_a_hosted_client_keeps_the_device_that_it_names(tmp_path):
    clients = [{"id": "a"}, {"id": "b", "device": "cuda:1"}, {"id": "c", "device": "cuda:1"}, {"id": "d"}]
    assert placed(*clients, devices=("cuda:0", "cuda:1"), state=tmp_path) == [
        [("a", "cuda:0"), ("d", "cuda:0")],
        [("b", "cuda:1"), ("c", "cuda:1")],
    ]


def test_devices_that_do_not_fit_the_hosted_clients_are_refused_together(tmp_path):
    with pytest.raises(ConfigError) as refused:
        configured({"device": "cuda:2"}, hosted_devices=["cuda:0", "auto"], hosted_processes=2, state=tmp_path)
    assert "exclude each other" in str(refused.value)
    assert "name devices" in str(refused.value)
    assert "hosted client 'h' has device = 'cuda:2'" in str(refused.value)


def test_devices_that_this_machine_lacks_are_told_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = configured({}, hosted_devices=["cuda:0", "cuda:1", "cpu"], state=tmp_path)
    with pytest.raises(ConfigError) as refused:
        check_defaults(config, None)
    for device in ("cuda:0", "cuda:1"):
        assert f"hosted_devices: device = '{device}': this machine has 0 CUDA devices" in str(refused.value)
