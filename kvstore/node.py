"""A NodeStore in time: the clock, the sweep timer, those who wait for a block, the transport's progress while peers may move bytes. Knows no messages.

Invariants: nothing polls: a timer stands at the next deadline, waiters sleep until their hash changes. Every operation runs between two awaits,
so the state machine sees one at a time.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore.codec import block_checksum
from kvstore.config import StoreConfig
from kvstore.eviction import open_eviction
from kvstore.hashing import BlockHash
from kvstore.hints import Hints
from kvstore.layout import BlockLayout
from kvstore.store import Acquired, Change, NodeStore
from transport.endpoint import Endpoint
from transport.progress import ProgressLoop


def num_slots(config: StoreConfig, layout: BlockLayout) -> int:
    return config.capacity_bytes // layout.block_bytes


class StoreNode:
    """Use `with node.changing() as store:` for whatever changes the store; the timers follow."""

    def __init__(self, config: StoreConfig, layout: BlockLayout, endpoint: Endpoint, hints: Hints) -> None:
        slots = num_slots(config, layout)
        self.layout = layout
        self.endpoint = endpoint
        self.hints = hints
        self.store = NodeStore(
            slots,
            layout.block_bytes,
            eviction=open_eviction(config.eviction),
            max_reserved=int(slots * config.max_reserved_fraction),
            max_hold_s=config.max_hold_s,
            listener=self._changed,
        )
        self._waiters: dict[BlockHash, set[asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._progress = ProgressLoop(endpoint)
        self.idle = asyncio.Event()  # no peer may read or write
        self.idle.set()

    def now(self) -> float:
        return time.time()

    @contextmanager
    def changing(self) -> Iterator[NodeStore]:
        try:
            yield self.store
        finally:
            self._arm()

    async def acquire(
        self, client: str, request_id: str, hashes: Sequence[BlockHash], *, wait_until: float, lease_until: float, fidelity: str, expect: bool
    ) -> Acquired:
        """Lease the leading run, after waiting for it to grow as long as somebody may still commit its next block."""
        announced: set[BlockHash] = set()
        held = Acquired(0, ())  # what is here must not be evicted while its successor is awaited
        try:
            while (missing := next((name for name in hashes if not self.store.has(name, fidelity)), None)) is not None:
                if self.store.pending(missing):
                    announced.add(missing)
                elif not expect or missing in announced:
                    break
                if self.now() >= wait_until:
                    break
                held = self._lease(client, request_id, hashes, lease_until, fidelity, held)
                await self._change_of(missing, wait_until)
            held = self._lease(client, request_id, hashes, lease_until, fidelity, held)
        except BaseException:
            with self.changing() as store:
                store.release(client, held.lease, read=False)
            raise
        self.store.counters["hits"] += len(held.blocks)
        self.store.counters["misses"] += len(hashes) - len(held.blocks)
        return held

    def drop_corrupt(self, names: Sequence[BlockHash]) -> None:
        """Readers found these bad: drop those whose own copy is bad, so that they are written anew."""
        for name in names:
            self.store.counters["corrupt_reported"] += 1
            block = self.store.block(name)
            if block is None:
                continue
            at = self.store.offset(block.slot)
            copy = self.endpoint.arena[at : at + block.length]
            if block_checksum(copy, name, block.fidelity, self.layout.fingerprint) != block.checksum:
                self.store.counters["corrupt"] += 1
                with self.changing() as store:
                    store.drop(name)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._progress.close()

    def _lease(self, client: str, request_id: str, hashes: Sequence[BlockHash], lease_until: float, fidelity: str, held: Acquired) -> Acquired:
        with self.changing() as store:
            longer = store.acquire(client, request_id, hashes, lease_until, fidelity, self.now())
            store.release(client, held.lease, read=False)
        return longer

    async def _change_of(self, name: BlockHash, until: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(name, set()).add(future)
        try:
            await asyncio.wait([future], timeout=max(0.0, until - self.now()))
        finally:
            self._waiters[name].discard(future)
            if not self._waiters[name]:
                del self._waiters[name]

    def _changed(self, name: BlockHash, change: Change, private: bool) -> None:
        if not private and change is Change.COMMITTED:
            self.hints.publish(name)
        elif not private and change is Change.GONE:
            self.hints.withdraw(name)
        for future in self._waiters.get(name, ()):
            if not future.done():
                future.set_result(None)

    def _arm(self) -> None:
        """One timer, at the next deadline; progress only while a peer may read or write."""
        at = self.store.next_deadline()
        if at is not None and (self._timer is None or self._timer_at is None or at < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self.now()), self._sweep)
        if self.store.peers_active and self.idle.is_set():
            self.idle.clear()
            self._progress.hold()
        elif not self.store.peers_active and not self.idle.is_set():
            self.idle.set()
            self._progress.release()

    def _sweep(self) -> None:
        self._timer = self._timer_at = None
        with self.changing() as store:
            store.sweep(self.now())
