"""One NIXL agent with the UCX backend: our lock around each call, our errors, deadlines. Knows no arena; nixl itself is handed in by transport.nixl.

Invariants: every call into the agent holds `_lock` (the agent has none); no progress thread, which would spin on a whole core.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import ConfigError, PeerGone, TransferFailed
from transport.arena import Arena
from transport.counters import Direction
from transport.deadline import held, remaining

logger = logging.getLogger(__name__)

# uint64 (N, 3): address, length, device.
Descriptors = npt.NDArray[np.uint64]

_FIRST_PAUSE_S, _LAST_PAUSE_S = 50e-6, 1e-3


class Posted:
    """One transfer in the agent's hands. `is_over`: no byte of it will move any more."""

    def __init__(self, handle: Any, peer: str, is_over: bool) -> None:
        self.handle = handle
        self.peer = peer
        self.is_over = is_over


class NixlAgent:
    def __init__(self, nixl: ModuleType, bindings: ModuleType, name: str, ucx_error_mode: str) -> None:
        """`nixl` and `bindings`: the modules `_api` and `_bindings` of one build. Raises ConfigError."""
        self._name = name
        self._disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        self._lock = threading.Lock()
        self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._registrations: list[Any] = []
        try:
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": ucx_error_mode})
        except Exception as error:
            raise ConfigError(f"transport.ucx_tls: UCX does not start with it on this machine: {error}", field="transport.ucx_tls") from None

    def register(self, arena: Arena) -> None:
        with self._lock, self._typed_errors("registration"):
            self._registrations.append(self._agent.register_memory([(arena.ctypes.data, arena.nbytes, 0, "")], "DRAM"))

    def metadata(self) -> bytes:
        with self._lock:
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def add(self, peer: str, metadata: bytes) -> None:
        with self._lock, self._typed_errors(peer):
            self._check_open()
            self._agent.add_remote_agent(metadata)

    def remove(self, peer: str) -> None:
        """Works on a dead peer too. Does not cut off what is in flight: UCX lets that finish."""
        with self._lock:
            if self._agent is not None:
                try:
                    self._agent.remove_remote_agent(peer)
                except Exception as error:
                    logger.warning("%s: %s could not be removed: %s", self._name, peer, error)

    def post(self, direction: Direction, peer: str, local: Descriptors, remote: Descriptors, deadline: float) -> Posted:
        """Start a transfer. With CMA the copy is over when this returns; the GIL is released while it runs."""
        with held(self._lock, deadline), self._typed_errors(peer):
            self._check_open()
            sides = [self._agent.get_xfer_descs(side, "DRAM") for side in (local, remote)]
            handle = self._agent.initialize_xfer(direction.upper(), *sides, peer)
            try:
                posted = Posted(handle, peer, is_over=False)
                self._take(posted, self._agent.transfer(handle))
                return posted
            except BaseException:
                self._release(handle)
                raise

    def wait(self, posted: Posted, deadline: float) -> None:
        """Until it is over. Raises TransferTimeout while it is not, PeerGone or TransferFailed when it is."""
        pause = _FIRST_PAUSE_S
        while not posted.is_over:
            time.sleep(min(pause, remaining(deadline)))
            pause = min(2 * pause, _LAST_PAUSE_S)
            with held(self._lock, deadline):
                self._check(posted)

    def has_settled(self, posted: Posted) -> bool:
        """One look at a transfer whose outcome no longer matters."""
        with self._lock:
            with suppress(TransferFailed):
                self._check(posted)
            return posted.is_over

    def release(self, posted: Posted) -> None:
        with self._lock:
            self._release(posted.handle)

    def progress(self) -> None:
        with self._lock:
            if self._agent is not None:
                self._agent.get_new_notifs()

    def close(self) -> None:
        """Idempotent. Peers have been removed."""
        with self._lock:
            for registration in self._registrations:
                self._agent.deregister_memory(registration)
            self._registrations.clear()
            self._agent = None

    def _check(self, posted: Posted) -> None:
        try:
            with self._typed_errors(posted.peer):
                self._check_open()
                self._take(posted, self._agent.check_xfer_state(posted.handle))
        except TransferFailed:
            posted.is_over = True
            raise

    def _take(self, posted: Posted, state: str) -> None:
        posted.is_over = state != "PROC"
        if state not in ("PROC", "DONE"):
            raise TransferFailed(f"{posted.peer}: the transfer ended in state {state}")

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except Exception as error:
            logger.warning("%s: a transfer could not be cancelled: %s", self._name, error)

    def _check_open(self) -> None:
        if self._agent is None:
            raise TransferFailed(f"{self._name} is closed")

    @contextmanager
    def _typed_errors(self, peer: str) -> Iterator[None]:
        """nixl's exceptions have no ancestor of their own but a name that begins with nixl."""
        try:
            yield
        except self._disconnected:
            raise PeerGone(f"{peer} has disconnected") from None
        except Exception as error:
            if not type(error).__name__.startswith("nixl"):
                raise
            raise TransferFailed(f"{peer}: {error}") from None


def descriptors(addresses: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Descriptors:
    return np.stack([addresses, lengths, np.zeros_like(lengths)], axis=1).astype(np.uint64)
