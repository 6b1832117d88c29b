"""Which process a peer is, and whether it still lives. Invariant: a pid alone is never an identity; a start time goes with it, in one pid namespace."""

import os
import select
from pathlib import Path

import msgspec

from protocol.errors import PeerGone


class ProcessIdentity(msgspec.Struct, frozen=True):
    """`namespace` names one pid namespace of one boot of one machine: within it two processes can see, map and copy each other's memory."""

    namespace: str
    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessIdentity:
    """A running process of this pid namespace."""
    return ProcessIdentity(namespace=_namespace(), pid=pid, start_ticks=_start_ticks(pid))


class ProcessWatch:
    """Tells at no cost whether a process of this pid namespace has ended; a stopped process lives."""

    def __init__(self, identity: ProcessIdentity) -> None:
        """Raises PeerGone when the process has ended, even if its pid is used again."""
        try:
            self._pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            raise PeerGone(f"process {identity.pid} has ended") from None
        try:
            # In this order: the pidfd pins what start_ticks is then compared with.
            is_same = _start_ticks(identity.pid) == identity.start_ticks
        except OSError:
            is_same = False
        if not is_same or not self.is_alive():
            self.close()
            raise PeerGone(f"process {identity.pid} has ended")

    def is_alive(self) -> bool:
        """False once closed, too."""
        if self._pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def watch(identity: ProcessIdentity) -> ProcessWatch | None:
    """None for a process that cannot be seen from here: another machine or another container. Raises PeerGone."""
    return ProcessWatch(identity) if identity.namespace == _namespace() else None


def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _start_ticks(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat; the command name before it may hold spaces and parentheses."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
