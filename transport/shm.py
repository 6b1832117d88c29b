"""Bytes by mapped shared memory, for two processes of one user in one pid namespace where CMA is not permitted. Knows nothing of sockets.

Invariant: a peer's memory outlives the peer as long as it is mapped here, so only the process watch tells that the peer is gone: it is asked before and after.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from protocol.errors import PeerGone, TransferFailed
from transport.arena import Arena, SharedArena, map_peer_arena, no_arena
from transport.config import TransportConfig
from transport.counters import Direction, TransferCounters
from transport.deadline import held, remaining
from transport.endpoint import Span
from transport.metadata import decode_metadata, encode_metadata
from transport.process import ProcessIdentity, ProcessWatch, identify, watch
from transport.spans import SpanTable, check_spans

# The deadline is looked at between pieces: a millisecond of copying.
_PIECE_BYTES = 8 << 20


class ShmAddress(msgspec.Struct, frozen=True, tag="shm/1"):
    name: str
    process: ProcessIdentity
    fd: int
    token: str
    arena_bytes: int


@dataclass(slots=True)
class _Peer:
    address: ShmAddress
    process: ProcessWatch
    arena: Arena
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check_alive(self) -> None:
        if not self.process.is_alive():
            raise PeerGone(f"{self.address.name}: its process has ended")


class ShmEndpoint:
    needs_progress = False
    writes_may_land_late = False

    def __init__(self, config: TransportConfig, name: str, arena_bytes: int) -> None:
        self.name = name
        self.counters = TransferCounters()
        self._shared = SharedArena(arena_bytes)
        self.arena = self._shared.array
        self._peers: dict[str, _Peer] = {}
        self._peers_lock = threading.RLock()  # taken before a peer's lock, never inside it
        address = ShmAddress(name=name, process=identify(os.getpid()), fd=self._shared.fd, token=self._shared.token, arena_bytes=arena_bytes)
        self._metadata = encode_metadata(address)

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes) -> str:
        address = decode_metadata(metadata, ShmAddress)
        with self._peers_lock:
            known = self._peers.get(address.name)
            if known is None or known.address != address:
                self.disconnect(address.name)
                self._peers[address.name] = self._open_peer(address)
        return address.name

    def _open_peer(self, address: ShmAddress) -> _Peer:
        process = watch(address.process)
        if process is None:
            raise TransferFailed(f"{address.name}: shared memory does not reach another machine or pid namespace")
        try:
            arena = map_peer_arena(address.process.pid, address.fd, address.token, address.arena_bytes)
        except BaseException:
            process.close()
            raise
        return _Peer(address, process, arena)

    def disconnect(self, peer: str) -> None:
        with self._peers_lock:
            target = self._peers.pop(peer, None)
            if target is not None:
                with target.lock:
                    target.process.close()

    def _drop(self, target: _Peer) -> None:
        """Disconnect a peer that is gone, unless its successor has taken its name."""
        with self._peers_lock:
            if self._peers.get(target.address.name) is target:
                self.disconnect(target.address.name)

    def write(self, peer: str, spans: Sequence[Span], deadline: float) -> None:
        self._move("write", peer, spans, deadline)

    def read(self, peer: str, spans: Sequence[Span], deadline: float) -> None:
        self._move("read", peer, spans, deadline)

    def progress(self) -> None:
        """Nothing to do: the peers copy."""

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._shared.close()
        self.arena = no_arena()

    def _move(self, direction: Direction, peer: str, spans: Sequence[Span], deadline: float) -> None:
        target = self._peers.get(peer)
        if target is None:
            raise PeerGone(f"{peer} is not connected")
        table = check_spans(spans, self.arena.nbytes, target.arena.nbytes)
        try:
            with self.counters.measure(direction, int(table[:, 2].sum())), held(target.lock, deadline):
                target.check_alive()
                self._copy(direction, target.arena, table, deadline)
                target.check_alive()
        except PeerGone:
            self._drop(target)
            raise

    def _copy(self, direction: Direction, remote_arena: Arena, table: SpanTable, deadline: float) -> None:
        for local, remote, length in table.tolist():
            for start in range(0, length, _PIECE_BYTES):
                remaining(deadline)
                size = min(_PIECE_BYTES, length - start)
                here = self.arena[local + start : local + start + size]
                there = remote_arena[remote + start : remote + start + size]
                if direction == "write":
                    there[:] = here
                else:
                    here[:] = there
