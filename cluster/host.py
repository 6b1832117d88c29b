"""The process that hosts one cluster for its launcher: Redis, Ray with the controller, the router. Started by cluster.local as `python -m cluster.host FD`.

One JSON message a line over the socket FD: first the order, then stages and `ready` or `failed`, then one reply for each call.
Invariant: when the launcher is gone, however it ended, the host stops the cluster and leaves nothing behind. When the host itself is killed, cluster.sentinel,
which started it, does so.
"""

import asyncio
import contextlib
import http.client
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from cluster.config import HeadraceConfig
from cluster.footprint import Footprint
from cluster.logs import log_to
from cluster.plan import Access, Model, Plan, make_plan, router_settings
from cluster.programs import Programs
from cluster.redis_server import RedisServer
from cluster.supervised import Supervised
from protocol.errors import HeadraceError, Unavailable

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_CALL_S = 10.0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    config: HeadraceConfig
    model: Model
    programs: Programs
    run_folder: str
    log_folder: str


class Host:
    def __init__(self, order: Order, tell: Callable[[dict[str, Any]], None]) -> None:
        self._config = order.config
        self._order = order
        self._tell = tell
        self._run_folder = Path(order.run_folder)
        self._log_folder = Path(order.log_folder)
        self._redis = RedisServer(order.config.redis, self._run_folder, self._log_folder / "redis.log")
        self._access = Access(redis_url=self._redis.url, token=secrets.token_hex(24), transport_secret=secrets.token_hex(24))
        self._router = Supervised("router", self._router_command, self._router_ready, self._log_folder / "router.log", order.config.deadlines.start_s)
        self._ray: Any = None
        # Ray's processes die with the thread that started them, so this one lives as long as the process.
        self._ray_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        self.url = ""

    # ---- start ----------------------------------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        plan = make_plan(self._config, self._order.model, self._access, self._order.programs, self._log_folder)
        self._stage("redis", 0, 1)
        await self._redis.start()
        self._stage("redis", 1, 1)
        self._write_router_settings(self._config.router.http_port)
        self._stage("router", 0, 1)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._start_router())
                tasks.create_task(self._start_processes(plan))
        except* HeadraceError as errors:
            raise errors.exceptions[0] from None
        await self._wait_complete(plan)
        return {"url": self.url, "redis_url": self._redis.url, "token": self._access.token}

    async def _start_router(self) -> None:
        await self._router.start()
        self._stage("router", 1, 1)

    async def _start_processes(self, plan: Plan) -> None:
        loop = asyncio.get_running_loop()
        self._stage("ray", 0, 1)
        await loop.run_in_executor(self._ray_thread, self._start_ray)
        self._stage("ray", 1, 1)
        names = [process.name for process in plan.processes]
        self._stage("processes", 0, len(names))
        await asyncio.to_thread(self._ray.start_controller, plan)
        ready = [asyncio.ensure_future(self._wait_ready(name)) for name in names]
        try:
            for count, waiting in enumerate(asyncio.as_completed(ready), 1):
                await waiting
                self._stage("processes", count, len(names))
        finally:
            for task in ready:
                task.cancel()

    def _start_ray(self) -> None:
        from cluster.ray_runtime import RayRuntime

        self._ray = RayRuntime(self._config.ray, self._config.cluster, self._run_folder)
        self._ray.start()

    async def _wait_ready(self, name: str) -> None:
        start_s = self._config.deadlines.start_s
        reason = await asyncio.to_thread(lambda: self._ray.call("wait_ready", name, start_s, timeout_s=start_s + _CALL_S))
        if reason:
            raise Unavailable(reason, stage="start")

    async def _wait_complete(self, plan: Plan) -> None:
        """Until the router itself sees every store and a healthy connection to every worker: only then requests go where the policy says."""
        deadline = asyncio.get_running_loop().time() + self._config.deadlines.start_s
        expected = {process.name for process in plan.processes}
        self._stage("connections", 0, len(expected))
        while missing := expected - await asyncio.to_thread(_seen_by_router, self.url):
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"the router does not see {', '.join(sorted(missing))}; see {self._log_folder}", stage="connections")
            await asyncio.sleep(_LOOK_S)
        self._stage("connections", len(expected), len(expected))

    def _stage(self, name: str, done: int, total: int) -> None:
        log.info("stage %s: %d of %d", name, done, total)
        self._tell({"stage": name, "done": done, "total": total})

    # ---- router ---------------------------------------------------------------------------------------------------------------------

    def _router_command(self) -> list[str]:
        return [sys.executable, "-P", "-m", self._order.programs.router_module, str(self._run_folder / "router.json")]

    def _write_router_settings(self, http_port: int) -> None:
        settings = router_settings(self._config, self._order.model, self._access, self._log_folder, http_port)
        descriptor = os.open(self._run_folder / "router.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(settings))

    async def _router_ready(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            word, _, url = line.decode(errors="replace").strip().partition(" ")
            if word == "ready":
                self.url = url
                self._write_router_settings(urlsplit(url).port or 0)  # a restarted router takes the same port
                return
        await asyncio.Event().wait()  # it closed its output: its end is what counts

    # ---- calls ----------------------------------------------------------------------------------------------------------------------

    async def answer(self, call: str) -> Any:
        if call == "describe":
            return await asyncio.to_thread(lambda: self._ray.call("describe", timeout_s=_CALL_S))
        if call == "pids":
            return await self._pids()
        raise Unavailable(f"no call {call!r}")

    async def _pids(self) -> dict[str, int]:
        members = await asyncio.to_thread(lambda: self._ray.call("describe", 2.0, timeout_s=_CALL_S))
        pids = {member["name"]: int(member["pid"]) for member in members}
        pids["controller"] = await asyncio.to_thread(self._ray.controller_pid)
        own = {"host": os.getpid(), "redis": self._redis.pid, "router": self._router.pid}
        return pids | {name: pid for name, pid in own.items() if pid is not None}

    # ---- end ------------------------------------------------------------------------------------------------------------------------

    async def stop(self, drain_s: float) -> None:
        """The router finishes first, then the processes; whatever does not end by itself is killed. Works from any half-started state."""
        footprint = Footprint(self._run_folder)
        footprint.add_tree(os.getpid())
        del footprint.processes[os.getpid()]
        try:
            async with asyncio.timeout(self._config.deadlines.stop_s):
                await self._router.stop(grace_s=drain_s + 1)
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._ray_thread, self._stop_ray, drain_s)
                await self._redis.stop()
        except TimeoutError:
            log.error("not stopped within %.0f s: killing the rest", self._config.deadlines.stop_s)
        await self._router.stop(grace_s=0)
        await self._redis.stop(grace_s=0)
        footprint.add_tree(os.getpid())
        footprint.processes.pop(os.getpid(), None)
        for line in await asyncio.to_thread(footprint.clear):
            log.info("ended at the last: %s", line)
        shutil.rmtree(self._run_folder, ignore_errors=True)

    def _stop_ray(self, drain_s: float) -> None:
        if self._ray is None:
            return
        try:
            self._ray.call("stop", drain_s, timeout_s=drain_s + 2 * _CALL_S)
        except HeadraceError as error:
            log.warning("stop: %s", error.message)
        self._ray.stop()


def _seen_by_router(url: str) -> set[str]:
    """Names of stores and healthy workers in the router's GET /cluster, as the plan names them; none while it does not answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=5)
    try:
        connection.request("GET", "/cluster")
        body = msgspec.json.decode(connection.getresponse().read())
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return set()
    finally:
        connection.close()
    return {f"worker:{worker['name']}" for worker in body["workers"] if worker["healthy"]} | {f"store:{store['name']}" for store in body["stores"]}


async def serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=16 * 1024**2)

    def tell(message: dict[str, Any]) -> None:
        writer.write(msgspec.json.encode(message) + b"\n")

    order = msgspec.json.decode(await reader.readline(), type=Order)
    log_to(str(Path(order.log_folder) / "cluster.log"), order.config.log_level)
    host = Host(order, tell)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, reader.feed_eof)
    drain_s = await _until_told_to_stop(host, reader, tell)
    await host.stop(drain_s)
    tell({"reply": "stopped"})
    with contextlib.suppress(OSError):
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def _until_told_to_stop(host: Host, reader: asyncio.StreamReader, tell: Callable[[dict[str, Any]], None]) -> float:
    """Starts the cluster, then answers calls. Returns how long to drain: not at all when the launcher is gone or the start failed."""
    start = asyncio.create_task(host.start())
    line = asyncio.create_task(reader.readline())
    await asyncio.wait({start, line}, return_when=asyncio.FIRST_COMPLETED)
    if not start.done():  # told to stop, or the launcher is gone
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        return 0.0
    error = start.exception()
    if error is not None:
        log.error("start failed", exc_info=error)
        tell({"failed": _error_fields(error)})
        line.cancel()
        return 0.0
    tell({"ready": start.result()})
    while text := await line:
        message = msgspec.json.decode(text)
        if message["call"] == "stop":
            return float(message["drain_s"])
        try:
            tell({"reply": await host.answer(message["call"])})
        except Exception as failure:
            log.exception("%s failed", message["call"])
            tell({"error": _error_fields(failure)})
        line = asyncio.create_task(reader.readline())
    log.warning("the launcher is gone: stopping")
    return 0.0


def _error_fields(error: BaseException) -> dict[str, str]:
    if isinstance(error, HeadraceError):
        return {"code": error.code, "message": error.message}
    return {"code": HeadraceError.code, "message": f"{type(error).__name__}: {error}"}


def main() -> None:
    os.umask(0o077)  # every file of every process of the cluster is private
    connection = socket.socket(fileno=int(sys.argv[1]))
    code = 1
    try:
        asyncio.run(serve(connection))
        code = 0
    except BaseException:
        log.exception("the host failed")
    finally:
        os._exit(code)  # Ray's own exit handlers have nothing left to do


if __name__ == "__main__":
    main()
