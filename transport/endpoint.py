"""The seam of byte movement: one registered arena, peers, one-sided reads and writes. Knows nothing of tokens, requests or blocks.

Contract, checked for every row of TRANSPORTS by tests/contract/test_transport.py:
- An endpoint owns one arena. Peers address each other's arenas by (offset, length); a span outside either arena raises ValueError before any byte moves.
- `write` and `read` block until all bytes have moved and are visible at the target, or raise: PeerGone, TransferTimeout or TransferFailed. Call them from
  a worker thread: the GIL is released while bytes move. After a raise the destination's content is undefined.
- No order holds between two transfers; the caller guards overlapping writes.
- After PeerGone the peer is no longer connected; after TransferTimeout it still is.
- After any raise nothing lands in the local arena any more. In the peer's arena bytes of a `write` that raised TransferTimeout may still land where
  `writes_may_land_late`, until this process ends: its target must not be used again before that.
- The passive side runs no code of its own, except while `needs_progress`: then its owner calls `progress` every millisecond or two while a peer may
  transfer, and never otherwise.
- `connect` and `disconnect` are idempotent. Identity is the peer's name (which carries its generation), never its address.
- `close` leaves nothing behind: no thread, socket, file or shared memory. The arena's memory goes with the last view of it.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from protocol.errors import ConfigError
from transport.config import TransportConfig
from transport.counters import TransferCounters


class Span(NamedTuple):
    """`local` and `remote` are byte offsets into the two arenas."""

    local: int
    remote: int
    length: int


class Endpoint(Protocol):
    name: str
    arena: npt.NDArray[np.uint8]
    needs_progress: bool
    writes_may_land_late: bool
    counters: TransferCounters

    @property
    def metadata(self) -> bytes:
        """What a peer passes to `connect`; carries no secret but may name addresses: send it over an authenticated channel."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Make a peer's arena reachable; returns the peer's name. Raises PeerGone or TransferFailed."""
        ...

    def disconnect(self, peer: str) -> None: ...

    def write(self, peer: str, spans: Sequence[Span], deadline: float) -> None:
        """Copy local -> remote. `deadline` in time.monotonic() seconds."""
        ...

    def read(self, peer: str, spans: Sequence[Span], deadline: float) -> None:
        """Copy remote -> local."""
        ...

    def progress(self) -> None: ...

    def close(self) -> None: ...


TRANSPORTS = {
    "nixl": "transport.nixl:NixlEndpoint",
    "shm": "transport.shm:ShmEndpoint",
    "tcp": "transport.tcp:TcpEndpoint",
}


def open_endpoint(config: TransportConfig, name: str, arena_bytes: int) -> Endpoint:
    """An endpoint called `name` over a fresh, zeroed, resident arena. Raises ConfigError for an unknown backend or one that cannot work here."""
    try:
        module, _, attribute = TRANSPORTS[config.backend].partition(":")
    except KeyError:
        raise ConfigError(f"transport.backend: {config.backend!r} is none of {', '.join(TRANSPORTS)}", field="transport.backend") from None
    endpoint: Endpoint = getattr(import_module(module), attribute)(config, name, arena_bytes)
    return endpoint
