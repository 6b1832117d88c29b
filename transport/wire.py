"""The frames of the tcp backend and the handshake that both of its sides run. Knows no arena.

Connection: server -> MAGIC, nonce; client -> nonce, proof; server -> OK, proof. A proof is an HMAC of both nonces and of the server's name, so that a client
never talks to another endpoint that got the same port. Then frames: client -> Header, table of (offset, length); a write is followed by its bytes and answered
by OK; a read is answered by OK and its bytes. Nothing is encrypted.
"""

import hmac
import secrets
import socket
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.errors import PeerGone, TransferFailed
from transport.deadline import remaining

MAGIC = b"HRT1"
OK, REFUSED = b"\x01", b"\x00"
WRITE, READ = 1, 2
MAX_SPANS = 65536  # of one frame
_NONCE_BYTES, _PROOF_BYTES = 32, 32
_HEADER = struct.Struct("!BII")
_TABLE_DTYPE = np.dtype("<i8")


class Header(NamedTuple):
    """`timeout_ms`: what was left of the client's deadline; the server gives up with it."""

    operation: int
    num_spans: int
    timeout_ms: int


class Disconnected(ConnectionError):
    """The other side closed the connection."""


def send_all(connection: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    connection.settimeout(remaining(deadline))
    connection.sendall(data)


def receive_into(connection: socket.socket, target: memoryview, deadline: float) -> None:
    """Fill `target`. Raises Disconnected, TimeoutError or TransferTimeout."""
    received = 0
    while received < len(target):
        connection.settimeout(remaining(deadline))
        count = connection.recv_into(target[received:])
        if count == 0:
            raise Disconnected("closed by the other side")
        received += count


def receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data), deadline)
    return bytes(data)


def send_request(connection: socket.socket, operation: int, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], deadline: float) -> None:
    table = np.stack([offsets, lengths], axis=1).astype(_TABLE_DTYPE)
    timeout_ms = min(int(remaining(deadline) * 1000) + 1, 0xFFFFFFFF)
    send_all(connection, _HEADER.pack(*Header(operation, len(table), timeout_ms)) + table.tobytes(), deadline)


def receive_header(connection: socket.socket) -> Header:
    """Wait for the next request, as long as it takes. Raises Disconnected."""
    connection.settimeout(None)
    data = connection.recv(_HEADER.size, socket.MSG_WAITALL)
    if len(data) < _HEADER.size:
        raise Disconnected("closed between two requests")
    return Header(*_HEADER.unpack(data))


def receive_table(connection: socket.socket, count: int, deadline: float) -> npt.NDArray[np.int64]:
    """int64 (count, 2): offset, length."""
    data = receive(connection, count * 2 * _TABLE_DTYPE.itemsize, deadline)
    return np.frombuffer(data, dtype=_TABLE_DTYPE).reshape(-1, 2).astype(np.int64)


def prove_as_client(connection: socket.socket, secret: bytes, server_name: str, deadline: float) -> None:
    """Raises TransferFailed for a server that does not know the secret, PeerGone for one that does not take ours or is another one."""
    hello = receive(connection, len(MAGIC) + _NONCE_BYTES, deadline)
    if not hello.startswith(MAGIC):
        raise TransferFailed(f"{server_name}: not a transfer endpoint of this version")
    server_nonce, client_nonce = hello[len(MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    send_all(connection, client_nonce + _proof(secret, b"client", server_nonce, client_nonce, server_name), deadline)
    if receive(connection, 1, deadline) != OK:
        raise PeerGone(f"{server_name}: the endpoint at its address is another one or has another secret")
    proof = receive(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"server", server_nonce, client_nonce, server_name)):
        raise TransferFailed(f"{server_name}: the endpoint at its address does not know the secret")


def prove_as_server(connection: socket.socket, secret: bytes, name: str, deadline: float) -> bool:
    """False for a client that does not know the secret or wants another endpoint; it has been told."""
    server_nonce = secrets.token_bytes(_NONCE_BYTES)
    send_all(connection, MAGIC + server_nonce, deadline)
    answer = receive(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    client_nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", server_nonce, client_nonce, name)):
        send_all(connection, REFUSED, deadline)
        return False
    send_all(connection, OK + _proof(secret, b"server", server_nonce, client_nonce, name), deadline)
    return True


def _proof(secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes, server_name: str) -> bytes:
    return hmac.digest(secret, side + server_nonce + client_nonce + server_name.encode(), "sha256")
