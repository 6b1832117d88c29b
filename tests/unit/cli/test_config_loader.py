"""The one typed file: what is read, what is refused, and in which words."""

from pathlib import Path

import pytest

from cli.config import load_config, parse
from cluster.config import worker_engine
from protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent.parent
BASE = """
nodes:
  - {name: node-a, workers: [{name: prefill-0, role: prefill, cores: [0]}]}
  - {name: node-b, workers: [{name: decode-0, role: decode, cores: [1, 2], engine: {chunk_tokens: 128}}]}
"""
CORES = range(4)


def refused(text: str, *settings: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(text, settings, cores=CORES)
    return caught.value


@pytest.mark.parametrize("name", ["local", "colocated"])
def test_the_examples_are_valid(name: str) -> None:
    config = load_config(ROOT / "examples" / f"{name}.yaml", cores=range(2))
    assert config.cluster == name
    assert config.model_name == "smollm2-135m-instruct"


def test_a_worker_has_as_many_threads_as_cores_and_its_own_differences() -> None:
    config = parse(BASE, ["engine.max_num_seqs=8"], cores=CORES)
    prefill, decode = (worker_engine(config, node.workers[0]) for node in config.nodes)
    assert (prefill.threads, prefill.chunk_tokens, prefill.max_num_seqs) == (1, 256, 8)
    assert (decode.threads, decode.chunk_tokens, decode.max_num_seqs) == (2, 128, 8)
    assert worker_engine(parse(BASE, ["nodes.1.workers.0.engine.threads=7"], cores=CORES), config.nodes[0].workers[0]).threads == 1


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("router.http_port=18000", ("router", "http_port"), 18000),
        ("router.policy=least_loaded", ("router", "policy"), "least_loaded"),
        ("model=123", ("model",), "123"),
        ("redis.url=unix:///tmp/r.sock", ("redis", "url"), "unix:///tmp/r.sock"),
        ("redis.url=null", ("redis", "url"), None),
        ("engine.prefix_cache=false", ("engine", "prefix_cache"), False),
        ("engine.lora.adapters.sql=/folder", ("engine", "lora", "adapters"), {"sql": "/folder"}),
        ("deadlines.drain_s=2.5", ("deadlines", "drain_s"), 2.5),
        ("nodes[0].name=left", ("nodes", 0, "name"), "left"),
        ("nodes.1.workers.0.cores=[3]", ("nodes", 1, "workers", 0, "cores"), (3,)),
        ("nodes.1.workers.0.cores.1=3", ("nodes", 1, "workers", 0, "cores"), (1, 3)),
        ("nodes[1].workers[0].engine.chunk_tokens=64", ("nodes", 1, "workers", 0, "engine"), {"chunk_tokens": 64}),
        ("nodes[0].workers[0].engine.dtype=bfloat16", ("nodes", 0, "workers", 0, "engine"), {"dtype": "bfloat16"}),
        ("served_model_name=a=b", ("served_model_name",), "a=b"),
    ],
)
def test_set_changes_one_field_by_its_type(setting: str, path: tuple, value: object) -> None:
    found: object = parse(BASE, [setting], cores=CORES)
    for step in path:
        found = found[step] if isinstance(step, int) else getattr(found, step)  # type: ignore[index]
    assert found == value


def test_the_last_setting_wins() -> None:
    assert parse(BASE, ["router.http_port=1", "router.http_port=2"], cores=CORES).router.http_port == 2


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        (BASE + "engine: {block_token: 64}", (), "engine.block_token: unknown; did you mean block_tokens?"),
        (BASE + "rooter: {}", (), "rooter: unknown; did you mean router?"),
        (BASE, ("engine.block_token=3",), "engine.block_token: unknown; did you mean block_tokens?"),
        (BASE, ("zzzzzzzz=3",), "zzzzzzzz: unknown; known: cache_dir, cluster, "),
        (BASE.replace("role: prefill", "rolle: prefill"), (), "nodes[0].workers[0].rolle: unknown; did you mean role?"),
        (BASE.replace("chunk_tokens", "chunk_token"), (), "nodes[1].workers[0].engine.chunk_token: unknown; did you mean chunk_tokens?"),
        (BASE, ("nodes.1.workers.0.engine.chunk_token=1",), "nodes[1].workers[0].engine.chunk_token: unknown; did you mean chunk_tokens?"),
        (BASE, ("engine.block_tokens=many",), "engine.block_tokens: expected int, got str"),
        (BASE, ("router.http_port=1.5",), "router.http_port: expected int, got float"),
        (BASE, ("nodes.1.workers.0.engine.chunk_tokens=x",), "nodes[1].workers[0].engine.chunk_tokens: expected int, got str"),
        (BASE.replace("role: prefill", "role: prefil"), (), "nodes[0].workers[0].role: invalid enum value 'prefil'"),
        (BASE.replace("name: decode-0, ", ""), (), "nodes[1].workers[0]: object missing required field name"),
        ("", (), "config: object missing required field nodes"),
        (BASE, ("nodes.7.name=x",), "nodes.7.name: nodes has no entry 7; it has 2"),
        (BASE, ("nodes.first.name=x",), "nodes.first.name: nodes has no entry first; it has 2"),
        (BASE, ("cluster.name=x",), "cluster.name: cluster holds no fields"),
        (BASE, ("router.http_port",), "--set router.http_port: expected a.b=value"),
        (BASE, ("router..http_port=1",), "--set router..http_port=1: expected a.b=value"),
        ("a: [", (), "config: not YAML: "),
        ("- 1", (), "config: expected a mapping at the top"),
    ],
)
def test_refusals_name_the_full_path(text: str, settings: tuple[str, ...], words: str) -> None:
    assert refused(text, *settings).message.startswith(words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("engine.block_tokens=48",), "engine.block_tokens: 48 is not a multiple of 32"),
        (("engine.kv_cache_bytes=0",), "engine.kv_cache_bytes: must be positive"),
        (("engine.lora.max_rank=0",), "engine.lora.max_rank: must be positive"),
        (("engine.lora.adapters.sql=folder",), "engine.lora.adapters.sql: 'folder' is not absolute"),
        (("engine.lora.adapters.a b=/folder",), "engine.lora.adapters: 'a b' is not a name"),
        (("engine.lora.adapters.sql=/folder", "engine.lora.max_loaded=0"), "engine.lora.max_loaded: 0 is less than the 1 adapters named"),
        (("nodes.1.workers.0.engine.chunk_tokens=-1",), "nodes[1].workers[0].engine.chunk_tokens: must be positive"),
        (("nodes.1.workers.0.engine.block_tokens=64",), "nodes[1].workers[0].engine: block_tokens, dtype and weights must be the cluster's"),
        (("nodes.1.workers.0.engine.weights=w8a8",), "nodes[1].workers[0].engine: block_tokens, dtype and weights must be the cluster's"),
        (("engine.weights=w8a8", "engine.dtype=float32"), "engine.weights: w8a8 goes with dtype bfloat16"),
        (("engine.weights=int3",), "engine.weights"),
        (("nodes.1.name=node-a",), "nodes[1].name: 'node-a' is taken by nodes[0]"),
        (("nodes.1.workers.0.name=prefill-0",), "nodes[1].workers[0].name: 'prefill-0' is taken by nodes[0].workers[0]"),
        (("nodes.0.name=a/b",), "nodes[0].name: 'a/b' is not a name"),
        (("nodes.0.workers.0.cores=[9]",), "nodes[0].workers[0].cores: this machine has no core 9; it has 0, 1, 2, 3"),
        (("nodes.0.workers.0.cores=[1,1]",), "nodes[0].workers[0].cores: a core is named twice"),
        (("nodes.0.store_cores=[8]",), "nodes[0].store_cores: this machine has no core 8"),
        (("nodes=[]",), "nodes: no worker anywhere"),
        (("nodes.1.workers.0.role=prefill",), "nodes: no worker has role decode or both"),
        (("router.http_port=70000",), "router.http_port: 70000 is no port"),
        (("engine.max_num_seqs=4096",), "engine.max_num_seqs: 4096 sequences step one token each"),
        (("ray.address=10.0.0.1:6379",), "redis.url: needed with ray.address"),
        (("ray.logical_cpus=2",), "ray.logical_cpus: 5 processes need one each"),
        (("deadlines.hang_s=0",), "deadlines.hang_s: must be positive"),
        (("cluster=My Cluster",), "cluster: 'My Cluster' is not a name"),
        (("router.policy=best",), "router.policy: 'best' is none of always_disaggregate, cache_aware, least_loaded"),
        (("transport.backend=pigeon",), "transport.backend: 'pigeon' is none of nixl, shm, tcp"),
        (("log_level=LOUD",), "log_level: 'LOUD' is none of "),
    ],
)
def test_what_types_cannot_say_is_checked(settings: tuple[str, ...], words: str) -> None:
    text = BASE if "max_num_seqs" not in settings[0] else BASE.replace(", engine: {chunk_tokens: 128}", "")
    assert refused(text, *settings).message.startswith(words)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file or directory"):
        load_config(tmp_path / "absent.yaml")
