"""Reads over a network that cannot be cut off: UCX finishes an overdue read whenever the peer answers, so it must not aim at the arena. It aims at a staging
buffer instead, and the bytes are copied from there once all have come. Costs one copy, at ten times the network's speed.

Invariant: a buffer that an overdue read may still fill is used by nobody until that read has settled.
"""

import threading
from collections.abc import Iterator

import numpy as np

from protocol.errors import TransferFailed, TransferTimeout
from transport.arena import Arena, private_arena
from transport.deadline import held
from transport.nixl_agent import NixlAgent, Posted, descriptors
from transport.spans import SpanTable

STAGING_BYTES = 8 << 20
MAX_OVERDUE = 8


class StagedReads:
    """`overdue` counts reads that ran into their deadline and have not settled yet."""

    def __init__(self, agent: NixlAgent, arena: Arena) -> None:
        self._agent = agent
        self._arena = arena
        self._lock = threading.Lock()
        self._free = [self._open_buffer()]
        self._overdue: list[tuple[Posted, Arena]] = []

    @property
    def overdue(self) -> int:
        return len(self._overdue)

    def read(self, peer: str, table: SpanTable, remote_base: int, deadline: float) -> None:
        """`table`: int64 (N, 3) of checked spans. Raises TransferFailed when MAX_OVERDUE reads have not settled."""
        with held(self._lock, deadline):
            self._settle()
            if len(self._overdue) >= MAX_OVERDUE:
                raise TransferFailed(f"{len(self._overdue)} reads are overdue and may still come in")
            buffer = self._free.pop() if self._free else self._open_buffer()
            for piece in pieces(table, STAGING_BYTES):
                posted = self._post(peer, piece, buffer, remote_base, deadline)
                try:
                    self._agent.wait(posted, deadline)
                except TransferTimeout:
                    self._overdue.append((posted, buffer))
                    raise
                except BaseException:
                    self._finish(posted, buffer)
                    raise
                self._agent.release(posted)
                self._copy_out(piece, buffer)
            self._free.append(buffer)

    def close(self) -> None:
        """The overdue ones first: a handle must not outlive the agent."""
        with self._lock:
            for posted, _ in self._overdue:
                self._agent.release(posted)
            self._overdue.clear()

    def _post(self, peer: str, piece: SpanTable, buffer: Arena, remote_base: int, deadline: float) -> Posted:
        lengths = piece[:, 2]
        local = descriptors(buffer.ctypes.data + _packed(lengths), lengths)
        try:
            return self._agent.post("read", peer, local, descriptors(remote_base + piece[:, 1], lengths), deadline)
        except BaseException:
            self._free.append(buffer)
            raise

    def _finish(self, posted: Posted, buffer: Arena) -> None:
        self._agent.release(posted)
        self._free.append(buffer)

    def _settle(self) -> None:
        settled = [pair for pair in self._overdue if self._agent.has_settled(pair[0])]
        self._overdue = [pair for pair in self._overdue if not pair[0].is_over]
        for posted, buffer in settled:
            self._finish(posted, buffer)

    def _copy_out(self, piece: SpanTable, buffer: Arena) -> None:
        for (local, _, length), start in zip(piece.tolist(), _packed(piece[:, 2]).tolist(), strict=True):
            self._arena[local : local + length] = buffer[start : start + length]

    def _open_buffer(self) -> Arena:
        buffer = private_arena(STAGING_BYTES)
        self._agent.register(buffer)
        return buffer


def pieces(table: SpanTable, max_bytes: int) -> Iterator[SpanTable]:
    """The same spans, long ones cut, in groups of at most `max_bytes`."""
    group: list[tuple[int, int, int]] = []
    room = max_bytes
    for local, remote, length in table.tolist():
        done = 0
        while done < length:
            size = min(length - done, room)
            group.append((local + done, remote + done, size))
            done += size
            room -= size
            if room == 0:
                yield np.array(group, dtype=np.int64)
                group, room = [], max_bytes
    if group:
        yield np.array(group, dtype=np.int64)


def _packed(lengths: SpanTable) -> SpanTable:
    """Where each span begins when they lie one after another."""
    ends: SpanTable = np.cumsum(lengths)
    return ends - lengths
