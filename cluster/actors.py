"""The body of one Ray actor: confines its process to cores and threads, then runs one program in it. Knows nothing of what the program does.

Invariant: nothing that starts threads (torch above all) is imported before the process is confined.
"""

import logging
import os
import threading
import time
from importlib import import_module
from typing import Any

import msgspec
import ray

from cluster.logs import log_to
from cluster.plan import ProcessSpec
from cluster.programs import Program

log = logging.getLogger(__name__)


class ProcessActor:
    """Answers `status` while the program starts, drains and stops: Ray runs its methods on several threads.
    The program is loaded on a thread of its own; when it fails to start, the process ends after `backoff_s`, and Ray starts it again."""

    def __init__(self, spec_json: bytes, backoff_s: float = 2.0) -> None:
        self._spec = msgspec.json.decode(spec_json, type=ProcessSpec)
        self._backoff_s = backoff_s
        self._machine = ray.get_runtime_context().get_node_id()
        self._state = "starting"
        self._since = time.time()
        self._error = ""
        self._program: Program | None = None
        self._settled = threading.Event()
        confine(self._spec.cores, self._spec.threads)
        log_to(self._spec.log_path, self._spec.log_level)
        threading.Thread(target=self._run, name="program-start", daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def ready(self) -> str:
        """Waits until the program serves; the reason when it does not."""
        self._settled.wait()
        return self._error

    def status(self) -> dict[str, Any]:
        own = {"name": self._spec.name, "node": self._spec.node, "pid": os.getpid(), "machine": self._machine}
        own |= {"state": self._state, "since": self._since}
        serving = self._program is not None and self._state in ("serving", "draining")
        return own | {"program": self._program.status() if serving and self._program is not None else {}}

    def drain(self, deadline_s: float) -> None:
        self._settled.wait(deadline_s)
        if self._program is not None and self._state == "serving":
            self._state = "draining"
            self._program.drain(deadline_s)

    def stop(self) -> None:
        """Cleans up; the controller ends the process right after, without the interpreter's own exit, which NIXL may not survive."""
        self._state = "stopped"
        if self._program is not None:
            self._program.stop()
        logging.shutdown()

    def _run(self) -> None:
        try:
            module, _, attribute = self._spec.program.partition(":")
            program: Program = getattr(import_module(module), attribute)(self._spec.config)
            self._program = program
            program.start()
        except BaseException as error:
            log.exception("%s did not start", self._spec.name)
            self._error = f"{type(error).__name__}: {error}"
            self._settled.set()
            time.sleep(self._backoff_s)
            os._exit(1)
        if self._state == "starting":
            self._state = "serving"
        log.info("%s serves after %.1f s", self._spec.name, time.time() - self._since)
        self._settled.set()


def confine(cores: tuple[int, ...], threads: int) -> None:
    """Every thread of this process, those that Ray started too, to `cores`; `threads` for the numeric libraries loaded later."""
    for task in os.listdir("/proc/self/task") if cores else []:
        try:
            os.sched_setaffinity(int(task), cores)
        except ProcessLookupError:
            continue  # the thread ended meanwhile
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
