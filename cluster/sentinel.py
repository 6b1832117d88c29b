"""Outlives the host of a cluster and ends whatever it left: `python sentinel.py RUN_FOLDER PROGRAM ARGUMENT...`.

Stands alone (standard library only). Every orphan below it becomes its child, so it finds all processes of the cluster without knowing any of them.
Invariant: when it ends, no process of the cluster runs and RUN_FOLDER is gone. It sleeps in wait() until the host ends.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def main() -> None:
    run_folder, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    host = subprocess.Popen(command, close_fds=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: host.send_signal(signal.SIGTERM))
    code = _wait_for(host.pid)
    while pids := children():  # their own children become ours as they end
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for _ in pids:
            os.waitpid(-1, 0)
    shutil.rmtree(run_folder, ignore_errors=True)
    sys.exit(code)


def _wait_for(wanted: int) -> int:
    """The exit code of `wanted`; orphans that end meanwhile are reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == wanted:
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    main()
