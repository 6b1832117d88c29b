"""Where else a block may be: hints in Redis, hash -> {node: generation}. Knows nothing of slots or transfers.

Invariant: a hint is never the truth. It may be stale or missing; without Redis remote hits are lost and nothing else.
Idle, it only renews its keys every third of their TTL.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvstore.hashing import BlockHash
from protocol.membership import VERSION

log = logging.getLogger(__name__)

BATCH = 256  # hashes a pipeline
RETRY_S = 1.0  # between attempts while Redis is away

_PUBLISH = "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) redis.call('PEXPIRE', KEYS[1], ARGV[3])"
_WITHDRAW = "if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end"


class Hints:
    """One store node's view. `publish` and `withdraw` only note what to say; a task says it in batches. Start with `start`, end with `close`."""

    def __init__(self, redis: Redis, cluster: str, node: str, generation: int, ttl_s: float) -> None:
        self.counters: Counter[str] = Counter()
        self._redis = redis
        self._prefix = f"headrace:v{VERSION}:{cluster}:hint:"
        self._node = node
        self._generation = generation
        self._ttl_s = ttl_s
        self._present: set[BlockHash] = set()
        self._unsaid: dict[BlockHash, None] = {}  # what to tell of each is looked up in _present when it is told
        self._away = False
        self._run_id = ""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def publish(self, block_hash: BlockHash) -> None:
        self._present.add(block_hash)
        self._say(block_hash)

    def withdraw(self, block_hash: BlockHash) -> None:
        self._present.discard(block_hash)
        self._say(block_hash)

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[BlockHash, list[tuple[str, int]]]:
        """The other nodes, (name, generation), that say they have each block; empty while Redis is away."""
        if self._away or not hashes:
            return {}
        try:
            pipeline = self._redis.pipeline(transaction=False)
            for block_hash in hashes:
                pipeline.hgetall(self._key(block_hash))
            found = await pipeline.execute()
        except (RedisError, OSError) as error:
            self._lost(error)
            return {}
        places: dict[BlockHash, list[tuple[str, int]]] = {}
        for block_hash, fields in zip(hashes, found, strict=True):
            if others := [(node.decode(), int(generation)) for node, generation in fields.items() if node.decode() != self._node]:
                places[block_hash] = others
        return places

    async def check_restart(self) -> None:
        """Another Redis process than the last has forgotten everything: tell it all. Its owner calls this whenever it renews its registration."""
        if self._away:
            return
        try:
            run_id = str((await self._redis.info("server"))["run_id"])
        except (RedisError, OSError) as error:
            self._lost(error)
            return
        if self._run_id not in ("", run_id):
            self._unsaid |= dict.fromkeys(self._present)
            self._wake.set()
        self._run_id = run_id

    async def close(self) -> None:
        """Takes back every hint, if Redis answers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if not self._away:
            told, self._present = list(self._present), set()
            await self._tell(told)

    def _say(self, block_hash: BlockHash) -> None:
        self._unsaid[block_hash] = None
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + self._ttl_s / 3
        while True:
            try:
                async with asyncio.timeout(max(0.0, renew_at - loop.time())):
                    await self._wake.wait()
            except TimeoutError:
                renew_at = loop.time() + self._ttl_s / 3
                self._unsaid |= dict.fromkeys(self._present)
            self._wake.clear()
            told, self._unsaid = list(self._unsaid), {}
            if self._away or not await self._tell(told):
                await self._wait_for_redis()
                self._unsaid |= dict.fromkeys(told) | dict.fromkeys(self._present)  # it may have lost everything
                self._wake.set()

    async def _tell(self, told: Sequence[BlockHash]) -> bool:
        try:
            for start in range(0, len(told), BATCH):
                pipeline = self._redis.pipeline(transaction=False)
                for block_hash in told[start : start + BATCH]:
                    self._tell_one(pipeline, block_hash)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            self._lost(error)
            return False
        return True

    def _tell_one(self, pipeline: Redis, block_hash: BlockHash) -> None:
        key, present = self._key(block_hash), block_hash in self._present
        self.counters["hints_published" if present else "hints_withdrawn"] += 1
        extra: Iterable[int] = (int(self._ttl_s * 1000),) if present else ()
        pipeline.eval(_PUBLISH if present else _WITHDRAW, 1, key, self._node, self._generation, *extra)

    async def _wait_for_redis(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                await self._redis.ping()
            except (RedisError, OSError):
                continue
            self._away = False
            log.info("hints: redis is back, announcing %d blocks again", len(self._present))
            return

    def _lost(self, error: Exception) -> None:
        self.counters["hint_errors"] += 1
        if not self._away:
            self._away = True
            self.counters["hint_outages"] += 1
            log.warning("hints: redis is away (%s): no remote hits until it is back", error)
            self._wake.set()

    def _key(self, block_hash: BlockHash) -> str:
        return self._prefix + block_hash.hex()
