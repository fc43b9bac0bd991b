"""A client's training and held-out rows are the same in a simulation, in its agent, and in 'edge-agent fit'."""

from __future__ import annotations

import json

import numpy as np
import pytest
from simulation_harness import write_images

from coordinator.simulation import datasets
from coordinator.simulation.plan import Plan
from edge_agent import Personalizer
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.cli import main
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.data.partition import own_samples
from edge_agent.personal import personalize


def test_recordings_are_held_out_whole_in_a_simulation_too(tmp_path):
    """Two people, each a table of twelve recordings of two activities."""
    for person in ("ann", "bob"):
        rows = [f"r{number},{'ab'[number % 2]},{number},{step}" for number in range(12) for step in range(9)]
        (tmp_path / f"{person}.csv").write_text("\n".join(["r,l,x,y", *rows]))
    data = tuple(f"csv:{tmp_path / person}.csv?label=l&recording=r" for person in ("ann", "bob"))
    plan = Plan(data=data, partition="domains", encoder="linear", input={"length": 4, "stride": 2})
    pools, division, task = datasets.prepare(plan)
    for source, client in zip(data, division.clients, strict=True):
        own = own_samples(DataConfig(source=source), client, task.input, task.class_names)
        for one, other in zip(pools.arrays(division.share(client, "p.json")), own, strict=True):
            np.testing.assert_array_equal(one.inputs, other.inputs)
        assert not {*own[0].groups.tolist()} & {*own[1].groups.tolist()}


@pytest.mark.parametrize("rule", ["dirichlet", "domains"])
def test_simulation_agent_and_command_take_the_same_rows(tmp_path, make_bundle, monkeypatch, capsys, rule):
    """By a partition file, and where each client has its own source, which each splits alike."""
    data = (write_images(tmp_path / "x.npz", 120),)
    given = {"alpha": 0.5, "clients": 2}
    if rule == "domains":
        data = ("digits:optdigits?n=80", "digits:rendered?n=60")
        given = {}
    pools, division, task = datasets.prepare(Plan(data=data, partition=rule, encoder="linear", **given))
    division.write(tmp_path / "p.json")
    bundle = make_bundle(task=task).path
    for number, client in enumerate(division.clients):
        own = {"source": data[0], "partition": tmp_path / "p.json", "client": client}
        words = ["--data", data[0], "--partition", str(tmp_path / "p.json"), "--client", client]
        if rule == "domains":
            own = {"source": data[number]}
            words = ["--data", data[number]]
        simulated = pools.arrays(division.share(client, "p.json"))
        config = AgentConfig(id="porch", state=tmp_path / "s", data=DataConfig(**own))
        in_agent = TaskRunner(config, "head").read_samples(task)
        in_command = fitted_with(monkeypatch, ["fit", "--bundle", str(bundle), "--out", str(tmp_path / "h"), *words])
        opened = Personalizer.open(bundle, cache=tmp_path / "cache")
        in_python = opened.samples(str(own.pop("source")), **own)
        for parts in (in_agent, in_command, in_python):
            for one, other in zip(simulated, parts, strict=True):
                assert len(one.labels)
                np.testing.assert_array_equal(one.inputs, other.inputs)
                np.testing.assert_array_equal(one.labels, other.labels)
        words = ["evaluate", "--bundle", str(bundle), "--head", str(tmp_path / "h"), "--json", *words]
        capsys.readouterr()
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["n_test"] == len(simulated[1].labels)


def fitted_with(monkeypatch, words):
    """The samples with which the command fits."""
    taken = []
    real = personalize.personalize

    def watched(bundle, samples, *rest, **options):
        taken.append(samples)
        return real(bundle, samples, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(personalize, "personalize", watched)
        assert main(words) == 0
    return taken[0]
