"""LoRA adapters across the cluster's workers: which are served, loading and unloading them everywhere. Knows nothing of HTTP.

Which adapters there are is read from the workers' statuses. Invariants: a change is over at its deadline; an adapter that is being unloaded takes no new
request here, and leaves the workers when the last one that this router runs has ended.
"""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from protocol import headrace_pb2 as pb
from protocol.errors import DeadlineExceeded, HeadraceError, InvalidRequest, Unavailable, UnknownModel
from protocol.request import ADAPTER_NAME
from router.link import WorkerLink
from router.membership import Membership
from router.metrics import RouterMetrics
from router.view import AdapterView, WorkerKey

log = logging.getLogger(__name__)
RELOAD_S = 60.0  # a worker that came without an adapter has so long to load it


class AdapterControl:
    """`reload` tells workers that come later about the adapters loaded here."""

    def __init__(self, membership: Membership, metrics: RouterMetrics, model_name: str) -> None:
        self._membership = membership
        self._metrics = metrics
        self._model_name = model_name
        self._wanted: dict[str, str] = {}  # name -> path, loaded through this router
        self._told: set[tuple[WorkerKey, str]] = set()
        self._leaving: set[str] = set()
        self._users: Counter[str] = Counter()
        self._ended = asyncio.Event()
        self._changing = asyncio.Lock()

    def served(self) -> dict[str, AdapterView]:
        return {name: adapter for name, adapter in self._membership.view().adapters.items() if name not in self._leaving}

    def of_model(self, model: str) -> AdapterView | None:
        """The adapter of that name; None for the model itself. Raises UnknownModel."""
        if model == self._model_name:
            return None
        served = self.served()
        if model not in served:
            raise UnknownModel(f"the model {model!r} does not exist; this cluster serves {', '.join(map(repr, [self._model_name, *served]))}", field="model")
        return served[model]

    def enter(self, name: str, count: int) -> None:
        self._users[name] += count

    def leave(self, name: str, count: int) -> None:
        self._users[name] -= count
        self._ended.set()

    # ---- changes ---------------------------------------------------------------------------------------------------------

    async def load(self, name: str, path: str, deadline: float) -> None:
        """On every worker, or on none. Raises InvalidRequest, Unavailable, DeadlineExceeded, WorkerLost, Overloaded."""
        if not re.fullmatch(ADAPTER_NAME, name) or name == self._model_name:
            raise InvalidRequest(f"lora_name: {name!r} is taken or no name of letters, digits and ._:/-, at most 128", field="lora_name")
        if not path.startswith("/"):
            raise InvalidRequest("lora_path: must be absolute, and is the workers' own", field="lora_path")
        async with self._exclusive(deadline):
            lacking = [link for link in self._links() if not has(link, name)]
            if not lacking:
                raise InvalidRequest(f"lora_name: the adapter {name!r} is loaded already", field="lora_name")
            outcomes = await self._everywhere("load", [link.call(pb.LoadAdapter(name=name, path=path, deadline=deadline)) for link in lacking])
            error = next((outcome for outcome in outcomes if outcome is not None), None) or self._differing(name)
            if error is not None:
                loaded = [link for link, outcome in zip(lacking, outcomes, strict=True) if outcome is None]
                await self._everywhere("undo", [link.call(pb.UnloadAdapter(name=name, deadline=time.time() + 1)) for link in loaded])
                raise error
            self._wanted[name] = path
            log.info("adapter %s is loaded on %d workers", name, len(lacking))

    async def unload(self, name: str, deadline: float) -> None:
        """When the requests that use it have ended. Raises UnknownModel, DeadlineExceeded (it may be gone from some workers then), WorkerLost."""
        async with self._exclusive(deadline):
            links = [link for link in self._links() if has(link, name)]
            if not links:
                raise UnknownModel(f"lora_name: no adapter {name!r} is loaded", field="lora_name")
            self._leaving.add(name)
            try:
                await self._until_unused(name, deadline)
                self._wanted.pop(name, None)
                outcomes = await self._everywhere("unload", [link.call(pb.UnloadAdapter(name=name, deadline=deadline)) for link in links])
            finally:
                self._leaving.discard(name)
        error = next((outcome for outcome in outcomes if outcome is not None and not isinstance(outcome, UnknownModel)), None)
        if error is not None:  # a worker that does not know the adapter has what was wanted
            raise error

    async def follow(self) -> None:
        """For ever: load what is wanted on workers that come later."""
        while True:
            await self._membership.changed(RELOAD_S)
            known = {link.key for link in self._membership.links()}
            self._told = {told for told in self._told if told[0] in known}
            if not self._changing.locked():
                await self._tell_newcomers()

    async def _tell_newcomers(self) -> None:
        async with self._changing:
            missing = [
                (link, name, path)
                for link in self._membership.links()
                if link.connected and link.status is not None
                for name, path in self._wanted.items()
                if not has(link, name) and (link.key, name) not in self._told
            ]
            self._told |= {(link.key, name) for link, name, _ in missing}
            deadline = time.time() + RELOAD_S
            await self._everywhere("reload", [link.call(pb.LoadAdapter(name=name, path=path, deadline=deadline)) for link, name, path in missing])

    def _links(self) -> list[WorkerLink]:
        links = [link for link in self._membership.links() if link.connected and link.status is not None]
        if not links:
            raise Unavailable("no worker is connected")
        return links

    def _differing(self, name: str) -> HeadraceError | None:
        revisions = {one.revision for link in self._links() if link.status is not None for one in link.status.adapters if one.name == name}
        return InvalidRequest("lora_path: the workers find different weights there", field="lora_path") if len(revisions) > 1 else None

    async def _until_unused(self, name: str, deadline: float) -> None:
        try:
            async with asyncio.timeout(max(deadline - time.time(), 0)):
                while self._users[name] > 0:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._users[name]} requests still use the adapter {name!r}; it stays") from None

    async def _everywhere(self, action: str, calls: Sequence[Awaitable[None]]) -> list[HeadraceError | None]:
        """What each call raised."""
        outcomes: list[HeadraceError | None] = []
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, HeadraceError):
                raise outcome
            outcomes.append(outcome)
            self._metrics.adapter_call(action, outcome.code if outcome is not None else "ok")
            if outcome is not None:
                log.warning("adapter %s: %s", action, outcome)
        return outcomes

    def _exclusive(self, deadline: float) -> "Exclusive":
        return Exclusive(self._changing, deadline)


@dataclass(frozen=True, slots=True)
class Exclusive:
    """One change after the other; waits for its turn until the deadline."""

    lock: asyncio.Lock
    deadline: float

    async def __aenter__(self) -> None:
        try:
            async with asyncio.timeout(max(self.deadline - time.time(), 0)):
                await self.lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded("another adapter is being loaded or unloaded") from None

    async def __aexit__(self, *error: object) -> None:
        self.lock.release()


def has(link: WorkerLink, name: str) -> bool:
    return link.status is not None and any(adapter.name == name for adapter in link.status.adapters)
