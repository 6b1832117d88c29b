"""Runs a program that dies with the process which started it, however that ends: `python tether.py PARENT_PID PROGRAM ARGUMENT...`.

Stands alone (standard library only), because it is started by path before anything else. Invariant: the program never outlives its parent.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the tether held
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
