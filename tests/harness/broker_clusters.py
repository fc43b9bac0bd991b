"""Two Mosquittos that share their messages, each a process that nobody restarts."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time

from configured_brokers import free_ports

from coordinator.broker import find_mosquitto, settings_text

START_LIMIT_S = 60.0


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
