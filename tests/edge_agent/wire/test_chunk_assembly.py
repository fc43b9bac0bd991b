"""Chunk assembly against a model of it: crashes, restarts, duplicates, reordering and flipped bits in any sequence."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_agent.core.errors import ChunkError
from edge_agent.wire.blobs import chunks as chunks_module
from edge_agent.wire.blobs.chunks import Incoming, Outgoing, decode_frame

CHUNK = 64


class Assembly(RuleBasedStateMachine):
    """The model: which chunks the receiver may count on, and which it has noted on disk."""

    @initialize(count=st.integers(1, 7), rest=st.integers(1, CHUNK), noted_every=st.integers(1, 4))
    def begin(self, count, rest, noted_every):
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-assembly-"))
        self.noted_every = noted_every
        self.usual = chunks_module._SAVE_BYTES
        chunks_module._SAVE_BYTES = noted_every * CHUNK
        self.data = np.random.default_rng(count * 100 + rest).bytes((count - 1) * CHUNK + rest)
        self.blob = Outgoing.of(self.data, CHUNK)
        self.incoming = Incoming(self.blob.ref, self.folder)
        self.present = set[int]()
        self.noted = set[int]()
        self.damaged = False
        self.waiting: list[bytes] = []

    @rule(data=st.data())
    def send(self, data):
        """The sender puts chunks on the way; they may arrive at any time, or never."""
        start = data.draw(st.integers(0, self.blob.count - 1))
        self.waiting.append(self.blob.frame(start, data.draw(st.integers(start + 1, self.blob.count))))

    @staticmethod
    def held(frame):
        return set(range(frame.index, frame.index - (-len(frame.data) // CHUNK)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), copies=st.integers(1, 2))
    def deliver(self, data, copies):
        payload = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        for _ in range(copies):
            frame = decode_frame(payload)
            self.incoming.add(frame)
            if not self.held(frame) <= self.present:
                self.present |= self.held(frame)
                if len(self.present) - len(self.noted) >= self.noted_every:
                    self.noted = set(self.present)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def deliver_damaged(self, data):
        payload = bytearray(self.waiting.pop())
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        try:
            self.incoming.add(decode_frame(bytes(payload)))
        except ChunkError:
            return
        raise AssertionError("a damaged chunk was taken for good")

    @precondition(lambda self: self.waiting)
    @rule()
    def lose(self):
        self.waiting.pop()

    @rule()
    def stop_politely_and_start(self):
        self.incoming.close()
        self.noted = set(self.present)
        self.incoming = Incoming(self.blob.ref, self.folder)

    @rule()
    def crash_and_start(self):
        os.close(self.incoming._file)
        self.present = set(self.noted)
        self.incoming = Incoming(self.blob.ref, self.folder)

    @precondition(lambda self: self.noted)
    @rule(data=st.data())
    def damage_the_disk(self, data):
        index = data.draw(st.sampled_from(sorted(self.noted)))
        with self.incoming.path.open("r+b") as file:
            file.seek(index * CHUNK)
            byte = file.read(1)
            file.seek(index * CHUNK)
            file.write(bytes([byte[0] ^ 255]))
        self.damaged = True

    @precondition(lambda self: len(self.present) == self.blob.count)
    @rule()
    def finish(self):
        place = self.folder / "whole"
        try:
            self.incoming.finish(place, durable=False)
        except ChunkError:
            assert self.damaged
            assert not place.exists()
        else:
            assert place.read_bytes() == self.data or self.damaged
            place.unlink()
        assert not self.incoming.is_open
        assert list(self.folder.iterdir()) == []
        self.present = set()
        self.noted = set()
        self.damaged = False
        self.incoming = Incoming(self.blob.ref, self.folder)

    @invariant()
    def the_receiver_counts_on_exactly_what_has_arrived(self):
        if hasattr(self, "incoming"):
            there = {index for index in range(self.blob.count) if index in self.incoming.chunks}
            assert there == self.present
            assert self.incoming.chunks.complete is (len(there) == self.blob.count)

    def teardown(self):
        if hasattr(self, "incoming"):
            chunks_module._SAVE_BYTES = self.usual
            self.incoming.discard()
            shutil.rmtree(self.folder)


Assembly.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestAssembly = Assembly.TestCase
