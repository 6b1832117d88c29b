"""Bytes by plain sockets: works everywhere, authenticated but not encrypted, with two copies by the kernel and one thread per peer on the passive side.

Invariant: a connection that ended in the middle of a frame is never used again.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from protocol.errors import ConfigError, PeerGone, TransferFailed, TransferTimeout
from transport import wire
from transport.arena import no_arena, private_arena
from transport.config import TransportConfig
from transport.counters import Direction, TransferCounters
from transport.deadline import held, remaining
from transport.endpoint import Span
from transport.metadata import decode_metadata, encode_metadata
from transport.spans import SpanTable, check_spans
from transport.tcp_server import ArenaServer, prepare

_CONNECT_TIMEOUT_S = 5.0
_WILDCARDS = ("", "0.0.0.0", "::")


class TcpAddress(msgspec.Struct, frozen=True, tag="tcp/1"):
    name: str
    host: str
    port: int
    arena_bytes: int


@dataclass(slots=True)
class _Peer:
    """`lock` guards the one connection: transfers to one peer run one after another."""

    address: TcpAddress
    connection: socket.socket | None = None
    is_dropped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class TcpEndpoint:
    needs_progress = False
    writes_may_land_late = True  # what the peer's kernel has already received

    def __init__(self, config: TransportConfig, name: str, arena_bytes: int) -> None:
        if not config.secret:
            raise ConfigError("transport.backend=tcp needs transport.secret: whoever reaches the port could write into the cache", field="transport.secret")
        if config.host in _WILDCARDS:
            raise ConfigError(f"transport.host={config.host!r} is not an address that peers can connect to", field="transport.host")
        self.name = name
        self.counters = TransferCounters()
        self.arena = private_arena(arena_bytes)
        self._secret = config.secret.encode()
        self._peers: dict[str, _Peer] = {}
        self._peers_lock = threading.Lock()  # never held while a socket blocks
        try:
            self._server = ArenaServer(config.host, self._secret, name, self.arena)
        except OSError as error:
            raise ConfigError(f"transport.host={config.host!r}: {error}", field="transport.host") from None
        self._metadata = encode_metadata(TcpAddress(name=name, host=config.host, port=self._server.port, arena_bytes=arena_bytes))

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes) -> str:
        """Besides the seam's errors TransferTimeout, when the peer does not answer within five seconds."""
        address = decode_metadata(metadata, TcpAddress)
        with self._peers_lock:
            target = self._peers.get(address.name)
            is_known = target is not None and target.address == address
        if target is None or not is_known:
            self.disconnect(address.name)
            with self._peers_lock:
                target = self._peers.setdefault(address.name, _Peer(address))
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        try:
            with self._connection(target, deadline):
                pass
        except TransferFailed:
            self._drop(target)
            raise
        return address.name

    def disconnect(self, peer: str) -> None:
        target = self._peers.get(peer)
        if target is not None:
            self._drop(target)

    def write(self, peer: str, spans: Sequence[Span], deadline: float) -> None:
        self._move("write", peer, spans, deadline)

    def read(self, peer: str, spans: Sequence[Span], deadline: float) -> None:
        self._move("read", peer, spans, deadline)

    def progress(self) -> None:
        """Nothing to do: the server's threads block in the kernel."""

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._server.close()
        self.arena = no_arena()

    def _move(self, direction: Direction, peer: str, spans: Sequence[Span], deadline: float) -> None:
        target = self._peers.get(peer)
        if target is None:
            raise PeerGone(f"{peer} is not connected")
        table = check_spans(spans, self.arena.nbytes, target.address.arena_bytes)
        try:
            with self.counters.measure(direction, int(table[:, 2].sum())), self._connection(target, deadline) as connection:
                for start in range(0, len(table), wire.MAX_SPANS):
                    self._exchange(direction, connection, table[start : start + wire.MAX_SPANS], deadline)
        except PeerGone:
            self._drop(target)
            raise

    def _exchange(self, direction: Direction, connection: socket.socket, table: SpanTable, deadline: float) -> None:
        """One frame and its answer."""
        arena = self.arena.data
        spans = [arena[local : local + length] for local, _, length in table.tolist()]
        wire.send_request(connection, wire.WRITE if direction == "write" else wire.READ, table[:, 1], table[:, 2], deadline)
        if direction == "write":
            for span in spans:
                wire.send_all(connection, span, deadline)
        if wire.receive(connection, 1, deadline) != wire.OK:
            raise TransferFailed("the peer refused the transfer")
        if direction == "read":
            for span in spans:
                wire.receive_into(connection, span, deadline)

    @contextmanager
    def _connection(self, target: _Peer, deadline: float) -> Iterator[socket.socket]:
        """The open, authenticated connection to `target`; opened anew after a transfer that failed half-way. Turns socket errors into ours."""
        with held(target.lock, deadline):
            try:
                if target.is_dropped:
                    raise PeerGone(f"{target.address.name} is not connected")
                if target.connection is None:
                    self._open(target, deadline)
                assert target.connection is not None
                yield target.connection
            except BaseException as error:
                _close(target)
                if isinstance(error, TimeoutError):
                    raise TransferTimeout(f"{target.address.name} did not answer before the deadline") from None
                if isinstance(error, OSError):
                    raise PeerGone(f"{target.address.name}: {error}") from None
                raise

    def _open(self, target: _Peer, deadline: float) -> None:
        target.connection = socket.create_connection((target.address.host, target.address.port), timeout=remaining(deadline))
        prepare(target.connection)
        wire.prove_as_client(target.connection, self._secret, target.address.name, deadline)

    def _drop(self, target: _Peer) -> None:
        """Disconnect this peer, not a successor that has taken its name; a transfer that runs ends with PeerGone."""
        with self._peers_lock:
            if self._peers.get(target.address.name) is target:
                del self._peers[target.address.name]
        target.is_dropped = True
        connection = target.connection
        if connection is not None:
            with suppress(OSError):  # it may be closed already
                connection.shutdown(socket.SHUT_RDWR)
        with target.lock:
            _close(target)


def _close(target: _Peer) -> None:
    if target.connection is not None:
        target.connection.close()
        target.connection = None
