"""Does a backend work on this machine? Asked by moving 4 KiB between two fresh processes, siblings as workers are. Knows nothing of a cluster.

Also `python -m transport.probe passive|initiator`: the two processes. They take their input from stdin and end with it, by os._exit (see transport.nixl).
"""

import base64
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

import msgspec

from protocol.errors import HeadraceError
from transport.config import TransportConfig
from transport.endpoint import Span, open_endpoint
from transport.progress import ProgressLoop

_PROBE_BYTES = 4096
_TRANSFER_TIMEOUT_S = 5.0
_ROOT = Path(__file__).parents[1]
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class ProbeResult(NamedTuple):
    works: bool
    reason: str


class PassiveProcess:
    """A process that opens one endpoint and then sits in a blocking read until this side closes it, or ends. A context manager."""

    def __init__(self, config: TransportConfig, name: str, arena_bytes: int, timeout_s: float = 30.0) -> None:
        """Raises HeadraceError with the process's reason when it cannot open its endpoint."""
        self._process = _start("passive", config, name, str(arena_bytes))
        try:
            self.metadata = base64.b64decode(_answer(self._process, timeout_s))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        _stop(self._process)


def probe(config: TransportConfig, timeout_s: float = 30.0) -> ProbeResult:
    """Whether `config` works between two processes of this machine, and why not. Takes about three seconds for nixl; needs no endpoint of its own."""
    try:
        with PassiveProcess(config, "probe-passive", _PROBE_BYTES, timeout_s) as passive:
            initiator = _start("initiator", config, "probe-initiator", base64.b64encode(passive.metadata).decode())
            try:
                _answer(initiator, timeout_s)
            finally:
                _stop(initiator)
    except HeadraceError as error:
        return ProbeResult(False, f"{error.message}{_hint(config)}")
    return ProbeResult(True, f"{config.backend} moved {_PROBE_BYTES} bytes there and back")


def _hint(config: TransportConfig) -> str:
    """What most often forbids CMA."""
    if config.backend == "nixl" and _PTRACE_SCOPE.exists() and (scope := _PTRACE_SCOPE.read_text().strip()) != "0":
        return f"; kernel.yama.ptrace_scope is {scope}, which forbids CMA between siblings: set it to 0, or transport.backend to shm"
    return ""


def _start(role: str, config: TransportConfig, *arguments: str) -> subprocess.Popen[bytes]:
    """The config goes through stdin: it holds the secret."""
    process = subprocess.Popen([sys.executable, "-m", "transport.probe", role, *arguments], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    return process


def _answer(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """The line after `ok`. Raises HeadraceError with the line after `error`, or for silence."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise HeadraceError(f"no answer within {timeout_s:g} s")
    kind, _, text = process.stdout.readline().decode().strip().partition(" ")
    if kind != "ok":
        raise HeadraceError(text or f"the process ended with status {process.wait(timeout_s)}")
    return text


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.close()
        process.wait(5.0)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        process.kill()
        process.wait()
    finally:
        process.stdout.close()


def _serve_passive(config: TransportConfig, answers: IO[str], name: str, arena_bytes: str) -> None:
    endpoint = open_endpoint(config, name, int(arena_bytes))
    loop = ProgressLoop(endpoint)
    with loop.live():
        print("ok", base64.b64encode(endpoint.metadata).decode(), file=answers, flush=True)
        sys.stdin.read()
    loop.close()
    endpoint.close()


def _run_initiator(config: TransportConfig, answers: IO[str], name: str, metadata: str) -> None:
    endpoint = open_endpoint(config, name, 2 * _PROBE_BYTES)
    peer = endpoint.connect(base64.b64decode(metadata))
    sent, received = endpoint.arena[:_PROBE_BYTES], endpoint.arena[_PROBE_BYTES:]
    sent[:] = 0xA5
    deadline = time.monotonic() + _TRANSFER_TIMEOUT_S
    endpoint.write(peer, [Span(0, 0, _PROBE_BYTES)], deadline)
    endpoint.read(peer, [Span(_PROBE_BYTES, 0, _PROBE_BYTES)], deadline)
    if not (sent == received).all():
        raise HeadraceError("the bytes that came back are other ones")
    print("ok", file=answers, flush=True)
    endpoint.close()


def _main(role: str, *arguments: str) -> None:
    # Libraries print to stdout as they please: keep it for the answer alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = msgspec.json.decode(sys.stdin.readline(), type=TransportConfig)
    try:
        {"passive": _serve_passive, "initiator": _run_initiator}[role](config, answers, *arguments)
    except Exception as error:
        print("error", str(error).replace("\n", " "), file=answers, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
