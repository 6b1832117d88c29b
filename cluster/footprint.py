"""What a running cluster occupies on this machine: processes, sockets' folder, port, shared memory. Used to end what is left and to prove that nothing is.

Invariant: a process is named by pid and start time, so a reused pid is never taken for ours.
"""

import contextlib
import os
import re
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

_SHARED_MEMORY = re.compile(r"(/dev/shm/[^\s]+)$")


@dataclass
class Footprint:
    run_folder: Path
    url: str = ""
    processes: dict[int, tuple[float, str]] = field(default_factory=dict)  # pid -> (start time, name)
    shared_memory: set[Path] = field(default_factory=set)

    def add_tree(self, root_pid: int) -> None:
        """Remember `root_pid` and all its descendants as they are now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(root_pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.processes[process.pid] = (process.create_time(), process.name())
                    self.shared_memory |= _mapped_shared_memory(process.pid)

    def running(self) -> list[psutil.Process]:
        found = []
        for pid, (started, _) in self.processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def remaining(self) -> list[str]:
        """One line for everything that is still there."""
        left = [f"process {process.pid} {self.processes[process.pid][1]}" for process in self.running()]
        left += [f"shared memory {path}" for path in sorted(self.shared_memory) if path.exists()]
        left += [f"folder {self.run_folder}"] if self.run_folder.exists() else []
        left += [f"port of {self.url}"] if self.url and _answers(self.url) else []
        return left

    def clear(self) -> list[str]:
        """Kill and remove whatever is left; returns what that was."""
        left = self.remaining()
        running = self.running()
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(running, timeout=5)
        for path in self.shared_memory:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.run_folder, ignore_errors=True)
        return left


def _mapped_shared_memory(pid: int) -> set[Path]:
    found: set[Path] = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            match = _SHARED_MEMORY.search(line)  # a segment whose name is gone already ends in "(deleted)"
            if match is not None:
                found.add(Path(match.group(1)))
    return found


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((parts.hostname or "127.0.0.1", parts.port or 80)) == 0


def sweep(parent: Path, prefix: str) -> None:
    """Remove run folders of this user whose sentinel is gone (it was killed with all the rest)."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError, ValueError):
            if folder.stat().st_uid == os.getuid() and not psutil.pid_exists(int((folder / "sentinel.pid").read_text())):
                shutil.rmtree(folder, ignore_errors=True)
