"""Bytes by NIXL over UCX: CMA (a copy by the kernel, at memcpy speed) within a machine, a network between machines. The only importer of nixl.

A process that made an agent may crash at interpreter exit: after `close`, end it with os._exit.
"""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import msgspec

from protocol.errors import ConfigError, PeerGone, TransferFailed
from transport.arena import no_arena, private_arena
from transport.config import TransportConfig
from transport.counters import Direction, TransferCounters
from transport.deadline import remaining
from transport.endpoint import Span
from transport.metadata import decode_metadata, encode_metadata
from transport.nixl_agent import NixlAgent, descriptors
from transport.nixl_staging import StagedReads
from transport.process import ProcessIdentity, ProcessWatch, identify, watch
from transport.spans import SpanTable, check_spans

# `nixl` picks the build for the CUDA found beside it and refuses when that one is missing; any installed build serves host memory.
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")
# UCX transports that copy by CMA, and those that leave the machine.
_ONE_SIDED = {"sm", "shm", "cma", "all"}
_RDMA = {"ib", "rc", "rc_v", "rc_x", "dc", "dc_x", "ud", "ud_v", "ud_x"}
_NETWORK = {"tcp", "all"} | _RDMA


class NixlAddress(msgspec.Struct, frozen=True, tag="nixl/1"):
    """`wire` must be equal on both sides: it decides which side has to make progress. `base`: the arena's address in its process."""

    name: str
    process: ProcessIdentity
    wire: str
    agent: bytes
    base: int
    arena_bytes: int


@dataclass(slots=True)
class _Peer:
    """`process` is None for a peer in another pid namespace."""

    address: NixlAddress
    process: ProcessWatch | None

    def check_alive(self) -> None:
        # Also the guard against a pid that is used again: CMA addresses its target by pid alone.
        if self.process is not None and not self.process.is_alive():
            raise PeerGone(f"{self.address.name}: its process has ended")


class NixlEndpoint:
    def __init__(self, config: TransportConfig, name: str, arena_bytes: int) -> None:
        self._transports = _check_config(config)
        is_one_sided = bool(self._transports & _ONE_SIDED)
        self.name = name
        self.needs_progress = config.ucx_error_mode == "peer" or not is_one_sided
        self.writes_may_land_late = self.needs_progress
        self.counters = TransferCounters()
        self.arena = private_arena(arena_bytes)
        self._base = self.arena.ctypes.data
        self._peers: dict[str, _Peer] = {}
        self._peers_lock = threading.RLock()
        self._agent = NixlAgent(*_import_nixl(config), name, config.ucx_error_mode)
        self._agent.register(self.arena)
        self._wire = f"{config.ucx_tls} {config.ucx_error_mode}"
        address = NixlAddress(name=name, process=identify(os.getpid()), wire=self._wire, agent=self._agent.metadata(), base=self._base, arena_bytes=arena_bytes)
        self._metadata = encode_metadata(address)
        self._staged_reads = StagedReads(self._agent, self.arena) if self.needs_progress else None

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes) -> str:
        address = decode_metadata(metadata, NixlAddress)
        with self._peers_lock:
            known = self._peers.get(address.name)
            if known is None or known.address != address:
                self.disconnect(address.name)
                self._peers[address.name] = self._open_peer(address)
        return address.name

    def disconnect(self, peer: str) -> None:
        with self._peers_lock:
            target = self._peers.pop(peer, None)
            if target is not None:
                self._agent.remove(peer)
                if target.process is not None:
                    target.process.close()

    def write(self, peer: str, spans: Sequence[Span], deadline: float) -> None:
        self._move("write", peer, spans, deadline)

    def read(self, peer: str, spans: Sequence[Span], deadline: float) -> None:
        self._move("read", peer, spans, deadline)

    def progress(self) -> None:
        """Moves what peers have asked of this side. Notifications are not used: the control channel tells what has been committed."""
        self._agent.progress()

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        if self._staged_reads is not None:
            self._staged_reads.close()
            self._staged_reads = None
        self._agent.close()
        self.arena = no_arena()

    def _open_peer(self, address: NixlAddress) -> _Peer:
        if address.wire != self._wire:
            raise TransferFailed(f"{address.name} speaks UCX {address.wire!r}, {self.name} speaks {self._wire!r}")
        process = watch(address.process)
        if process is None and not self.needs_progress and not self._transports & _RDMA:
            raise TransferFailed(f"{address.name} is on another machine or in another pid namespace, which {self._wire!r} does not reach")
        try:
            self._agent.add(address.name, address.agent)
        except BaseException:
            if process is not None:
                process.close()
            raise
        return _Peer(address, process)

    def _move(self, direction: Direction, peer: str, spans: Sequence[Span], deadline: float) -> None:
        target = self._peers.get(peer)
        if target is None:
            raise PeerGone(f"{peer} is not connected")
        table = check_spans(spans, self.arena.nbytes, target.address.arena_bytes)
        try:
            with self.counters.measure(direction, int(table[:, 2].sum())):
                remaining(deadline)
                target.check_alive()
                if len(table):
                    self._run(direction, target, table, deadline)
        except PeerGone:
            self._drop(target)
            raise

    def _run(self, direction: Direction, target: _Peer, table: SpanTable, deadline: float) -> None:
        address = target.address
        if direction == "read" and self._staged_reads is not None:
            self._staged_reads.read(address.name, table, address.base, deadline)
            return
        local, remote, length = table.T
        posted = self._agent.post(direction, address.name, descriptors(self._base + local, length), descriptors(address.base + remote, length), deadline)
        try:
            self._agent.wait(posted, deadline)
        finally:
            self._agent.release(posted)

    def _drop(self, target: _Peer) -> None:
        """Disconnect a peer that is gone, unless its successor has taken its name."""
        with self._peers_lock:
            if self._peers.get(target.address.name) is target:
                self.disconnect(target.address.name)


def _check_config(config: TransportConfig) -> set[str]:
    """The UCX transports of the config. Raises ConfigError for what UCX answers with a crash."""
    transports = {transport.strip() for transport in config.ucx_tls.split(",")}
    if not all(transport.replace("_", "").isalnum() for transport in transports):
        raise ConfigError(f"transport.ucx_tls={config.ucx_tls!r}: name the transports to use, separated by commas", field="transport.ucx_tls")
    if config.ucx_error_mode not in ("none", "peer"):
        raise ConfigError(f"transport.ucx_error_mode={config.ucx_error_mode!r} is neither none nor peer", field="transport.ucx_error_mode")
    if config.ucx_error_mode == "peer" and not transports & _NETWORK:
        raise ConfigError("transport.ucx_error_mode=peer needs a network in transport.ucx_tls, e.g. tcp", field="transport.ucx_error_mode")
    return transports


def _import_nixl(config: TransportConfig) -> tuple[ModuleType, ModuleType]:
    """`_api` and `_bindings` of the installed build. UCX and NIXL read their settings from the environment only; log levels that the user set stand."""
    os.environ["UCX_TLS"] = config.ucx_tls
    os.environ["UCX_NET_DEVICES"] = config.ucx_net_devices  # by default UCX would listen on every network of the machine
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # its errors arrive here as exceptions
    raise_exceptions = logging.raiseExceptions  # which nixl switches off for the whole process
    reasons = []
    for package in _PACKAGES:
        try:
            return import_module(f"{package}._api"), import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(f"{package}: {error}")
        finally:
            logging.raiseExceptions = raise_exceptions
    raise ConfigError(f"transport.backend=nixl: no build of nixl can be imported ({'; '.join(reasons)})", field="transport.backend")
