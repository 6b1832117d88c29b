"""Loading from the store of a worker's own node, counted. Knows the mover and which session is the node's; nothing of why blocks are wanted.

Invariant: the node's store being away, slow or wrong costs blocks that are not loaded, never an error: the caller computes them.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

from kvstore.mover import BlockMover, PoolBlock
from kvstore.session import StoreSession
from protocol import headrace_pb2 as pb
from protocol.errors import HeadraceError

log = logging.getLogger(__name__)
LocalStore = Callable[[], Awaitable[StoreSession | None]]
PREFIX_WAIT_S = 1.0  # for blocks on their way to this node's store that nobody handed off: a matter of milliseconds, or not worth waiting for


class NodeLoader:
    """`local_store` gives the session with this node's store, or None while there is none."""

    def __init__(self, mover: BlockMover, local_store: LocalStore) -> None:
        self.mover = mover
        self._local_store = local_store

    async def load(self, hold: str, blocks: Sequence[PoolBlock], work: pb.Work, *, wait_until: float, deadline: float, expect: bool = False) -> int:
        """How many leading blocks are in the pool and good; what moved is added to `work`. `wait_until` and `expect` as in BlockMover.fetch."""
        try:
            session = await self._local_store()
            if session is None:
                return 0
            report = await self.mover.fetch(session, hold, blocks, wait_until=min(wait_until, deadline), expect=expect, deadline=deadline)
        except HeadraceError as error:
            self.mover.count(f"load_failed_{error.code}")
            log.warning("KV load failed, computing instead: %s", error.code)
            return 0
        work.pulled_blocks += report.num_blocks
        work.pulled_bytes += report.bytes
        work.pulled_s += report.seconds
        return report.num_blocks

    async def put(self, hold: str, blocks: Sequence[PoolBlock], deadline: float) -> None:
        """Write blocks back for whoever may want them later."""
        try:
            session = await self._local_store()
            if session is not None:
                await self.mover.put(session, hold, blocks, deadline)
        except HeadraceError as error:
            self.mover.count(f"put_failed_{error.code}")
            log.info("write-back failed: %s", error.code)

    async def forget(self, hold: str) -> None:
        """The node's store need not hold blocks under this name any more."""
        session = await self._local_store()
        if session is not None and not session.lost:
            session.post(pb.StoreRequest(forget=pb.Forget(request_id=hold)))
