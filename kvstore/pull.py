"""Bringing blocks here from another node's store. Knows hints, the registry and sessions; this node's store decides what may be overwritten.

Invariants: one pull at a time for each hash; a pull owns its reservations from its start to commit or abandon; a pulled block is committed only after
its bytes here passed the checksum. Failure is a miss.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.codec import block_checksum
from kvstore.hashing import BlockHash
from kvstore.node import StoreNode
from kvstore.session import ANSWER_S, TRANSFER_S, StoreAddress, StoreSessions
from kvstore.store import Grant, Key, Mover
from protocol import headrace_pb2 as pb
from protocol.errors import HeadraceError, RegistryLost
from protocol.membership import Registry
from transport.endpoint import Span

log = logging.getLogger(__name__)

SELF = "self"  # this node as a client of its own store


class Place(NamedTuple):
    name: str
    generation: int


class Puller:
    def __init__(self, node: StoreNode, sessions: StoreSessions, registry: Registry) -> None:
        self.counters: Counter[str] = Counter()
        self._node = node
        self._sessions = sessions
        self._registry = registry
        self._addresses: dict[Place, StoreAddress] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulling: set[BlockHash] = set()

    async def places(self, hashes: Sequence[BlockHash]) -> dict[BlockHash, Place]:
        """Where each block that is not here, nor on its way, may be had; the same node for as many as possible."""
        missing = [name for name in hashes if not self._node.store.has(name) and not self._node.store.pending(name)]
        hinted = await self._node.hints.lookup(missing)
        offers = Counter(Place(*place) for places in hinted.values() for place in places)
        return {name: max((Place(*place) for place in places), key=lambda place: (offers[place], place)) for name, places in hinted.items()}

    def start(self, request_id: str, attempt: int, places: dict[BlockHash, Place], deadline: float) -> dict[BlockHash, Grant]:
        """Begin to pull; what cannot be reserved is answered NO_CREDIT, what is here by now HAVE."""
        answers: dict[BlockHash, Grant] = {name: Grant(Mover.PULL) for name in places if name in self._pulling}
        by_place: dict[Place, dict[BlockHash, Grant]] = {}
        now = self._node.now()  # one for all: the first may be refused, but none after a grant
        for name, place in places.items():
            if name in answers:
                continue
            with self._node.changing() as store:
                (grant,) = store.attach(SELF, request_id, attempt, [Key(name, store.slot_bytes)], deadline, now)
            answers[name] = Grant(Mover.PULL) if grant.mover is Mover.PUSH else grant
            if grant.mover is Mover.PUSH:
                by_place.setdefault(place, {})[name] = grant
        for place, grants in by_place.items():
            self._pulling |= grants.keys()
            task = asyncio.create_task(self._pull(place, grants, deadline))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return answers

    async def close(self) -> None:
        """Ends with the transfers that run now; begins no other."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _pull(self, place: Place, grants: dict[BlockHash, Grant], deadline: float) -> None:
        names, good = list(grants), 0
        try:
            good = await self._transfer(place, grants, deadline)
        except HeadraceError as error:
            self.counters[f"pull_{error.code}"] += 1
            log.info("pull of %d blocks from %s failed: %s", len(names), place.name, error.message)
        finally:
            # Whatever was committed is no reservation any more.
            with self._node.changing() as store:
                store.abandon(SELF, [grant.reservation for grant in grants.values()])
            self._pulling -= grants.keys()
            self.counters["pull_failed_blocks"] += len(names) - good

    async def _transfer(self, place: Place, grants: dict[BlockHash, Grant], deadline: float) -> int:
        names = list(grants)
        answer_by = min(deadline, time.time() + ANSWER_S)  # a store that has stopped must not keep the reservations
        session = await self._sessions.get(await self._address(place), answer_by)
        leased = await session.acquire("", names, wait_until=0, lease_until=deadline, fidelity="", deadline=answer_by)
        if not leased.blocks:
            return 0
        corrupt: list[BlockHash] = []
        try:
            run = [(name, grants[name], block) for name, block in zip(names, leased.blocks, strict=False)]
            return await self._copy(session.peer, run, corrupt, deadline)
        finally:
            if not session.lost:
                session.post(pb.StoreRequest(release=pb.Release(lease=leased.lease, corrupt=corrupt)))

    async def _copy(self, peer: str, run: list[tuple[BlockHash, Grant, pb.LeasedBlock]], corrupt: list[BlockHash], deadline: float) -> int:
        spans = [Span(grant.offset, block.offset, block.length) for _, grant, block in run]
        started = time.monotonic()
        transfer_s = min(deadline - time.time(), TRANSFER_S)
        read = asyncio.create_task(asyncio.to_thread(self._node.endpoint.read, peer, spans, started + transfer_s))
        await _finish(read)  # even when cancelled: its slots are given back only when no thread writes them
        self.counters["pulled_us"] += int((time.monotonic() - started) * 1e6)
        good = 0
        for name, grant, block in run:
            copy = self._node.endpoint.arena[grant.offset : grant.offset + block.length]
            if block_checksum(copy, name, block.fidelity, self._node.layout.fingerprint) != block.checksum:
                corrupt.append(name)
                self.counters["pull_corrupt"] += 1
                continue
            with self._node.changing() as store:
                store.commit(SELF, grant.reservation, block.length, block.checksum, block.fidelity, block.num_tokens, self._node.now())
            good += 1
            self.counters["pulled_blocks"] += 1
            self.counters["pulled_bytes"] += block.length
        return good

    async def _address(self, place: Place) -> StoreAddress:
        if place not in self._addresses:
            members = await self._registry.members("store")
            self._addresses = {Place(m.name, m.generation): StoreAddress(m.name, m.generation, m.address) for m in members}
        try:
            return self._addresses[place]
        except KeyError:
            raise RegistryLost(f"no store {place.name} of generation {place.generation}") from None


async def _finish(task: "asyncio.Task[None]") -> None:
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()
        raise cancelled
    task.result()
