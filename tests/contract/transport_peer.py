"""One process with one endpoint, driven by a test over a socket. While no command comes it blocks in `recv`: a passive side that runs no code.

Endpoints live in processes of their own because a process that made a NIXL agent must end with os._exit.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import msgspec
import numpy as np

import protocol.errors
from protocol.errors import HeadraceError
from transport.config import TransportConfig
from transport.counters import TransferCounters
from transport.endpoint import Span, open_endpoint
from transport.progress import ProgressLoop

Spans = list[tuple[int, int, int]]
ROOT = Path(__file__).parents[2]


class Peer:
    """The test's side. Every method runs in the process; errors come back typed."""

    def __init__(self, config: TransportConfig, name: str, arena_bytes: int) -> None:
        self.name = name
        self._pipe, theirs = Pipe()
        code = f"import sys; sys.path[:0] = {[str(ROOT), str(Path(__file__).parent)]!r}; import transport_peer; transport_peer.serve({theirs.fileno()})"
        self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._pipe.send((msgspec.json.encode(config), name, arena_bytes))
        self._metadata: bytes | None = None

    @property
    def metadata(self) -> bytes:
        if self._metadata is None:
            self._metadata = self._receive()
        return self._metadata

    def __getattr__(self, command: str):
        return lambda *arguments: (self.metadata, self.send(command, *arguments), self._receive())[2]

    def send(self, command: str, *arguments: object) -> None:
        """Start a command without waiting for its result."""
        self._pipe.send((command, arguments))

    def receive(self, timeout_s: float) -> object:
        """The result of the oldest command sent."""
        if not self._pipe.poll(timeout_s):
            raise AssertionError(f"{self.name} hangs")
        return self._receive()

    def _receive(self) -> object:
        kind, value = self._pipe.recv()
        if kind == "error":
            name, message = value
            raise (getattr(protocol.errors, name, None) or __builtins__[name])(message)
        return value

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    def stop(self) -> None:
        if self.process.poll() is None:
            self._pipe.send(("exit", ()))
            self.process.wait(20)
        self._pipe.close()


class Server:
    """The process's side: one method per command."""

    def __init__(self, config: TransportConfig, name: str, arena_bytes: int) -> None:
        self.before = snapshot()
        self.endpoint = open_endpoint(config, name, arena_bytes)
        self.loop = ProgressLoop(self.endpoint)
        if self.endpoint.needs_progress:
            self.loop.hold()

    def connect(self, metadata: bytes) -> str:
        return self.endpoint.connect(metadata)

    def disconnect(self, peer: str) -> None:
        self.endpoint.disconnect(peer)

    def write(self, peer: str, spans: Spans, timeout_s: float) -> None:
        self.endpoint.write(peer, [Span(*span) for span in spans], time.monotonic() + timeout_s)

    def read(self, peer: str, spans: Spans, timeout_s: float) -> None:
        self.endpoint.read(peer, [Span(*span) for span in spans], time.monotonic() + timeout_s)

    def repeat(self, direction: str, peer: str, spans: Spans, timeout_s: float) -> None:
        """Transfer until an error ends it."""
        deadline = time.monotonic() + timeout_s
        while True:
            getattr(self, direction)(peer, spans, deadline - time.monotonic())

    def write_in_threads(self, peer: str, per_thread: list[Spans], timeout_s: float) -> list[str]:
        """The errors of the threads that failed."""
        errors: list[str] = []

        def run(spans: Spans) -> None:
            try:
                self.write(peer, spans, timeout_s)
            except HeadraceError as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=run, args=(spans,)) for spans in per_thread]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def fill(self, seed: int) -> None:
        self.endpoint.arena[:] = content(seed, self.endpoint.arena.nbytes)

    def arena(self) -> bytes:
        return self.endpoint.arena.tobytes()

    def counters(self) -> dict[str, float]:
        fields = (field for field in TransferCounters.__dataclass_fields__ if not field.startswith("_"))
        return {field: getattr(self.endpoint.counters, field) for field in fields}

    def rounds(self) -> int:
        return self.loop.rounds

    def close(self) -> tuple[dict[str, int], dict[str, int]]:
        """What the process held before the endpoint was opened, and after it was closed."""
        self.loop.close()
        self.endpoint.close()
        self.endpoint.close()
        gc.collect()
        return self.before, snapshot()


def snapshot() -> dict[str, int]:
    """Threads and descriptors of this process by what they are; `anon_inode` and `socket` are told apart by kind alone."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{fd}").split("[")[0])
    kinds = {kind: links.count(kind) for kind in set(links)}
    return {**kinds, "threads": threading.active_count()}


def content(seed: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def serve(fd: int) -> None:
    pipe = Connection(fd)
    config, name, arena_bytes = pipe.recv()
    try:
        server = Server(msgspec.json.decode(config, type=TransportConfig), name, arena_bytes)
        pipe.send(("ok", server.endpoint.metadata))
        while True:
            command, arguments = pipe.recv()
            if command == "exit":
                break
            try:
                pipe.send(("ok", getattr(server, command)(*arguments)))
            except Exception as error:
                pipe.send(("error", (type(error).__name__, str(error))))
    except EOFError:
        pass  # the test has ended
    except HeadraceError as error:
        pipe.send(("error", (type(error).__name__, str(error))))
    os._exit(0)
