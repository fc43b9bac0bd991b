"""A relay as a process between two Mosquittos: the same encoder as without, also where one of the three is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from process_site import DIGITS, EVERYBODY, LARGE, Site

from coordinator.broker import EmbeddedBroker, MosquittoBroker, find_mosquitto
from coordinator.state.command_keys import CommandKeys

AGENTS = ("a0", "a1")


class RelaySite(Site):
    """Agents at a broker of their own, and a relay between it and the coordinator's."""

    def __enter__(self):
        self.site_broker = MosquittoBroker() if find_mosquitto() else EmbeddedBroker()
        self.site_broker.start()
        super().__enter__()
        (self.folder / "relay.toml").write_text(
            f'id = "north"\nstate = "relay-state"\n{self.broker_toml()}\n[site]\nurl = "{self.site_broker.url}"\n'
        )
        self.relay()
        return self

    def __exit__(self, *arguments):
        super().__exit__(*arguments)
        self.site_broker.stop()

    def agents_broker_toml(self):
        return f'[broker]\nurl = "{self.site_broker.url}"'

    def relay(self):
        self.start("relay", "edge_agent", "relay", "--config", "relay.toml")

    def status(self, *options):
        """What the command shows: its exit code and its output."""
        command = [sys.executable, "-m", "edge_agent", "relay", "--status", "--config", "relay.toml", *options]
        shown = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        return shown.returncode, shown.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with RelaySite(tmp_path_factory.mktemp("relay"), LARGE, agents=AGENTS) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The encoder of a run without a relay."""
    with Site(tmp_path_factory.mktemp("direct"), LARGE, agents=AGENTS) as direct:
        return direct.finish(direct.request(2))


def test_the_encoder_is_that_of_agents_without_a_relay(site, plain):
    assert site.finish(site.request(2)) == plain


def test_the_status_names_agents_brokers_and_bytes(site, plain):
    site.finish(site.request(1))
    site.until(lambda: site.status("--json")[0] == 0, "the relay has written its status")
    status = {}

    def is_of_after_the_run():
        status.update(json.loads(site.status("--json")[1]))
        return status["served_bytes"] > 1.9 * status["fetched_bytes"] > 0

    site.until(is_of_after_the_run, "the status says that each model was served twice", every_s=0.5)
    assert (status["running"], status["online"], status["waits_for"]) == (True, 2, None)
    code, text = site.status()
    assert code == 0
    assert "2 online of 2" in text
    assert "Traceback" not in (site.folder / "relay.log").read_text()


@pytest.mark.slow
def test_a_relay_killed_by_kill_9_in_a_download_changes_no_bit(site, plain):
    run = site.request(2)
    site.until(lambda: len(site.opened(run)) >= 1, "round 1 opens")
    partial = site.folder / "relay-state" / "cache" / "partial"
    site.until(lambda: any(partial.glob("*.part")) or len(site.opened(run)) >= 2, "a model is under way")
    site.kill("relay")
    site.relay()
    assert site.finish(run) == plain


@pytest.mark.slow
@pytest.mark.parametrize("which", ["site_broker", "broker"])
def test_a_broker_killed_by_kill_9_changes_no_bit(site, plain, which):
    """Its supervisor starts it again."""
    run = site.request(2)
    site.until(lambda: len(site.opened(run)) >= 1, "round 1 opens")
    os.kill(getattr(site, which).pid, signal.SIGKILL)
    assert site.finish(run) == plain


def test_a_second_relay_with_one_state_folder_is_refused(site):
    command = [sys.executable, "-m", "edge_agent", "relay", "--config", "relay.toml"]
    second = subprocess.run(command, cwd=site.folder, capture_output=True, text=True, check=False, timeout=60)
    assert second.returncode == 1
    assert "is in use by edge-agent relay north" in second.stderr


NO_BOUNDS = "\n".join(
    f'{name} = "none"'
    for name in ("max_norm", "max_weight", "max_share", "repeat_share", "min_cosine", "max_class_mean", "max_loss")
)
THREE = ("a0", "a1", "a2")


class SummingSite(RelaySite):
    """The coordinator takes the sums of the relay, which has the key of its enrolment."""

    def relay(self):
        keys = CommandKeys.of(self.folder / "state", "home")
        (self.folder / "north.commands.key").write_text(keys.of_agent("north").text())
        path = self.folder / "relay.toml"
        text = path.read_text()
        if "command_key_file" not in text:
            path.write_text(text.replace("[site]", 'command_key_file = "north.commands.key"\n[site]'))
        super().relay()


def test_a_site_that_sums_gives_the_same_encoder_also_where_its_relay_is_killed(tmp_path):
    bounds = f"{EVERYBODY}\n[aggregation]\n{NO_BOUNDS}"
    (tmp_path / "direct").mkdir()
    (tmp_path / "site").mkdir()
    with Site(tmp_path / "direct", DIGITS, agents=THREE, rules=bounds) as direct:
        plain = direct.finish(direct.request(3))
    rules = f'{bounds}\n[aggregators]\nsites = ["north"]'
    with SummingSite(tmp_path / "site", DIGITS, agents=THREE, rules=rules) as site:
        assert site.finish(site.request(3)) == plain
        assert "sum_taken relay=north" in (site.folder / "serve.log").read_text()
        run = site.request(3)
        site.until(lambda: len(site.opened(run)) >= 2, "round 2 opens")
        site.kill("relay")
        site.relay()
        assert site.finish(run) == plain
        for name in ("serve", "relay"):
            assert "Traceback" not in (site.folder / f"{name}.log").read_text()
