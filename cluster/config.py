"""The root of the one typed file: what a cluster is made of. Each layer's own settings lie in its folder; this file only joins them.

Knows nothing of files, the environment or the command line (cli.config reads those).
"""

from typing import Any

import msgspec

from engine.config import EngineConfig
from kvstore.config import StoreConfig
from router.config import RouterConfig
from transport.config import TransportConfig
from worker.config import Role


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process. `cores`: pin it to these, empty leaves it free; without `engine.threads` of its own it steps with as many threads as cores.
    `engine`: fields of EngineConfig that differ for this worker."""

    name: str
    role: Role
    cores: tuple[int, ...] = ()
    engine: dict[str, Any] = {}


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine, or one part of a machine: a store process and the workers beside it. `store_cores` empty: the cores of its workers."""

    name: str
    workers: tuple[WorkerEntry, ...] = ()
    store_cores: tuple[int, ...] = ()


class RedisEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`url` names a server that runs already; without one the cluster starts its own."""

    url: str | None = None
    max_memory_bytes: int = 64 * 1024**2


class RayEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`address` names a Ray cluster that runs already; without one the cluster starts its own. `logical_cpus`: of that own one; every process takes one."""

    address: str | None = None
    logical_cpus: int = 64
    object_store_bytes: int = 80 * 1024**2


class DeadlineEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`start_s`: until every process serves. `drain_s`: running requests may finish. `stop_s`: until the last process is killed, drain included.
    `hang_s`: a process that answers no status for so long is killed and started again. `watch_s`: between two looks at a process."""

    start_s: float = 120.0
    drain_s: float = 10.0
    stop_s: float = 30.0
    hang_s: float = 60.0
    watch_s: float = 5.0


class HeadraceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model`: a name of engine.checkpoint, a GGUF file or a Hugging Face folder. `cache_dir` holds models and logs."""

    cluster: str = "headrace"
    model: str = "smollm2-135m-instruct"
    served_model_name: str = ""  # empty: the model's own name
    nodes: tuple[NodeEntry, ...]
    engine: EngineConfig = EngineConfig()
    store: StoreConfig = StoreConfig()
    transport: TransportConfig = TransportConfig()
    router: RouterConfig = RouterConfig()
    redis: RedisEntry = RedisEntry()
    ray: RayEntry = RayEntry()
    deadlines: DeadlineEntry = DeadlineEntry()
    cache_dir: str = "~/.cache/headrace"
    log_level: str = "INFO"

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def worker_engine(config: HeadraceConfig, worker: WorkerEntry) -> EngineConfig:
    """The engine settings of one worker: the cluster's, with the worker's differences. Raises msgspec.ValidationError for a field of a wrong type."""
    fields = msgspec.to_builtins(config.engine)
    if worker.cores:
        fields["threads"] = len(worker.cores)
    return msgspec.convert(fields | worker.engine, EngineConfig)
