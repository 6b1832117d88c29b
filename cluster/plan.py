"""What runs where: turns a HeadraceConfig into one specification for each process. Pure; knows nothing of Ray.

Invariant: a plan holds everything that the controller needs, so a restarted controller rebuilds its state from it and the names of running actors.
"""

from pathlib import Path

import msgspec

from cluster.config import DeadlineEntry, HeadraceConfig, NodeEntry, WorkerEntry, worker_engine
from cluster.programs import Programs
from engine.config import EngineConfig
from kvstore.config import StoreNodeConfig
from kvstore.layout import BlockLayout
from protocol.errors import ConfigError
from router.config import RouterProcessConfig
from worker.config import WorkerConfig

NAMESPACE = "headrace"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine. `path`: a folder with config.json, model.safetensors and tokenizer.json."""

    path: str
    revision: str
    layout: BlockLayout


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets of one run and where Redis is; drawn by the launcher, never logged."""

    redis_url: str
    token: str
    transport_secret: str


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is the actor's: "store:node-a", "worker:prefill-0". `program`: "module:Class" (cluster.programs). `config`: its JSON settings."""

    name: str
    node: str
    program: str
    config: bytes
    log_path: str
    log_level: str
    cores: tuple[int, ...] = ()
    threads: int = 1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    processes: tuple[ProcessSpec, ...]
    deadlines: DeadlineEntry
    log_path: str
    log_level: str

    def node_names(self) -> list[str]:
        return list(dict.fromkeys(process.node for process in self.processes))

    def of_node(self, node: str) -> list[ProcessSpec]:
        return [process for process in self.processes if process.node == node]


def make_plan(config: HeadraceConfig, model: Model, access: Access, programs: Programs, log_folder: Path) -> Plan:
    check_fits(config, model.layout)
    processes: list[ProcessSpec] = []
    for node in config.nodes:
        processes.append(_store(config, node, model, access, programs, log_folder))
        processes.extend(_worker(config, node, worker, model, access, programs, log_folder) for worker in node.workers)
    return Plan(
        cluster=config.cluster,
        processes=tuple(processes),
        deadlines=config.deadlines,
        log_path=str(log_folder / "controller.log"),
        log_level=config.log_level,
    )


def router_settings(config: HeadraceConfig, model: Model, access: Access, log_folder: Path, http_port: int) -> RouterProcessConfig:
    return RouterProcessConfig(
        cluster=config.cluster,
        name="router-0",
        redis_url=access.redis_url,
        token=access.token,
        model_path=model.path,
        model_name=config.model_name,
        max_context_tokens=min(engine.max_context_tokens for engine in _engines(config)),
        router=msgspec.structs.replace(config.router, http_port=http_port),
        log_path=str(log_folder / "router.log"),
        log_level=config.log_level,
    )


def check_fits(config: HeadraceConfig, layout: BlockLayout) -> None:
    """Raises ConfigError unless every pool and every store holds at least one context of the longest length."""
    for engine in _engines(config):
        needed = -(-engine.max_context_tokens // engine.block_tokens) * layout.block_bytes
        pools = {"engine.kv_cache_bytes": engine.kv_cache_bytes, "store.capacity_bytes": config.store.capacity_bytes}
        for field, size in pools.items():
            if size < needed:
                raise ConfigError(f"{field}: {size} bytes do not hold one context of {engine.max_context_tokens} tokens, which takes {needed}", field=field)


def _engines(config: HeadraceConfig) -> list[EngineConfig]:
    return [worker_engine(config, worker) for node in config.nodes for worker in node.workers]


def _store(config: HeadraceConfig, node: NodeEntry, model: Model, access: Access, programs: Programs, log_folder: Path) -> ProcessSpec:
    cores = node.store_cores or tuple(sorted({core for worker in node.workers for core in worker.cores}))
    log_path = str(log_folder / f"store-{node.name}.log")
    settings = StoreNodeConfig(
        cluster=config.cluster,
        name=node.name,
        node=node.name,
        redis_url=access.redis_url,
        token=access.token,
        layout=model.layout,
        store=config.store,
        transport=msgspec.structs.replace(config.transport, secret=access.transport_secret),
        log_path=log_path,
    )
    return ProcessSpec(
        name=f"store:{node.name}",
        node=node.name,
        program=programs.store,
        config=msgspec.json.encode(settings),
        log_path=log_path,
        log_level=config.log_level,
        cores=cores,
    )


def _worker(config: HeadraceConfig, node: NodeEntry, worker: WorkerEntry, model: Model, access: Access, programs: Programs, log_folder: Path) -> ProcessSpec:
    engine = worker_engine(config, worker)
    log_path = str(log_folder / f"worker-{worker.name}.log")
    settings = WorkerConfig(
        cluster=config.cluster,
        name=worker.name,
        node=node.name,
        role=worker.role,
        redis_url=access.redis_url,
        token=access.token,
        model_path=model.path,
        model_name=config.model_name,
        revision=model.revision,
        engine=engine,
        store=config.store,
        transport=msgspec.structs.replace(config.transport, secret=access.transport_secret),
        cores=worker.cores,
        log_path=log_path,
    )
    return ProcessSpec(
        name=f"worker:{worker.name}",
        node=node.name,
        program=programs.worker,
        config=msgspec.json.encode(settings),
        log_path=log_path,
        log_level=config.log_level,
        cores=worker.cores,
        threads=engine.threads,
    )
