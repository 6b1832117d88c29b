"""The worker's side of block movement: between its own block pool (T0) and stores. Knows the arena, the codec and sessions; nothing of tokens or models.

Arena: [pool of num_blocks blocks][staging slots, one block each]. A full raw block moves straight from or to its place in the pool; others are staged.
Invariants: when a call returns, also by cancellation, no thread of it touches the pool any more. A block counts as fetched only after its bytes *here*
passed the checksum. Every grant is committed, abandoned, or lost with the session.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from kvstore.codec import Bytes, block_checksum, open_codec
from kvstore.hashing import BlockHash
from kvstore.layout import BlockLayout
from kvstore.session import ANSWER_S, TRANSFER_S, StoreSession
from kvstore.store import Grant, Key, Mover
from protocol import headrace_pb2 as pb
from protocol.errors import CorruptBlock, DeadlineExceeded, HeadraceError, TransferTimeout
from transport.endpoint import Endpoint, Span

CHUNK = 16  # blocks a transfer, and a commit
GRACE_S = 2.0  # for the store's answer beyond the time until which it waits
T = TypeVar("T")


class PoolBlock(NamedTuple):
    """`block`: its index in the pool. `private` matters to `put` alone; a plan knows it from its keys."""

    hash: BlockHash
    block: int
    num_tokens: int
    private: bool = False


@dataclass
class PushReport:
    """`accepted`: committed by this push; `present`: at the store now, whoever wrote it; `failed`: not there, first `reason` an error's code.
    `seconds`: inside the transport."""

    accepted: set[BlockHash] = field(default_factory=set)
    present: set[BlockHash] = field(default_factory=set)
    failed: set[BlockHash] = field(default_factory=set)
    bytes: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def num_blocks(self) -> int:
        return len(self.accepted)


@dataclass
class FetchReport:
    """The leading `num_blocks` blocks, `num_tokens` tokens, are in the pool and good. `reason` why not all: "" | "missing" | an error's code."""

    num_blocks: int = 0
    num_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    corrupt: int = 0
    reason: str = ""


class BlockMover:
    """One for each endpoint. `pool`: uint8 [num_blocks * block_bytes], a view of the arena."""

    def __init__(self, endpoint: Endpoint, layout: BlockLayout, num_blocks: int, codec: str = "raw", staging_slots: int = 2, transport: str = "") -> None:
        self.block_bytes = layout.block_bytes
        self.codec = codec
        self.transport = transport
        self.pool: Bytes = endpoint.arena[: num_blocks * layout.block_bytes]
        self._endpoint = endpoint
        self._layout = layout
        self._codec = open_codec(codec, layout)
        self._counters: Counter[str] = Counter()
        self._seconds = {"push_s": 0.0, "fetch_s": 0.0}
        self._staging: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(staging_slots):
            self._staging.put_nowait((num_blocks + slot) * layout.block_bytes)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mover")

    @staticmethod
    def arena_bytes(layout: BlockLayout, num_blocks: int, staging_slots: int = 2) -> int:
        return (num_blocks + staging_slots) * layout.block_bytes

    @property
    def writes_may_land_late(self) -> bool:
        return self._endpoint.writes_may_land_late

    def counters(self) -> dict[str, float]:
        return {**self._counters, **self._seconds}

    def count(self, what: str) -> None:
        self._counters[what] += 1

    def close(self) -> None:
        """After the last call has returned."""
        self._threads.shutdown()

    # ---- to a store ---------------------------------------------------------------------------------------------------------------

    async def attach(
        self, session: StoreSession, request_id: str, attempt: int, keys: Sequence[Key | pb.BlockKey], deadline: float, *, allow_pull: bool = False
    ) -> "PushPlan":
        """Ask who moves each block; close the plan in the end. Raises what the session raises."""
        named = [Key(BlockHash(key.hash), key.length, key.private) for key in keys]
        answer_by = min(deadline, time.time() + ANSWER_S)
        grants = await session.attach(request_id, attempt, named, answer_by, allow_pull=allow_pull, until=deadline)
        plan = PushPlan(self, session, request_id, attempt, {key.hash: grant for key, grant in zip(named, grants, strict=True)})
        self._counters["push_refused"] += plan.num_refused
        return plan

    async def put(self, session: StoreSession, request_id: str, blocks: Sequence[PoolBlock], deadline: float) -> PushReport:
        """Write blocks back for whoever may want them; only private ones are held for the request. Raises what the session raises."""
        report = PushReport()
        for private in (False, True):
            chosen = [block for block in blocks if block.private is private]
            if chosen:
                keys = [Key(block.hash, self._codec.encoded_bytes(block.num_tokens), private) for block in chosen]
                plan = await self.attach(session, request_id if private else "", 0, keys, deadline)
                try:
                    await plan.push_into(report, chosen, deadline)
                finally:
                    await plan.close()
        return report

    async def write(self, session: StoreSession, blocks: Sequence[tuple[PoolBlock, Grant]], deadline: float) -> tuple[list[pb.CommitBlock], int, float]:
        """Encode and write a chunk into its grants: what to commit, bytes, seconds in the transport. Raises StoreLost, TransferFailed, ..."""
        with session.writing():
            if len(blocks) == 1 and not self._codec.in_place(blocks[0][0].num_tokens):
                async with self._staged(deadline) as staging:
                    return await self._in_thread(partial(self._write, session.peer, blocks, staging, deadline))
            return await self._in_thread(partial(self._write, session.peer, blocks, 0, deadline))

    def _write(self, peer: str, blocks: Sequence[tuple[PoolBlock, Grant]], staging: int, deadline: float) -> tuple[list[pb.CommitBlock], int, float]:
        if deadline <= time.time():
            raise DeadlineExceeded("the deadline passed before the write", stage="kv_push")
        spans, commits = [], []
        for (name, block, num_tokens, _), grant in blocks:
            local, length = block * self.block_bytes, self.block_bytes
            if not self._codec.in_place(num_tokens):
                length = self._codec.encode(self._place(local), num_tokens, self._place(staging))
                local = staging
            checksum = block_checksum(self._endpoint.arena[local : local + length], name, self._codec.fidelity, self._layout.fingerprint)
            spans.append(Span(local, grant.offset, length))
            commits.append(
                pb.CommitBlock(reservation=grant.reservation, length=length, checksum=checksum, fidelity=self._codec.fidelity, num_tokens=num_tokens)
            )
        started = time.monotonic()
        self._endpoint.write(peer, spans, started + min(deadline - time.time(), TRANSFER_S))
        seconds, num_bytes = time.monotonic() - started, sum(span.length for span in spans)
        self._seconds["push_s"] += seconds
        self._counters.update(push_blocks=len(blocks), push_bytes=num_bytes)
        return commits, num_bytes, seconds

    # ---- from a store -------------------------------------------------------------------------------------------------------------

    async def fetch(
        self,
        session: StoreSession,
        request_id: str,
        blocks: Sequence[PoolBlock],
        *,
        wait_until: float,
        deadline: float,
        expect: bool = False,
        allow_pull: bool = True,
    ) -> FetchReport:
        """Fill the pool's blocks with the store's copies, the leading run of them. The store waits until `wait_until` for blocks on their way, with
        `expect` also for those not announced yet. Never raises a HeadraceError: the report has its code."""
        report = FetchReport()
        if not blocks:
            return report
        try:
            leased = await session.acquire(
                request_id,
                [block.hash for block in blocks],
                wait_until=min(wait_until, deadline),
                lease_until=deadline,
                fidelity=self._codec.fidelity,
                deadline=min(deadline, max(wait_until, time.time())) + GRACE_S,
                expect=expect,
                allow_pull=allow_pull,
            )
        except HeadraceError as error:
            report.reason = error.code
            self.count(f"fetch_failed_{error.code}")
            return report
        corrupt: list[BlockHash] = []
        try:
            await self._read_run(session.peer, list(zip(blocks, leased.blocks, strict=False)), report, corrupt, deadline)
            report.reason = "missing" if report.num_blocks < len(blocks) else ""
        except HeadraceError as error:
            report.reason = error.code
            self.count(f"fetch_failed_{error.code}")
        finally:
            if leased.lease and not session.lost:
                session.post(pb.StoreRequest(release=pb.Release(lease=leased.lease, corrupt=corrupt)))
        return report

    async def _read_run(
        self, peer: str, pairs: Sequence[tuple[PoolBlock, pb.LeasedBlock]], report: FetchReport, corrupt: list[BlockHash], deadline: float
    ) -> None:
        for chunk in self.chunks(pairs, lambda pair: pair[0].num_tokens):
            if self._codec.in_place(chunk[0][0].num_tokens):
                good, num_bytes, seconds = await self._in_thread(partial(self._read, peer, chunk, deadline))
            else:
                async with self._staged(deadline) as staging:
                    good, num_bytes, seconds = await self._in_thread(partial(self._read_staged, peer, *chunk[0], staging, deadline))
            report.num_blocks += good
            report.num_tokens += sum(block.num_tokens for block, _ in chunk[:good])
            report.bytes += num_bytes
            report.seconds += seconds
            self._seconds["fetch_s"] += seconds
            self._counters.update(fetch_blocks=good, fetch_bytes=num_bytes)
            if good < len(chunk):
                corrupt.append(chunk[good][0].hash)
                report.corrupt += 1
                self._counters["fetch_corrupt"] += 1
                raise CorruptBlock(f"block {chunk[good][0].hash.hex()} from {peer}")

    def _read(self, peer: str, chunk: list[tuple[PoolBlock, pb.LeasedBlock]], deadline: float) -> tuple[int, int, float]:
        """Full blocks, in place: how many leading ones are good, bytes, seconds."""
        usable = [(block, leased) for block, leased in chunk if leased.length == self.block_bytes and leased.num_tokens == block.num_tokens]
        spans = [Span(block.block * self.block_bytes, leased.offset, leased.length) for block, leased in usable]
        seconds = self._timed_read(peer, spans, deadline)
        good = 0
        for block, leased in chunk:
            if (block, leased) not in usable or not self._passes(block.block * self.block_bytes, block.hash, leased):
                break
            good += 1
        return good, sum(span.length for span in spans), seconds

    def _read_staged(self, peer: str, block: PoolBlock, leased: pb.LeasedBlock, staging: int, deadline: float) -> tuple[int, int, float]:
        if leased.num_tokens != block.num_tokens or leased.length > self._codec.encoded_bytes(block.num_tokens):
            return 0, 0, 0.0
        seconds = self._timed_read(peer, [Span(staging, leased.offset, leased.length)], deadline)
        good = self._passes(staging, block.hash, leased)
        if good:
            self._codec.decode(self._place(staging)[: leased.length], block.num_tokens, self._place(block.block * self.block_bytes))
        return int(good), leased.length, seconds

    def _timed_read(self, peer: str, spans: Sequence[Span], deadline: float) -> float:
        started = time.monotonic()
        self._endpoint.read(peer, spans, started + min(deadline - time.time(), TRANSFER_S))
        return time.monotonic() - started

    def _passes(self, offset: int, name: BlockHash, leased: pb.LeasedBlock) -> bool:
        encoded = self._endpoint.arena[offset : offset + leased.length]
        return block_checksum(encoded, name, leased.fidelity, self._layout.fingerprint) == leased.checksum

    # ---- threads and staging ------------------------------------------------------------------------------------------------------

    def chunks(self, items: Iterable[T], num_tokens: Callable[[T], int]) -> Iterator[list[T]]:
        """In order: runs of blocks that move in place, at most CHUNK; one that is staged alone."""
        run: list[T] = []
        for item in items:
            staged = not self._codec.in_place(num_tokens(item))
            if run and (staged or len(run) == CHUNK):
                yield run
                run = []
            if staged:
                yield [item]
            else:
                run.append(item)
        if run:
            yield run

    def _place(self, offset: int) -> Bytes:
        return self._endpoint.arena[offset : offset + self.block_bytes]

    @asynccontextmanager
    async def _staged(self, deadline: float) -> AsyncIterator[int]:
        try:
            async with asyncio.timeout(deadline - time.time()):
                offset = await self._staging.get()
        except TimeoutError:
            raise DeadlineExceeded("no staging slot came free", stage="kv_staging") from None
        try:
            yield offset
        finally:
            self._staging.put_nowait(offset)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Cancellation waits for the thread: until it is done it may touch the pool. Its transfer has a deadline."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            future.exception()  # seen
            raise cancelled
        return future.result()


class PushPlan:
    """Which blocks of one attempt this worker pushes to one store. Made by BlockMover.attach; close it."""

    def __init__(self, mover: BlockMover, session: StoreSession, request_id: str, attempt: int, grants: dict[BlockHash, Grant]) -> None:
        self._mover = mover
        self._session = session
        self._request_id = request_id
        self._attempt = attempt
        self._open = {name: grant for name, grant in grants.items() if grant.mover is Mover.PUSH}
        self._have = {name for name, grant in grants.items() if grant.mover is Mover.HAVE}
        self.movers = Counter(grant.mover for grant in grants.values())

    def wanted(self, block_hash: BlockHash) -> bool:
        return block_hash in self._open

    @property
    def num_refused(self) -> int:
        """Blocks that the store has no credit for now."""
        return self.movers[Mover.NO_CREDIT]

    async def push(self, blocks: Sequence[PoolBlock], deadline: float) -> PushReport:
        """Write and commit those of `blocks` that are wanted. Never raises a HeadraceError: what failed is in the report."""
        report = PushReport()
        await self.push_into(report, blocks, deadline)
        return report

    async def push_into(self, report: PushReport, blocks: Sequence[PoolBlock], deadline: float) -> None:
        report.present.update(block.hash for block in blocks if block.hash in self._have)
        mine = [(block, self._open.pop(block.hash)) for block in blocks if block.hash in self._open]
        commits: list[asyncio.Task[None]] = []
        try:
            while mine:
                chunk = next(self._mover.chunks(mine, lambda pair: pair[0].num_tokens))
                written = await self._write(report, chunk, deadline)
                mine = mine[len(chunk) :]
                if written:
                    commits.append(asyncio.create_task(self._commit(report, chunk, written, deadline)))
        finally:
            self._open.update({block.hash: grant for block, grant in mine})  # only after a cancellation: close gives them back
            await asyncio.gather(*commits)

    async def close(self) -> None:
        """Give back what was not pushed."""
        reservations = [grant.reservation for grant in self._open.values()]
        self._open.clear()
        self._abandon(reservations)

    async def _write(self, report: PushReport, chunk: Sequence[tuple[PoolBlock, Grant]], deadline: float) -> list[pb.CommitBlock]:
        try:
            commits, num_bytes, seconds = await self._mover.write(self._session, chunk, deadline)
        except HeadraceError as error:
            if not (isinstance(error, TransferTimeout) and self._mover.writes_may_land_late):  # else the slots stay this process's as long as it lives
                self._abandon([grant.reservation for _, grant in chunk])
            self._failed(report, chunk, error)
            return []
        report.bytes += num_bytes
        report.seconds += seconds
        return commits

    async def _commit(self, report: PushReport, chunk: Sequence[tuple[PoolBlock, Grant]], commits: list[pb.CommitBlock], deadline: float) -> None:
        try:
            reply = await self._session.commit(self._request_id, self._attempt, commits, min(deadline, time.time() + ANSWER_S) + GRACE_S)
        except HeadraceError as error:
            self._failed(report, chunk, error)
            return
        for (block, _), accepted, present in zip(chunk, reply.accepted, reply.present, strict=True):
            if accepted:
                report.accepted.add(block.hash)
            (report.present if present else report.failed).add(block.hash)
            if not present:
                report.reason = report.reason or "fenced"

    def _failed(self, report: PushReport, chunk: Sequence[tuple[PoolBlock, Grant]], error: HeadraceError) -> None:
        report.failed.update(block.hash for block, _ in chunk)
        report.reason = report.reason or error.code
        self._mover.count(f"push_failed_{error.code}")

    def _abandon(self, reservations: Sequence[int]) -> None:
        if reservations and not self._session.lost:
            self._session.post(pb.StoreRequest(abandon=pb.Abandon(reservations=reservations)))
