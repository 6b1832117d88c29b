"""Arenas: zeroed, page-aligned memory that is resident from the start, so that the process never grows while it serves.

An arena is unmapped when the last view of it dies: an endpoint's `close` never pulls memory from under a view that its owner kept.
"""

import fcntl
import mmap
import os
import secrets
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from protocol.errors import ConfigError, PeerGone

Arena = npt.NDArray[np.uint8]

# linux/fcntl.h; absent from Python's fcntl: no one, the owner included, can shrink the file under a mapping (which would end in SIGBUS).
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4


def private_arena(num_bytes: int) -> Arena:
    """Anonymous private memory: the kind that CMA copies fastest. Raises ConfigError."""
    _check_size(num_bytes)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return _resident(mapping)


def no_arena() -> Arena:
    """What a closed endpoint has."""
    return np.empty(0, dtype=np.uint8)


class SharedArena:
    """Memory that peers of the same user map through /proc. It has no name in any file system, so even kill -9 leaves nothing behind.

    `token` is a part of the memfd's name: a peer that opened the wrong file, because a pid was used again, sees another one."""

    def __init__(self, num_bytes: int) -> None:
        _check_size(num_bytes)
        self.token = secrets.token_hex(16)
        self.fd = os.memfd_create(_memfd_name(self.token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        self.array = _resident(mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.array = no_arena()


def map_peer_arena(pid: int, fd: int, token: str, num_bytes: int) -> Arena:
    """The arena of another process of this user. Raises PeerGone unless it is the one that has `token`."""
    try:
        ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerGone(f"the arena of process {pid} cannot be opened: {error.strerror}") from None
    try:
        is_expected = _memfd_name(token) in os.readlink(f"/proc/self/fd/{ours}") and os.fstat(ours).st_size == num_bytes
        if not is_expected:
            raise PeerGone(f"process {pid} is another one by now")
        mapping = mmap.mmap(ours, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(ours)
    return np.frombuffer(mapping, dtype=np.uint8)


def _memfd_name(token: str) -> str:
    return f"headrace-{token}"


def _check_size(num_bytes: int) -> None:
    if num_bytes <= 0:
        raise ConfigError(f"an arena of {num_bytes} bytes", field="arena_bytes")


def _resident(mapping: mmap.mmap) -> Arena:
    with suppress(OSError):  # a kernel without transparent huge pages: the same memory in small pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    arena = np.frombuffer(mapping, dtype=np.uint8)
    arena[:: mmap.PAGESIZE] = 0
    return arena
