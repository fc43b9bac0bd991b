"""Real brokers started from the files in configs/brokers, with paths, ports, names and users of a test put in.

Each replacement has to occur in the file: a test whose broker runs with other settings than the reader's says nothing.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from coordinator.broker import find_mosquitto
from edge_agent.core.config import BrokerConfig, TlsConfig

CONFIGS = Path(__file__).parents[2] / "configs"
START_LIMIT_S = 120.0
"""RabbitMQ takes some ten seconds on a calm machine, a cluster of three some thirty."""

NATS = shutil.which("nats-server", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
NEEDS_NATS = pytest.mark.skipif(NATS is None, reason="nats-server is not installed")
NEEDS_RABBITMQ = pytest.mark.skipif(not RABBITMQ.exists(), reason="rabbitmq-server is not installed")


def free_ports(count):
    """So many ports that are free now, below those that Linux gives to outgoing connections: nobody takes them soon."""
    free = []
    rng = random.SystemRandom()
    with contextlib.ExitStack() as stack:
        while len(free) < count:
            with contextlib.suppress(OSError):
                server = stack.enter_context(socket.create_server(("127.0.0.1", rng.randrange(12_000, 32_000))))
                free.append(server.getsockname()[1])
    return free


def replaced(text, replacements):
    """The text of a configuration with all replacements made, each of which has to be possible."""
    for pattern, new in replacements.items():
        text, count = re.subn(pattern, lambda _, new=new: new, text, flags=re.MULTILINE | re.DOTALL)
        assert count, f"nothing in the file looks like {pattern!r}"
    return text


class Process:
    """A broker process of a test: a group of its own, because RabbitMQ starts helpers."""

    def __init__(self, log, command, environment=None):
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def kill(self):
        """As a machine does that loses its power."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait_until_it_listens(self, port):
        deadline = time.monotonic() + START_LIMIT_S
        pause = threading.Event()
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            said = f"it said:\n{self.log.read_text(errors='replace')[-2000:]}"
            assert self.process.poll() is None, f"the broker has ended; {said}"
            assert time.monotonic() < deadline, f"nothing listens on port {port}; {said}"
            pause.wait(0.05)

    def memory_bytes(self):
        """Resident memory of all processes of the group."""
        total = 0
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError, ValueError):
                if os.getpgid(int(status.parent.name)) == self.process.pid:
                    pages = int((status.parent / "statm").read_text().split()[1])
                    total += pages * os.sysconf("SC_PAGE_SIZE")
        return total


class ConfiguredBroker:
    """A broker of one node or several, from the files that readers get; subclasses say how each node starts.

    Without ``authority`` clients need neither certificate nor user, and the users of the file are left out.
    """

    kind = ""
    qos = 1

    def __init__(self, folder, nodes=1, authority=None):
        self.folder = Path(folder)
        self.ports = free_ports(nodes)
        self.authority = authority
        self.processes = {}
        self.keys = ()
        if authority is not None:
            self.keys = authority.issue("localhost", "127.0.0.1")

    @property
    def scheme(self):
        return "mqtt" if self.authority is None else "mqtts"

    @property
    def urls(self):
        return [f"{self.scheme}://127.0.0.1:{port}" for port in self.ports]

    @property
    def url(self):
        """As `[broker] url` has it."""
        return self.urls if len(self.ports) > 1 else self.urls[0]

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for number, url in enumerate(self.urls):
                log = self.folder / f"broker-{number}.log"
                self.processes[url] = Process(log, *self.command(number))
            for port, process in zip(self.ports, self.processes.values(), strict=True):
                process.wait_until_it_listens(port)
        except BaseException:
            self.stop()
            raise

    def stop(self):
        for process in self.processes.values():
            process.kill()

    def kill(self, url):
        self.processes[url].kill()

    def pause(self, url):
        """Its connections stand, and it answers nothing."""
        self.processes[url].signal(signal.SIGSTOP)

    def resume_all(self):
        for process in self.processes.values():
            process.signal(signal.SIGCONT)

    def memory_bytes(self):
        """Of all nodes that live."""
        return sum(process.memory_bytes() for process in self.processes.values())

    def config(self, user=None, password=None, **settings):
        """How a client connects; with a user, as the file of users has it."""
        if user is None:
            return BrokerConfig(url=self.url, qos=self.qos, **settings)
        secret = self.folder / f"{user}.password"
        secret.write_text(f"{password}\n")
        tls = TlsConfig(ca=self.authority.ca)
        return BrokerConfig(url=self.url, qos=self.qos, user=user, password_file=secret, tls=tls, **settings)

    def written(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return path


class FromMosquitto(ConfiguredBroker):
    """Mosquitto from configs/mosquitto.conf, with the users of 'headwater password'."""

    kind = "mosquitto"

    def command(self, number):
        text = (CONFIGS / "mosquitto.conf").read_text(encoding="utf-8")
        replacements = {r"^listener 8883$": f"listener {self.ports[number]} 127.0.0.1"}
        if self.authority is None:
            replacements |= {
                r"^(cafile|certfile|keyfile|tls_version|password_file|acl_file) [^\n]*\n": "",
                "^allow_anonymous false$": "allow_anonymous true",
            }
        else:
            certificate, key = self.keys
            replacements |= {
                r"/etc/mosquitto/headwater/ca\.pem": str(self.authority.ca),
                r"/etc/mosquitto/headwater/broker\.pem": str(certificate),
                r"/etc/mosquitto/headwater/broker\.key": str(key),
                r"/etc/mosquitto/headwater/": f"{self.folder}/",
            }
        # Started by root it would go on as a user that cannot read the folder of a test.
        account = f"user {getpass.getuser()}\n"
        settings = self.written("mosquitto.conf", replaced(text, replacements) + account)
        return [find_mosquitto(), "-c", settings], None


class FromNats(ConfiguredBroker):
    """NATS from configs/brokers/nats.conf or nats-cluster.conf."""

    kind = "nats"

    def __init__(self, folder, nodes=1, authority=None, users=None):
        super().__init__(folder, nodes, authority)
        self.users = users or {}
        self.qos = 0 if nodes > 1 else 1
        others = free_ports(2 * nodes)
        self.own_ports = others[:nodes]
        self.routes = others[nodes:]

    def command(self, number):
        is_cluster = len(self.ports) > 1
        name = "nats-cluster.conf" if is_cluster else "nats.conf"
        text = (CONFIGS / "brokers" / name).read_text(encoding="utf-8")
        replacements = {
            "127.0.0.1:4222": f"127.0.0.1:{self.own_ports[number]}",
            r"0\.0\.0\.0:8883": f"127.0.0.1:{self.ports[number]}",
            "/var/lib/nats/headwater": str(self.folder / f"store-{number}"),
        }
        if is_cluster:
            replacements[r"0\.0\.0\.0:6222"] = f"127.0.0.1:{self.routes[number]}"
            for index, port in enumerate(self.routes):
                replacements[rf"mq{index + 1}\.example:6222"] = f"127.0.0.1:{port}"
        if self.authority is None:
            replacements[r"^  tls \{.*?^  \}\n"] = ""
            replacements[r"^include nats-users\.conf\n"] = ""
        else:
            certificate, key = self.keys
            replacements |= {
                r"/etc/nats/headwater/broker\.pem": str(certificate),
                r"/etc/nats/headwater/broker\.key": str(key),
            }
            if is_cluster:  # nodes look at the certificates of each other
                replacements[r"/etc/nats/headwater/ca\.pem"] = str(self.authority.ca)
            users = (CONFIGS / "brokers" / "nats-users.conf").read_text(encoding="utf-8")
            passwords = {
                f'(?<=user: {user}[,\n]) *password: "[^"]*"': f'password: "{self.users[user]}"' for user in self.users
            }
            self.written("nats-users.conf", replaced(users, passwords))
        settings = self.written(f"nats-{number}.conf", replaced(text, replacements))
        return [NATS, "-c", settings], {"NODE": f"mq{number + 1}"}


class FromRabbitMq(ConfiguredBroker):
    """RabbitMQ from configs/brokers/rabbitmq.conf or rabbitmq-cluster.conf; nodes on one machine differ in ports."""

    kind = "rabbitmq"

    def __init__(self, folder, nodes=1, authority=None, users=None):
        super().__init__(folder, nodes, authority)
        self.users = users or {}
        others = free_ports(2 * nodes + 1)
        self.amqp_ports = others[:nodes]
        self.cluster_ports = others[nodes : 2 * nodes]
        self.mapper_port = others[-1]
        self._cookie_folder = self.folder / "home"
        self._mapper = None

    def node(self, number):
        return f"mq{number + 1}@localhost"

    def start(self):
        """The nodes find each other by a service of Erlang's own, which is started once, for all of them."""
        self._cookie_folder.mkdir(parents=True, exist_ok=True)
        cookie = self._cookie_folder / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text("a-secret-of-this-test")
            cookie.chmod(0o400)
        mapper = shutil.which("epmd")
        command = [mapper, "-port", str(self.mapper_port), "-address", "127.0.0.1"]
        self._mapper = Process(self.folder / "mapper.log", command)
        super().start()

    def stop(self):
        super().stop()
        if self._mapper is not None:
            self._mapper.kill()

    def command(self, number):
        is_cluster = len(self.ports) > 1
        name = "rabbitmq-cluster.conf" if is_cluster else "rabbitmq.conf"
        text = (CONFIGS / "brokers" / name).read_text(encoding="utf-8")
        replacements = {
            r"127\.0\.0\.1:5672": f"127.0.0.1:{self.amqp_ports[number]}",
            r"0\.0\.0\.0:8883": f"127.0.0.1:{self.ports[number]}",
        }
        for index in range(len(self.ports) if is_cluster else 0):
            replacements[rf"rabbit@mq{index + 1}$"] = self.node(index)
        if self.authority is None:
            replacements |= {
                r"^mqtt\.listeners\.ssl\.default": "mqtt.listeners.tcp.default",
                r"^mqtt\.listeners\.tcp = none\n": "",
                r"^ssl_options\.[^\n]*\n": "",
                r"^load_definitions = [^\n]*\n": "",
                r"^mqtt\.allow_anonymous = false": "mqtt.allow_anonymous = true",
            }
        else:
            certificate, key = self.keys
            replacements |= {
                r"/etc/rabbitmq/headwater/ca\.pem": str(self.authority.ca),
                r"/etc/rabbitmq/headwater/broker\.pem": str(certificate),
                r"/etc/rabbitmq/headwater/broker\.key": str(key),
                r"/etc/rabbitmq/headwater/": f"{self.folder}/",
            }
            self.written("rabbitmq-users.json", self._users())
        settings = self.written(f"rabbitmq-{number}.conf", replaced(text, replacements))
        plugins = self.written("plugins", "[rabbitmq_mqtt].\n")
        environment = {
            "HOME": str(self._cookie_folder),
            "ERL_EPMD_PORT": str(self.mapper_port),
            "RABBITMQ_NODENAME": self.node(number),
            "RABBITMQ_DIST_PORT": str(self.cluster_ports[number]),
            "RABBITMQ_CONFIG_FILE": str(settings),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_PID_FILE": str(self.folder / f"rabbitmq-{number}.pid"),
        }
        return [RABBITMQ], environment

    def _users(self):
        """The file of users, with passwords hashed as 'rabbitmqctl hash_password' does."""
        definitions = json.loads((CONFIGS / "brokers" / "rabbitmq-users.json").read_text(encoding="utf-8"))
        for user in definitions["users"]:
            salt = hashlib.sha256(user["name"].encode()).digest()[:4]
            digest = hashlib.sha256(salt + self.users[user["name"]].encode()).digest()
            user["password_hash"] = base64.b64encode(salt + digest).decode()
        return json.dumps(definitions)
