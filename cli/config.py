"""Reads the one typed file: YAML, then `--set a.b=c`, then the checks. Owns the words of every refusal; knows nothing of running clusters.

Invariant: a HeadraceConfig that `load_config` returns can start on this machine as far as one can tell without starting it.
"""

import difflib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.inspect import DictType, StructType, Type, UnionType, VarTupleType, type_info

from cluster.config import HeadraceConfig, NodeEntry, WorkerEntry, worker_engine
from engine.config import EngineConfig, LoraConfig
from kvstore.codec import CODECS
from kvstore.eviction import EVICTION
from protocol.errors import ConfigError
from protocol.request import ADAPTER_NAME
from router.policies import POLICIES
from transport.endpoint import TRANSPORTS

_ROOT = type_info(HeadraceConfig)
_ENGINE = type_info(EngineConfig)


def load_config(path: Path | str, settings: Sequence[str] = (), cores: Iterable[int] | None = None) -> HeadraceConfig:
    """The file at `path` with `settings` ("a.b=c") on top. `cores`: this machine's, for the checks. Raises ConfigError, which names the full path."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not text") from None
    return parse(text, settings, source=str(path), cores=cores)


def parse(text: str, settings: Sequence[str] = (), source: str = "config", cores: Iterable[int] | None = None) -> HeadraceConfig:
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping at the top")
    for setting in settings:
        _apply(tree, setting)
    _refuse_unknown(tree, _ROOT, "")
    for path, overrides in _engine_overrides(tree):
        _refuse_unknown(overrides, _ENGINE, path)
    config: HeadraceConfig = _convert(tree)
    _check(config, set(os.sched_getaffinity(0) if cores is None else cores))
    return config


# ---- --set ------------------------------------------------------------------------------------------------------------------------


def _apply(tree: dict[str, Any], setting: str) -> None:
    path, equals, value = setting.partition("=")
    keys = re.sub(r"\[(\d+)\]", r".\1", path.strip()).split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {setting}: expected a.b=value")
    place: Any = tree
    kind: Type | None = _ROOT
    for index, key in enumerate(keys):
        where = ".".join(keys[:index])
        kind = _child(kind, key, where)
        last = index == len(keys) - 1
        if isinstance(place, list):
            if not key.isdigit() or int(key) >= len(place):
                raise ConfigError(f"{path}: {where} has no entry {key}; it has {len(place)}", field=path)
        elif not isinstance(place, dict):
            raise ConfigError(f"{path}: {where} holds no fields", field=path)
        slot: Any = int(key) if isinstance(place, list) else key
        if last:
            place[slot] = _typed(value, kind)
        else:
            place = place[slot] if isinstance(place, list) else place.setdefault(slot, [] if isinstance(kind, VarTupleType) else {})


def _child(kind: Type | None, key: str, where: str) -> Type | None:
    """The type below `kind`; None where the types end (a worker's engine differences are checked later)."""
    if isinstance(kind, StructType):
        fields = {field.name: field.type for field in kind.fields}
        if key not in fields:
            raise _unknown(key, fields, where)
        return fields[key]
    if isinstance(kind, VarTupleType):
        return kind.item_type
    if isinstance(kind, DictType):
        return next((field.type for field in _fields(_ENGINE) if field.name == key), None)
    if kind is not None:
        raise ConfigError(f"{where}.{key}: {where} holds no fields", field=f"{where}.{key}")
    return None


def _typed(value: str, kind: Type | None) -> Any:
    """Text stays text where the field takes text; everything else is read as YAML."""
    members = kind.types if isinstance(kind, UnionType) else (kind,)
    takes_text = any(isinstance(member, msgspec.inspect.StrType) for member in members)
    if takes_text and not (len(members) > 1 and value in ("", "null", "~")):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


# ---- unknown keys and wrong types -------------------------------------------------------------------------------------------------


def _fields(kind: Type) -> tuple[msgspec.inspect.Field, ...]:
    return kind.fields if isinstance(kind, StructType) else ()


def _refuse_unknown(value: Any, kind: Type, path: str) -> None:
    if isinstance(kind, StructType) and isinstance(value, dict):
        fields = {field.name: field.type for field in kind.fields}
        for key, below in value.items():
            if key not in fields:
                raise _unknown(str(key), fields, path)
            _refuse_unknown(below, fields[key], f"{path}.{key}" if path else key)
    elif isinstance(kind, VarTupleType) and isinstance(value, list):
        for index, below in enumerate(value):
            _refuse_unknown(below, kind.item_type, f"{path}[{index}]")


def _unknown(key: str, known: Iterable[str], path: str) -> ConfigError:
    full = f"{path}.{key}" if path else key
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
    return ConfigError(f"{full}: unknown; {hint}", field=full)


def _engine_overrides(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    nodes = tree.get("nodes")
    for n, node in enumerate(nodes if isinstance(nodes, list) else []):
        workers = node.get("workers") if isinstance(node, dict) else None
        for w, worker in enumerate(workers if isinstance(workers, list) else []):
            if isinstance(worker, dict):
                yield f"nodes[{n}].workers[{w}].engine", worker.get("engine", {})


def _convert(tree: Any, kind: type = HeadraceConfig, path: str = "") -> Any:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        below = where.rstrip("`").lstrip(".")
        full = ".".join(part for part in (path, below) if part) or "config"
        raise ConfigError(f"{full}: {message[0].lower()}{message[1:].replace('`', '')}", field=full) from None


# ---- what types cannot say --------------------------------------------------------------------------------------------------------


def _check(config: HeadraceConfig, cores: set[int]) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", config.cluster):
        raise ConfigError(f"cluster: {config.cluster!r} is not a name of lower-case letters, digits and dashes, at most 31", field="cluster")
    workers = [(f"nodes[{n}].workers[{w}]", worker) for n, node in enumerate(config.nodes) for w, worker in enumerate(node.workers)]
    if not workers:
        raise ConfigError("nodes: no worker anywhere; a cluster needs at least one", field="nodes")
    _check_names([(f"nodes[{n}]", node) for n, node in enumerate(config.nodes)])
    _check_names(workers)
    roles = {worker.role for _, worker in workers}
    if not roles & {"decode", "both"}:
        raise ConfigError("nodes: no worker has role decode or both, so no answer could be finished", field="nodes")
    for path, worker in workers:
        _check_cores(f"{path}.cores", worker.cores, cores, config)
        _convert(msgspec.to_builtins(config.engine) | worker.engine, EngineConfig, f"{path}.engine")
        engine = worker_engine(config, worker)
        _check_engine(f"{path}.engine" if worker.engine else "engine", engine)
        if _numerics(engine) != _numerics(config.engine):
            raise ConfigError(f"{path}.engine: block_tokens, dtype and weights must be the cluster's: workers exchange blocks", field=f"{path}.engine")
    for n, node in enumerate(config.nodes):
        _check_cores(f"nodes[{n}].store_cores", node.store_cores, cores, config)
    _check_rows(config)
    _check_cluster(config)


def _numerics(engine: EngineConfig) -> tuple[int, str, str]:
    """What decides whether one engine may use another's blocks."""
    return engine.block_tokens, engine.dtype, engine.weights


def _check_names(entries: Sequence[tuple[str, NodeEntry | WorkerEntry]]) -> None:
    seen: dict[str, str] = {}
    for path, entry in entries:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", entry.name):
            raise ConfigError(f"{path}.name: {entry.name!r} is not a name of letters, digits, dots and dashes", field=f"{path}.name")
        if entry.name in seen:
            raise ConfigError(f"{path}.name: {entry.name!r} is taken by {seen[entry.name]}", field=f"{path}.name")
        seen[entry.name] = path


def _check_cores(path: str, wanted: Sequence[int], present: set[int], config: HeadraceConfig) -> None:
    missing = sorted(set(wanted) - present)
    if missing and config.ray.address is None:
        raise ConfigError(f"{path}: this machine has no core {missing[0]}; it has {', '.join(map(str, sorted(present)))}", field=path)
    if len(set(wanted)) != len(wanted):
        raise ConfigError(f"{path}: a core is named twice", field=path)


def _check_engine(path: str, engine: EngineConfig) -> None:
    if engine.block_tokens <= 0 or engine.block_tokens % 32:
        raise ConfigError(f"{path}.block_tokens: {engine.block_tokens} is not a multiple of 32", field=f"{path}.block_tokens")
    positive = ("kv_cache_bytes", "max_num_batched_tokens", "chunk_tokens", "max_num_seqs", "max_context_tokens", "threads")
    for name in positive:
        if getattr(engine, name) <= 0:
            raise ConfigError(f"{path}.{name}: must be positive", field=f"{path}.{name}")
    _check_lora(f"{path}.lora", engine.lora)
    if engine.weights == "w8a8" and engine.dtype != "bfloat16":
        raise ConfigError(f"{path}.weights: w8a8 goes with dtype bfloat16", field=f"{path}.weights")
    if engine.max_num_seqs > engine.max_num_batched_tokens:
        name = f"{path}.max_num_seqs"
        raise ConfigError(f"{name}: {engine.max_num_seqs} sequences step one token each, more than max_num_batched_tokens", field=name)


def _check_lora(path: str, lora: LoraConfig) -> None:
    for name, folder in lora.adapters.items():
        if not folder.startswith("/"):
            raise ConfigError(f"{path}.adapters.{name}: {folder!r} is not absolute; it is the workers' own", field=f"{path}.adapters.{name}")
        if not re.fullmatch(ADAPTER_NAME, name):
            raise ConfigError(f"{path}.adapters: {name!r} is not a name of letters, digits and ._:/-, at most 128", field=f"{path}.adapters")
    if lora.max_rank <= 0:
        raise ConfigError(f"{path}.max_rank: must be positive", field=f"{path}.max_rank")
    if lora.max_loaded < len(lora.adapters):
        raise ConfigError(f"{path}.max_loaded: {lora.max_loaded} is less than the {len(lora.adapters)} adapters named", field=f"{path}.max_loaded")


def _check_rows(config: HeadraceConfig) -> None:
    """Names of rows; those of the engine's tables are checked beside torch, in the workers."""
    rows: dict[str, tuple[str, Iterable[str]]] = {
        "router.policy": (config.router.policy, POLICIES),
        "transport.backend": (config.transport.backend, TRANSPORTS),
        "store.codec": (config.store.codec, CODECS),
        "store.eviction": (config.store.eviction, EVICTION),
        "log_level": (config.log_level, logging.getLevelNamesMapping()),
    }
    for field, (name, table) in rows.items():
        if name not in table:
            raise ConfigError(f"{field}: {name!r} is none of {', '.join(table)}", field=field)


def _check_cluster(config: HeadraceConfig) -> None:
    if not 0 <= config.router.http_port < 65536:
        raise ConfigError(f"router.http_port: {config.router.http_port} is no port", field="router.http_port")
    if config.ray.address is not None and config.redis.url is None:
        raise ConfigError("redis.url: needed with ray.address: other machines cannot reach a private Redis", field="redis.url")
    processes = 1 + len(config.nodes) + sum(len(node.workers) for node in config.nodes)
    if config.ray.address is None and processes > config.ray.logical_cpus:
        raise ConfigError(f"ray.logical_cpus: {processes} processes need one each", field="ray.logical_cpus")
    for name in ("start_s", "drain_s", "stop_s", "hang_s", "watch_s"):
        if getattr(config.deadlines, name) <= 0:
            raise ConfigError(f"deadlines.{name}: must be positive", field=f"deadlines.{name}")
