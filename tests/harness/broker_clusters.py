"""Brokers that share their messages, each a process that nobody restarts: two Mosquittos, or a NATS cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest

from coordinator.broker import find_mosquitto, settings_text

START_LIMIT_S = 60.0
NATS = shutil.which("nats-server", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))
NEEDS_NATS = pytest.mark.skipif(NATS is None, reason="nats-server is not installed")


def free_ports(count):
    """So many ports that are free now."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


class Cluster:
    """Broker processes by URL, which a `process_site.Site` starts and stops; subclasses say how they start."""

    def __init__(self, folder):
        self.folder = folder
        self.nodes = {}

    @property
    def url(self):
        return list(self.nodes)

    def add(self, port, *command):
        log = (self.folder / f"broker-{port}.log").open("ab")
        with log:
            process = subprocess.Popen(
                [str(word) for word in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.nodes[f"mqtt://127.0.0.1:{port}"] = process

    def kill(self, url):
        self.nodes[url].kill()
        self.nodes[url].wait()

    def pause(self, url):
        """Its connections stand, and it answers nothing."""
        self.nodes[url].send_signal(signal.SIGSTOP)

    def resume_all(self):
        for process in self.nodes.values():
            process.send_signal(signal.SIGCONT)

    def stop(self):
        for process in self.nodes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def wait_for_port(port):
    deadline = time.monotonic() + START_LIMIT_S
    pause = threading.Event()
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert time.monotonic() < deadline, f"nothing listens on port {port}"
        pause.wait(0.02)


class BridgedMosquittos(Cluster):
    """Two Mosquittos, of which the second hands all messages on to the first, and back."""

    def start(self):
        first, second = free_ports(2)
        self._run(first)
        self._run(
            second,
            "connection bridge",
            f"address 127.0.0.1:{first}",
            "topic # both 1",
            "cleansession true",
            "try_private true",
            "restart_timeout 1",
            "bridge_max_packet_size 0",
        )

    def _run(self, port, *lines):
        settings = self.folder / f"mosquitto-{port}.conf"
        settings.write_text("\n".join([settings_text("127.0.0.1", port), *lines, ""]))
        self.add(port, find_mosquitto(), "-c", settings)
        wait_for_port(port)


class NatsCluster(Cluster):
    """Three nodes of NATS with JetStream, which MQTT in NATS builds on."""

    def start(self):
        mqtt_ports = free_ports(9)
        clients = mqtt_ports[3:6]
        routes = mqtt_ports[6:]
        addresses = ", ".join(f'"nats://127.0.0.1:{route}"' for route in routes)
        for number in range(3):
            settings = self.folder / f"nats-{number}.conf"
            settings.write_text(
                f"server_name: n{number}\n"
                f"listen: 127.0.0.1:{clients[number]}\n"
                f'jetstream {{ store_dir: "{self.folder / f"nats-{number}"}" }}\n'
                f"mqtt {{ listen: 127.0.0.1:{mqtt_ports[number]} }}\n"
                f"cluster {{ name: c, listen: 127.0.0.1:{routes[number]}, routes: [{addresses}] }}\n"
            )
            self.add(mqtt_ports[number], NATS, "-c", settings)
        for port in mqtt_ports[:3]:
            wait_for_port(port)
