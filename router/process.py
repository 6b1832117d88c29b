"""One router process: membership, HTTP server, announcement, orderly end. Owns their order; knows nothing of requests.

Invariant: after SIGTERM or SIGINT health says 503 at once, running requests have `drain_s`, and the process ends by itself.
"""

import asyncio
import logging
import signal
import socket
import time
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from redis.asyncio import Redis

from engine.tokenizer import Tokenizer
from protocol.errors import ConfigError, RegistryLost
from protocol.membership import Member, Registry, new_generation
from router.app import Service, build_app
from router.config import RouterProcessConfig
from router.life import Spine
from router.membership import Membership
from router.metrics import RouterMetrics
from router.openai import PromptTokenizer
from router.policies import new_policy
from router.prefix_index import PrefixIndex
from router.timeline import TimelineStore

log = logging.getLogger(__name__)


def load_config(path: Path) -> RouterProcessConfig:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RouterProcessConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def run(config: RouterProcessConfig) -> None:
    if config.log_path:
        logging.basicConfig(filename=config.log_path, level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    tokenizer = Tokenizer(Path(config.model_path))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, tokenizer))


def new_service(config: RouterProcessConfig, membership: Membership, tokenizer: PromptTokenizer) -> Service:
    metrics = RouterMetrics(config.model_name)
    metrics.watch(membership)
    policy = new_policy(config.router.policy, config.router)
    spine = Spine(config.router, membership, policy, PrefixIndex(), metrics)
    return Service(spine, tokenizer, config.model_name, config.max_context_tokens, TimelineStore(config.router.timelines), int(time.time()))


async def serve(config: RouterProcessConfig, tokenizer: PromptTokenizer) -> None:
    redis = Redis.from_url(config.redis_url, socket_timeout=2.0, socket_connect_timeout=2.0)
    registry = Registry(redis, config.cluster)
    membership = Membership(registry, config.name, config.token, config.router)
    service = new_service(config, membership, tokenizer)
    listener = _listen(config.router.host, config.router.http_port)
    address = f"{config.router.host}:{listener.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(build_app(service), http="httptools", ws="none", lifespan="off", access_log=False, log_config=None, server_header=False)
    )
    await membership.start()
    announcing = asyncio.create_task(_announce(registry, Member("router", config.name, new_generation(), address)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.01)
        _drain_on_signal(service, server, config.router.drain_s)
        print(f"ready http://{address}", flush=True)
        await serving
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        await membership.close()
        await redis.aclose()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.create_server((host, port), backlog=2048, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setblocking(False)
    return listener


def _drain_on_signal(service: Service, server: uvicorn.Server, drain_s: float) -> None:
    """Ours instead of uvicorn's, which would close the door to running streams."""
    draining: list[asyncio.Task[None]] = []

    def begin() -> None:
        if service.draining:
            server.should_exit = server.force_exit = True  # asked twice: now
        service.draining = True
        draining.append(asyncio.create_task(_drain(service, server, drain_s)))

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, begin)


async def _drain(service: Service, server: uvicorn.Server, drain_s: float) -> None:
    try:
        async with asyncio.timeout(drain_s):
            while service.running:
                await service.idle.wait()
    except TimeoutError:
        log.warning("%d requests were still running after %g s", service.running, drain_s)
        server.force_exit = True
    server.should_exit = True


async def _announce(registry: Registry, member: Member) -> None:
    """Stay in the registry; leave it at the end."""
    lost = False
    try:
        while True:
            try:
                await registry.announce(member)
                lost = False
            except RegistryLost as error:
                if not lost:
                    log.warning("cannot announce this router: %s", error)
                lost = True
            await asyncio.sleep(registry.ttl_s / 3)
    finally:
        try:
            await registry.withdraw(member)
        except RegistryLost:
            log.info("the registry will forget this router by itself")
