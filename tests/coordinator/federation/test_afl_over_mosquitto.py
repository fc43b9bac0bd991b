"""Analytic federated learning by processes that have no torch, over a real broker, in one round."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from process_site import DIGITS, Site

from edge_agent import methods
from edge_agent.core.config import DataConfig
from edge_agent.data.partition import own_samples
from edge_agent.methods.afl import statistics
from edge_agent.methods.values import Update
from edge_agent.wire.tensors import decode

pytestmark = pytest.mark.broker

FEW = tuple(f"h{number:02d}" for number in range(3))
MANY = tuple(f"h{number:02d}" for number in range(20))
NO_TORCH = 'raise ImportError("torch is not installed on this device")\n'


class HeadSite(Site):
    """A site whose devices are of tier head, in a folder where torch cannot be imported."""

    def __init__(self, folder, agents, *, samples):
        rules = f'[cohort]\ntier = "head"\nmin_agents = {len(agents)}\n[round]\nquorum = 1.0\n[run]\nmethod = "afl"'
        super().__init__(folder, DIGITS, agents=agents, rules=rules)
        self.samples = samples
        for package in ("torch", "torchvision"):
            (folder / "devices" / package).mkdir(parents=True)
            (folder / "devices" / package / "__init__.py").write_text(NO_TORCH)

    def source(self, number):
        return f"digits:optdigits?n={self.samples}&client={number}&clients={len(self.agents)}"

    def agent(self, name):
        number = self.agents.index(name)
        (self.folder / "devices" / f"{name}.toml").write_text(
            f'id = "{name}"\ntier = "head"\nstate = "{name}"\nheartbeat_s = 2\n\n'
            f'[broker]\nurl = "{self.broker.url}"\n\n[data]\nsource = "{self.source(number)}"\n'
        )
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "edge_agent", "run", "--config", f"{name}.toml"],
                cwd=self.folder / "devices",
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def state_after(self, run):
        """The tensors that the run ended with."""
        (closed,) = self.entries(run, "round_closed")
        with self.state.look() as state:
            return decode(state.blobs.read(closed.digest)), closed


def ridge_of_all(site, made, state):
    """The classifier of the samples of all devices, whose features are those of the encoder in the state."""
    import torch

    model = made.build(DIGITS).eval()
    model.load_state_dict(
        {name: torch.from_numpy(array.copy()) for name, array in state.items() if name in model.state_dict()}
    )
    updates = []
    for number, name in enumerate(site.agents):
        data = DataConfig(source=site.source(number))
        train, _ = own_samples(data, name, DIGITS.input, DIGITS.class_names)
        with torch.no_grad():
            features = model.features(torch.from_numpy(train.inputs.astype(np.float32))).numpy()
        updates.append(Update(name, float(len(train)), statistics(features, train.labels, 10, made.all_params())))
    return made.aggregate({}, updates)


def one_round(folder, agents, samples):
    """The round of these devices: seconds from the request to its end, and bytes of one update."""
    made = methods.create("afl", {"batch_size": 8})
    with HeadSite(folder, agents, samples=samples) as site:
        site.until(lambda: _present(site) == len(agents), "all are here", limit_s=60.0)
        begin = time.monotonic()
        run = site.request(1, method="afl")
        site.finish(run)
        seconds = time.monotonic() - begin
        state, closed = site.state_after(run)
        assert len(site.entries(run, "update_accepted")) == len(agents)
        for name in agents:
            maps = Path(f"/proc/{site.processes[name].pid}/maps").read_text()
            assert "libtorch" not in maps
        expected = ridge_of_all(site, made, state)
        for name in ("head.weight", "head.bias"):
            scale = float(np.abs(expected[name]).max())
            np.testing.assert_allclose(state[name], expected[name], atol=1e-3 * scale)
        received = closed.body["bytes_up"]
    sends = made.sends(made.build(DIGITS), DIGITS)
    return seconds, sum(array.nbytes for array in sends.values()), received


def _present(site):
    path = site.folder / "state" / "status.json"
    if not path.exists():
        return 0
    return len([agent for agent in json.loads(path.read_text())["agents"] if agent.get("present")])


def test_devices_without_torch_make_the_classifier_of_all_their_samples(tmp_path, capsys):
    seconds, update_bytes, received = one_round(tmp_path, FEW, 240)
    with capsys.disabled():
        print(f"\n{len(FEW)} devices without torch: {seconds:.1f} s, {update_bytes} bytes each, {received} in all")


@pytest.mark.slow
def test_twenty_devices_without_torch_take_one_round(tmp_path, capsys):
    seconds, update_bytes, received = one_round(tmp_path, MANY, 80)
    with capsys.disabled():
        print(f"\n{len(MANY)} devices without torch: {seconds:.1f} s, {update_bytes} bytes each, {received} in all")
