"""The port of a broker that is being started belongs to nobody else."""

from __future__ import annotations

import socket
import struct
import sys

import pytest

from coordinator.broker import held_port

IP_LOCAL_PORT_RANGE = 51
"""Linux: ports that the system may give to a socket that asks for any, as highest << 16 | lowest."""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port cannot be held for a child")
def test_a_port_that_is_held_for_a_broker_is_given_to_nobody_else_and_the_broker_may_listen():
    """It is a second until the broker listens; with several brokers starting on one machine, others would take it."""
    with held_port("127.0.0.1", 0) as port, socket.socket() as other, socket.socket() as caller:
        only = struct.pack("=I", (port << 16) | port)
        for one in (other, caller):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
            except OSError:
                pytest.skip("this kernel gives ports as it likes")
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", 0))
        with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="assign"):
            caller.connect(server.getsockname())
        with socket.create_server(("127.0.0.1", port)) as listening:
            assert listening.getsockname()[1] == port
