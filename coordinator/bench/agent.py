"""An agent under measurement: the real one, with duties that train nothing where asked, and the benchmark's encoder."""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import threading
from pathlib import Path

from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.tasks import TaskRunner
from edge_agent.config import AgentConfig, load
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.worker import ThreadWorker

from . import noop, w1


def main() -> None:
    """Be the agent that ``--config`` describes until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--train", action="store_true", help="train for real")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    agent = make(load(AgentConfig, arguments.config), trains=arguments.train)
    agent.start()
    agent.serve(stop)
    agent.close()


def make(config: AgentConfig, *, trains: bool) -> Agent:
    """The agent, ready to start."""
    boot = secrets.token_hex(8)
    if trains:
        w1.register()
    tasks = TaskRunner(config, "train") if trains else noop.NoDuties(config, "train")
    transport = MqttTransport(config.broker, config.id, will=will_of(config, boot))
    return Agent(config, transport, tasks, worker=ThreadWorker(transport.wake), boot=boot)


if __name__ == "__main__":
    main()
