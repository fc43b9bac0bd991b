"""A line of TCP to a server on this machine, which a test cuts: packets are held back, or connections end."""

from __future__ import annotations

import contextlib
import socket
import threading


class CutLine:
    """Forwards connections to ``port``, as a firewall or a network between two machines would."""

    def __init__(self, port):
        self.target = port
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.pairs = []
        self.passes = threading.Event()
        """While it is not set, bytes are taken and held back, in both directions: a network that drops packets."""

        self.passes.set()
        self.is_refused = False
        self.last_words = b""
        """With it, the answer to the first request that has these bytes is lost with its connection."""

        self.is_closed = False

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.is_closed = True
        self.passes.set()
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self.end_connections()

    def hold(self):
        """From now on no byte passes, and no connection ends."""
        self.passes.clear()

    def cut(self):
        """End all connections, and refuse new ones."""
        self.is_refused = True
        self.end_connections()

    def heal(self):
        """Let everything pass again."""
        self.is_refused = False
        self.passes.set()

    def end_connections(self):
        for pair in self.pairs[:]:
            self._end(pair)

    def _end(self, pair):
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        if pair in self.pairs:
            self.pairs.remove(pair)

    def _accept(self):
        while not self.is_closed:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            if self.is_refused:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            pair = (client, server)
            self.pairs.append(pair)
            for source, target in (pair, pair[::-1]):
                threading.Thread(target=self._pump, args=(pair, source, target), daemon=True).start()

    def _pump(self, pair, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.passes.wait()
                if self.last_words and self.last_words in data and source is pair[0]:
                    self.last_words = b""
                    with contextlib.suppress(OSError):
                        pair[0].shutdown(socket.SHUT_RDWR)
                target.sendall(data)
        self._end(pair)
