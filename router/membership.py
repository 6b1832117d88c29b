"""Keeps the links to the cluster's workers and the list of its stores fresh. Owns both; knows nothing of requests.

Invariant: Redis is a hint. A worker is dropped only when its stream is broken and the registry, when it answers, no longer lists its generation.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from protocol.errors import RegistryLost
from protocol.membership import Kind, Member
from router.config import RouterConfig
from router.link import WorkerLink
from router.view import ClusterView, StoreView, WorkerKey

log = logging.getLogger(__name__)


class MemberList(Protocol):
    """The part of protocol.membership.Registry that a router reads."""

    ttl_s: float

    async def members(self, kind: Kind | None = None) -> Sequence[Member]: ...


class Membership:
    def __init__(self, registry: MemberList, router: str, token: str, config: RouterConfig) -> None:
        self._registry = registry
        self._router = router
        self._token = token
        self._config = config
        self._links: dict[WorkerKey, WorkerLink] = {}
        self._stores: dict[str, tuple[Member, float]] = {}  # with the moment when last listed
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.registry_failures = 0
        self.registry_lost = False

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._poll_forever(), name="registry-poll"),
            asyncio.create_task(self._check_forever(), name="stall-check"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()

    def view(self) -> ClusterView:
        now = time.monotonic()
        workers = sorted((link.view(now) for link in self._links.values()), key=lambda worker: worker.key)
        stores = (StoreView(m.name, m.generation, m.address, m.node, m.attributes) for m, _ in self._stores.values())
        return ClusterView(tuple(workers), tuple(sorted(stores, key=lambda store: store.name)))

    def link(self, worker: WorkerKey) -> WorkerLink | None:
        return self._links.get(worker)

    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    async def changed(self, timeout_s: float) -> bool:
        """Wait until a worker has come, gone or changed its health; False at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    # ---- the registry ----------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """One look at the registry. Raises RegistryLost and then changes nothing."""
        members = await self._registry.members()
        workers = {(member.name, member.generation): member for member in members if member.kind == "worker"}
        for key, member in workers.items():
            if key not in self._links:
                self._links[key] = WorkerLink(member, self._router, self._token, self._config.stall_s, self._announce_change)
                self._links[key].start()
        for key in [key for key, link in self._links.items() if key not in workers and not link.connected]:
            log.info("worker %s, generation %d, is gone", *key)
            await self._links.pop(key).close()
        now = time.monotonic()
        if self.registry_lost:  # what it could not say while it was away counts for nothing
            self._stores = {name: (member, now) for name, (member, _) in self._stores.items()}
        self._stores.update({member.name: (member, now) for member in members if member.kind == "store"})
        self._stores = {name: (member, at) for name, (member, at) in self._stores.items() if now - at <= self._registry.ttl_s}

    async def _poll_forever(self) -> None:
        while True:
            try:
                await self.refresh()
                self.registry_lost = False
            except RegistryLost as error:
                self.registry_failures += 1
                if not self.registry_lost:
                    log.warning("the registry does not answer; going on with the members known: %s", error)
                self.registry_lost = True
            except Exception:  # one bad record must not end the looking
                self.registry_failures += 1
                log.exception("cannot read the registry")
            await asyncio.sleep(self._config.poll_s)

    async def _check_forever(self) -> None:
        """Stalls show by what does not come, so somebody must look."""
        while True:
            await asyncio.sleep(min(1.0, self._config.stall_s / 4))
            now = time.monotonic()
            for link in self._links.values():
                link.check(now)
            self._announce_change()

    def _announce_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
