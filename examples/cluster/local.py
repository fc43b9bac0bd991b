"""A whole cluster on one machine, each part a process of its own: to look at, and to kill parts of.

Three nodes of NATS, PostgreSQL, two coordinators of which one serves, four aggregators, and some agents with digits:

    python examples/cluster/local.py --folder cluster
    headwater run --config cluster/coordinator.toml --rounds 5        (in another terminal)

Ctrl-C or SIGTERM ends all of it; the folder stays, and the next start continues where this one ended. It needs the
programs ``nats-server`` and ``postgres`` (Debian packages nats-server and postgresql) and the extras ``all`` and
``postgres``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

NODES = 3
COORDINATORS = 2
AGGREGATORS = 4
START_LIMIT_S = 120.0

FIRST_PORT = 18830
"""The first of ten ports of 127.0.0.1 that the cluster takes, one after another."""

DATABASE_USER = "postgres"
"""The account of the Debian package: PostgreSQL refuses to run as root."""


@dataclass
class Ports:
    """The ports of the cluster, counted from the first one."""

    first: int

    @property
    def database(self) -> int:
        """The port of PostgreSQL."""
        return self.first

    def mqtt(self, node: int) -> int:
        """Return the port of MQTT at a node of NATS."""
        return self.first + 1 + node

    def client(self, node: int) -> int:
        """Return the port of NATS' own protocol at a node, which nobody here speaks."""
        return self.first + 1 + NODES + node

    def route(self, node: int) -> int:
        """Return the port at which other nodes reach a node."""
        return self.first + 1 + 2 * NODES + node

    @property
    def urls(self) -> list[str]:
        """The addresses of the brokers, for coordinators and agents."""
        return [f"mqtt://127.0.0.1:{self.mqtt(node)}" for node in range(NODES)]


@dataclass
class Cluster:
    """All processes of the cluster, in one folder."""

    folder: Path
    ports: Ports
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, name: str, *command: object) -> None:
        """Start a process, whose output goes to a file of its name in ``logs``."""
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in command], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait_for_port(self, name: str, port: int) -> None:
        """Wait until a process listens on a port.

        Raises:
            SystemExit: The process has ended, or does not listen in time.
        """
        until = time.monotonic() + START_LIMIT_S
        pause = threading.Event()
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if self.processes[name].poll() is not None or time.monotonic() > until:
                sys.exit(f"{name} does not listen on port {port}; see {self.folder / 'logs' / f'{name}.log'}")
            pause.wait(0.1)

    def stop(self) -> None:
        """End all processes, agents first, and wait for them; another signal would leave some behind."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


# --- brokers ---------------------------------------------------------------------------------------------------------


def start_brokers(cluster: Cluster) -> None:
    """Start the nodes of NATS, as in configs/brokers/nats-cluster.conf, on this machine alone and without TLS."""
    program = shutil.which("nats-server")
    if program is None:
        sys.exit("nats-server is not installed; apt install nats-server")
    ports = cluster.ports
    routes = ", ".join(f'"nats://127.0.0.1:{ports.route(node)}"' for node in range(NODES))
    for node in range(NODES):
        name = f"broker-{node + 1}"
        settings = cluster.folder / f"{name}.conf"
        settings.write_text(
            f"""server_name: {name}
listen: 127.0.0.1:{ports.client(node)}
max_pending: 64MB
jetstream {{ store_dir: {json.dumps(str(cluster.folder / name))} }}
cluster {{ name: headwater, listen: 127.0.0.1:{ports.route(node)}, routes: [{routes}] }}
mqtt {{ listen: 127.0.0.1:{ports.mqtt(node)}, max_ack_pending: 256 }}
""",
            encoding="utf-8",
        )
        cluster.run(name, program, "-c", settings)
    for node in range(NODES):
        cluster.wait_for_port(f"broker-{node + 1}", ports.mqtt(node))


# --- database --------------------------------------------------------------------------------------------------------


def start_database(cluster: Cluster) -> str:
    """Start PostgreSQL, after making its data folder at the first start, and return the URL of the journal."""
    # 1. The programs of the newest version, and the account that runs them.
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if not versions:
        sys.exit("PostgreSQL is not installed; apt install postgresql")
    programs = versions[-1]
    folder = cluster.folder / "database"
    folder.mkdir(exist_ok=True)
    as_user: list[str] = []
    if os.geteuid() == 0:
        as_user = ["setpriv", f"--reuid={DATABASE_USER}", f"--regid={DATABASE_USER}", "--clear-groups"]
        shutil.chown(folder, DATABASE_USER)
    # 2. The data folder.
    data = folder / "data"
    passfile = cluster.folder / "passfile"
    if not (data / "PG_VERSION").exists():
        make_data_folder(data, passfile, [*as_user, str(programs / "initdb")])
    # 3. The server.
    port = cluster.ports.database
    settings = [f"--port={port}", "--listen_addresses=127.0.0.1", "--unix_socket_directories="]
    cluster.run("database", *as_user, programs / "postgres", "-D", data, *settings)
    cluster.wait_for_port("database", port)
    return f"postgresql://headwater@127.0.0.1:{port}/postgres?passfile={passfile}"


def make_data_folder(data: Path, passfile: Path, initdb: list[str]) -> None:
    """Make the data folder of PostgreSQL, with a password in files that no other user can read.

    Args:
        data: The data folder, which is not there.
        passfile: The file from which coordinators and commands read the password.
        initdb: The command that makes the folder, without its options.

    Raises:
        SystemExit: PostgreSQL could not make it.
    """
    password = secrets.token_hex(16)
    write_private(passfile, f"*:*:*:*:{password}\n")
    password_file = data.parent / "password"
    write_private(password_file, password)
    if os.geteuid() == 0:
        shutil.chown(password_file, DATABASE_USER)
    options = ["-U", "headwater", "--auth=scram-sha-256", f"--pwfile={password_file}", "--encoding=UTF8", "--locale=C"]
    command = [*initdb, "-D", str(data), *options]
    done = subprocess.run(command, cwd=data.parent, capture_output=True, text=True, check=False)
    password_file.unlink()
    if done.returncode != 0:
        sys.exit(f"the data folder of PostgreSQL could not be made: {done.stderr.strip()}")


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


# --- Headwater -------------------------------------------------------------------------------------------------------


def write_coordinator(cluster: Cluster, journal: str, agents: int) -> Path:
    """Write the configuration that coordinators, aggregators and commands share, and return its file."""
    path = cluster.folder / "coordinator.toml"
    path.write_text(
        f"""federation = "cluster"
state = "state"
journal = {json.dumps(journal)}

[broker]
url = {json.dumps(cluster.ports.urls)}
qos = 0

[aggregators]
partitions = {AGGREGATORS}

[cohort]
min_agents = {agents}

[round]
quorum = 1.0

[task]
input = {{ kind = "image", channels = 1, height = 16, width = 16 }}
class_names = {json.dumps(list("0123456789"))}
encoder = "small_cnn"
""",
        encoding="utf-8",
    )
    return path


def start_coordinators(cluster: Cluster, config: Path) -> None:
    """Start the coordinators, and wait until one of them serves: it makes the secret that aggregators need.

    Raises:
        SystemExit: None serves in time.
    """
    for number in range(1, COORDINATORS + 1):
        command = ("serve", "--standby", "--insecure", "--config", config)
        cluster.run(f"coordinator-{number}", sys.executable, "-m", "coordinator", *command)
    until = time.monotonic() + START_LIMIT_S
    pause = threading.Event()
    while not (cluster.folder / "state" / "status.json").exists():
        if time.monotonic() > until:
            sys.exit(f"no coordinator serves; see {cluster.folder / 'logs'}")
        pause.wait(0.2)


def start_aggregators(cluster: Cluster, config: Path) -> None:
    """Start one aggregator for each partition."""
    for number in range(1, AGGREGATORS + 1):
        command = ("aggregate", "--partition", f"{number}/{AGGREGATORS}", "--config", config)
        cluster.run(f"aggregator-{number}", sys.executable, "-m", "coordinator", *command)


def start_agents(cluster: Cluster, agents: int) -> None:
    """Start so many agents, each with a part of the digits of its own."""
    for number in range(agents):
        name = f"agent-{number}"
        settings = cluster.folder / f"{name}.toml"
        settings.write_text(
            f"""federation = "cluster"
id = "{name}"
tier = "train"
state = "{name}"

[broker]
url = {json.dumps(cluster.ports.urls)}
qos = 0

[data]
source = "digits:optdigits?client={number}&clients={agents}"
""",
            encoding="utf-8",
        )
        cluster.run(name, sys.executable, "-m", "edge_agent", "run", "--insecure", "--config", settings)


def interrupt(_number: int, _frame: object) -> None:
    """End the cluster on SIGTERM as on Ctrl-C: its processes would outlive this one."""
    raise KeyboardInterrupt


def main() -> None:
    """Start everything, and end it on Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("cluster"), help="where everything is kept")
    parser.add_argument("--agents", type=int, default=4, help="agents with a part of the digits each")
    parser.add_argument("--first-port", type=int, default=FIRST_PORT, help="the first of ten ports of 127.0.0.1")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # PostgreSQL runs as another user, who needs the way to its own folder, and to no other.
    folder.chmod(0o711)
    signal.signal(signal.SIGTERM, interrupt)
    cluster = Cluster(folder, Ports(options.first_port))
    try:
        print("brokers: three nodes of NATS", flush=True)
        start_brokers(cluster)
        print("database: PostgreSQL", flush=True)
        journal = start_database(cluster)
        print("coordinators, aggregators, agents", flush=True)
        config = write_coordinator(cluster, journal, options.agents)
        start_coordinators(cluster, config)
        start_aggregators(cluster, config)
        start_agents(cluster, options.agents)
        width = max(map(len, cluster.processes))
        for name, process in cluster.processes.items():
            print(f"  {name:{width}}  process {process.pid}", flush=True)
        print(f"logs: {folder / 'logs'}")
        print(f"now:  headwater run --config {config} --rounds 5")
        print(f"      headwater status --config {config}; kill -9 any process, and look again")
        print("Ctrl-C ends all of it", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        print("ending", flush=True)
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
