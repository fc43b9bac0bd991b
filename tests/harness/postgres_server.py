"""A server of PostgreSQL from its Debian package, in a folder of its own on a free port; gone at the end."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote

import pytest

VERSIONS = Path("/usr/lib/postgresql")
PASSWORD = "a word: with 'quotes'"
SERVER_USER = "postgres"
"""The user of the Debian package: the server refuses to run as root."""


def find_binaries():
    """Return the folder of the newest server that is installed; None where there is none."""
    found = sorted(VERSIONS.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


class PostgresServer:
    """A server with one role, `headwater`, whose password is in `passfile`; each `database` is new."""

    def __init__(self):
        self.binaries = find_binaries()
        if self.binaries is None:
            pytest.skip("PostgreSQL is not installed (Debian package 'postgresql')")
        pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
        # Not below the folder of a test, which only its own user may enter.
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-postgres-", dir="/tmp"))
        self.data = self.folder / "data"
        self.passfile = self.folder / "passfile"
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.port = listening.getsockname()[1]
        self.process = None

    def __enter__(self):
        self.passfile.write_text(f"*:*:*:*:{PASSWORD.replace(':', chr(92) + ':')}\n")
        self.passfile.chmod(0o600)
        words = self.folder / "words"
        words.write_text(PASSWORD)
        self.data.mkdir()
        if os.geteuid() == 0:
            self.folder.chmod(0o711)
            for path in (words, self.data):
                shutil.chown(path, SERVER_USER)
        self.run(
            "initdb", "-D", str(self.data), "-U", "headwater", "--auth=scram-sha-256", f"--pwfile={words}",
            "--encoding=UTF8", "--locale=C", "--no-sync",
        )  # fmt: skip
        self.start()
        return self

    def __exit__(self, *_):
        self.stop("SIGQUIT")
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, name, *arguments):
        command = [str(self.binaries / name), *arguments]
        if os.geteuid() == 0:
            command = ["setpriv", f"--reuid={SERVER_USER}", f"--regid={SERVER_USER}", "--clear-groups", *command]
        return command

    def run(self, name, *arguments):
        done = subprocess.run(
            self.command(name, *arguments), cwd=self.folder, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr

    def start(self):
        """Start the server, and return when it answers."""
        options = ("port", self.port), ("listen_addresses", "127.0.0.1"), ("unix_socket_directories", "")
        speed = ("fsync", "off"), ("shared_buffers", "16MB"), ("max_connections", "60")
        arguments = [f"--{name}={value}" for name, value in (*options, *speed)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command("postgres", "-D", str(self.data), *arguments), cwd=self.folder, stdout=log, stderr=log
            )
        pause = threading.Event()
        for _ in range(600):
            if self.is_ready():
                return
            if self.process.poll() is not None:
                break
            pause.wait(0.05)
        raise AssertionError((self.folder / "log").read_text()[-2000:])

    def is_ready(self):
        with contextlib.suppress(Exception):
            self.query("SELECT 1", database="postgres")
            return True
        return False

    def stop(self, name="SIGINT"):
        """End the server: SIGINT ends the sessions, SIGQUIT is a crash that the next start recovers from."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(getattr(signal, name))
            self.process.wait(timeout=60)
        self.process = None

    def restart(self, name="SIGINT"):
        self.stop(name)
        self.start()

    def url(self, database, port=None):
        passfile = quote(str(self.passfile), safe="")
        return f"postgresql://headwater@127.0.0.1:{port or self.port}/{database}?passfile={passfile}"

    def database(self, encoding="UTF8"):
        """Make an empty database, and return its URL."""
        name = f"d{secrets.token_hex(6)}"
        self.query(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0", database="postgres")
        return self.url(name)

    def query(self, text, values=(), *, database=None, url=None):
        """Return the rows that a statement of a session of its own gives."""
        import psycopg

        with psycopg.connect(url or self.url(database), autocommit=True) as connection:
            cursor = connection.execute(text, values)
            return cursor.fetchall() if cursor.description else []
