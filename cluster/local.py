"""Starts and stops a whole cluster from one process: `with Cluster(config) as cluster: ...`. Owns the run folder; the work is done by cluster.host,
which runs below cluster.sentinel.

Imports neither Ray nor torch. Invariant: after `stop`, or when this process is gone, no process, port, socket, folder or shared memory of the cluster is left.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from cluster import sentinel
from cluster.config import HeadraceConfig
from cluster.footprint import Footprint, sweep
from cluster.logs import new_log_folder, open_log
from cluster.model import locate_model
from cluster.plan import Model
from cluster.programs import Programs
from engine.checkpoint import silent
from engine.gguf_conversion import Progress
from protocol.errors import ConfigError, Unavailable, error_from_code

_PREFIX = "headrace-"
_CALL_S = 15.0
_EXIT_S = 5.0


class Cluster:
    """`progress` hears of stages: of the model, then redis, router, ray, processes, connections. `log_folder`: a fresh one below `cache_dir` unless given.
    `model` and `programs` replace the real ones in tests. Not for use from several threads at once."""

    def __init__(
        self,
        config: HeadraceConfig,
        *,
        progress: Progress = silent,
        log_folder: Path | None = None,
        model: Model | None = None,
        programs: Programs | None = None,
    ) -> None:
        self.config = config
        self.url = ""
        self.redis_url = ""  # holds the password: never log it
        self.token = ""
        self._progress = progress
        self._model = model
        self._programs = programs or Programs()
        self.log_folder = log_folder or new_log_folder(Path(config.cache_dir).expanduser(), config.cluster)
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._received = b""
        self.footprint: Footprint | None = None
        self.left_behind: list[str] = []  # what `stop` had to kill or remove because the processes did not

    def __enter__(self) -> "Cluster":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # ---- life -----------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when a request can succeed. Raises ConfigError or Unavailable, and then leaves nothing behind."""
        try:
            self._start()
        except BaseException:
            self.stop(drain_s=0)
            raise

    def stop(self, drain_s: float | None = None) -> None:
        """Running requests get `drain_s` (default: the config's) to finish. Idempotent."""
        process, footprint = self._sentinel, self.footprint
        if process is None or footprint is None:
            return
        self._sentinel = None
        footprint.add_tree(process.pid)
        deadlines = self.config.deadlines
        with contextlib.suppress(OSError, Unavailable):
            self._send({"call": "stop", "drain_s": deadlines.drain_s if drain_s is None else drain_s})
            self._receive("reply", time.monotonic() + deadlines.stop_s + _EXIT_S)
        if self._socket is not None:
            self._socket.close()
        try:
            process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.left_behind = footprint.clear()

    def wait(self) -> int:
        """Blocks until the host ends by itself, which it should not; returns its exit code."""
        if self._sentinel is None:
            raise Unavailable("the cluster does not run")
        return self._sentinel.wait()

    def _start(self) -> None:
        check_port_free(self.config.router.host, self.config.router.http_port)
        model = self._model or locate_model(self.config, self._progress)
        sweep(Path(tempfile.gettempdir()), _PREFIX)
        run_folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # 0700, and short: the sockets' paths below it must stay under 108 characters
        self.footprint = Footprint(run_folder)
        self._spawn(run_folder)
        order = {
            "config": self.config,
            "model": model,
            "programs": self._programs,
            "run_folder": str(run_folder),
            "log_folder": str(self.log_folder),
        }
        self._send(order)
        ready = self._receive("ready", time.monotonic() + 2 * self.config.deadlines.start_s)
        self.url, self.redis_url, self.token = ready["url"], ready["redis_url"], ready["token"]
        self.footprint.url = self.url

    def _spawn(self, run_folder: Path) -> None:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ) | (private_ray_environment(run_folder) if self.config.ray.address is None else {})
        if self._programs.python_path:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [self._programs.python_path, environment.get("PYTHONPATH", "")]))
        host = [sys.executable, "-P", "-m", "cluster.host", str(theirs.fileno())]
        with theirs, open_log(self.log_folder / "cluster.log") as output:
            self._sentinel = subprocess.Popen(
                [sys.executable, "-S", sentinel.__file__, str(run_folder), *host],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which then stops the host in order
            )
        self._socket = ours
        (run_folder / "sentinel.pid").write_text(str(self._sentinel.pid))
        self._received = b""

    # ---- ask ------------------------------------------------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """Of every process: host, redis, router, controller, "store:<name>", "worker:<name>"; as they run now (0: not known yet)."""
        return dict(self._call("pids"))

    def describe(self) -> list[dict[str, Any]]:
        """What the controller knows of each store and worker: name, node, pid, state, restarts, hang_kills, silent_s, program (its own status)."""
        return list(self._call("describe"))

    def _call(self, what: str) -> Any:
        self._send({"call": what})
        return self._receive("reply", time.monotonic() + _CALL_S)

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            raise Unavailable("the cluster does not run")
        try:
            self._socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            raise Unavailable(f"the cluster's host process is gone; see {self.log_folder}") from None

    def _receive(self, key: str, deadline: float) -> Any:
        """The next message with `key`; stages on the way go to `progress`. Raises the error that the host sent instead."""
        while True:
            message = self._next_message(deadline)
            if "stage" in message:
                self._progress(message["stage"], message["done"], message["total"])
            elif "failed" in message or "error" in message:
                error = message.get("failed") or message["error"]
                raise error_from_code(error["code"], error["message"])
            elif key in message:
                return message[key]

    def _next_message(self, deadline: float) -> dict[str, Any]:
        assert self._socket is not None
        while b"\n" not in self._received:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                piece = self._socket.recv(65536)
            except TimeoutError:
                raise Unavailable(f"the cluster's host process did not answer in time; see {self.log_folder}") from None
            if not piece:
                raise Unavailable(f"the cluster's host process is gone; see {self.log_folder}")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = msgspec.json.decode(line)
        return message


def check_port_free(host: str, port: int) -> None:
    """Raises ConfigError when something listens on the port already. Port 0 is any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"router.http_port: {host}:{port} is not free ({error.strerror}); choose another, or 0 for any", field="router.http_port"
            ) from None


def private_ray_environment(run_folder: Path) -> dict[str, str]:
    """What Ray reads from the environment: no usage reports, an access token of this run alone in a private file, loopback only."""
    token = run_folder / "ray.token"
    descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    # Without the last one Ray takes 127.0.0.1 for "an address that others can reach" and listens on every network.
    return {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
