"""The tcp backend against clients and servers that are not ours."""

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from protocol.errors import PeerGone, TransferFailed, TransferTimeout
from transport import wire
from transport.config import TransportConfig
from transport.endpoint import Endpoint, Span, open_endpoint
from transport.metadata import decode_metadata, encode_metadata
from transport.tcp import TcpAddress


def open_tcp(name: str, secret: str = "right") -> Endpoint:
    return open_endpoint(TransportConfig(backend="tcp", secret=secret), name, 8192)


def soon() -> float:
    return time.monotonic() + 10


@pytest.fixture
def server() -> Iterator[Endpoint]:
    endpoint = open_tcp("server")
    yield endpoint
    endpoint.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("server")] == []


def dial(endpoint: Endpoint, secret: bytes = b"right", name: str = "server") -> socket.socket:
    address = decode_metadata(endpoint.metadata, TcpAddress)
    connection = socket.create_connection((address.host, address.port))
    wire.prove_as_client(connection, secret, name, soon())
    return connection


def test_a_wrong_secret_or_the_name_of_another_endpoint_is_refused(server: Endpoint) -> None:
    for secret, name in ((b"wrong", "server"), (b"right", "server#2")):
        with pytest.raises(PeerGone):
            dial(server, secret, name)
    stranger = open_tcp("stranger", secret="wrong")
    with pytest.raises(PeerGone):
        stranger.connect(server.metadata)
    with pytest.raises(PeerGone):
        stranger.write("server", [Span(0, 0, 8)], soon())
    stranger.close()


@pytest.mark.parametrize("operation", [wire.WRITE, wire.READ])
@pytest.mark.parametrize("bad", [(8185, 8), (-1, 8), (0, -1), (0, 8193), (2**62, 2**62)])
def test_a_client_that_skips_its_check_moves_nothing(server: Endpoint, operation: int, bad: tuple[int, int]) -> None:
    connection = dial(server)
    offsets, lengths = np.array([0, bad[0]]), np.array([8, bad[1]])
    wire.send_request(connection, operation, offsets, lengths, soon())
    assert connection.recv(1) == b""
    assert not server.arena.any()
    connection.close()


def test_a_malformed_request_ends_the_connection(server: Endpoint) -> None:
    for header in (b"\x09" + bytes(8), b"\x01\xff\xff\xff\xff" + bytes(4)):
        connection = dial(server)
        connection.sendall(header)
        assert connection.recv(1) == b""
        connection.close()


def test_a_server_that_does_not_know_the_secret_is_not_trusted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = TcpAddress(name="liar", host="127.0.0.1", port=listener.getsockname()[1], arena_bytes=8192)

        def lie() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(wire.MAGIC + bytes(32))
                wire.receive(connection, 64, soon())
                connection.sendall(wire.OK + bytes(32))
                connection.recv(1)

        liar = threading.Thread(target=lie)
        liar.start()
        client = open_tcp("client")
        with pytest.raises(TransferFailed, match="does not know the secret"):
            client.connect(encode_metadata(address))
        client.close()
        liar.join()


def test_a_transfer_that_timed_out_is_followed_by_a_new_connection(server: Endpoint) -> None:
    client = open_tcp("client")
    client.connect(server.metadata)
    client.arena[:] = 7
    with pytest.raises(TransferTimeout):
        client.write("server", [Span(0, 0, 8192)], time.monotonic())
    client.write("server", [Span(0, 0, 8192)], soon())
    assert (server.arena == 7).all()
    client.close()


def test_a_disconnected_or_closed_peer_is_gone(server: Endpoint) -> None:
    client, other = open_tcp("client"), open_tcp("other")
    client.connect(server.metadata)
    assert client.connect(other.metadata) == "other"
    other.close()
    with pytest.raises(PeerGone):
        client.write("other", [Span(0, 0, 8)], soon())
    client.disconnect("server")
    with pytest.raises(PeerGone):
        client.read("server", [Span(0, 0, 8)], soon())
    unreachable = msgspec.structs.replace(decode_metadata(other.metadata, TcpAddress), name="nobody")
    with pytest.raises(PeerGone):
        client.connect(encode_metadata(unreachable))
    client.close()
