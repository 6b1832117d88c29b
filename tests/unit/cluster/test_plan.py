"""From a config to one specification for each process."""

from pathlib import Path

import msgspec
import pytest

from cli.config import parse
from cluster.config import HeadraceConfig
from cluster.plan import Access, Model, Plan, make_plan, router_settings
from cluster.programs import ENTRY, Programs
from kvstore.config import StoreNodeConfig
from kvstore.layout import BlockLayout
from protocol.errors import ConfigError
from worker.config import WorkerConfig

MODEL = Model(path="/m", revision="abc", layout=BlockLayout(30, 3, 64, 32, "bfloat16"))
ACCESS = Access(redis_url="unix://:p@/r.sock", token="t", transport_secret="s")
CONFIG = """
cluster: c
nodes:
  - name: node-a
    workers:
      - {name: w-0, role: prefill, cores: [1]}
      - {name: w-1, role: both, cores: [0, 2], engine: {max_context_tokens: 1024}}
  - {name: node-b, store_cores: [3], workers: [{name: w-2, role: decode}]}
"""


def config(*settings: str) -> HeadraceConfig:
    return parse(CONFIG, settings, cores=range(4))


def plan(*settings: str) -> Plan:
    return make_plan(config(*settings), MODEL, ACCESS, Programs(), Path("/logs"))


def test_one_store_a_node_and_one_process_a_worker() -> None:
    processes = {process.name: process for process in plan().processes}
    assert list(processes) == ["store:node-a", "worker:w-0", "worker:w-1", "store:node-b", "worker:w-2"]
    assert {name: (process.node, process.cores, process.threads) for name, process in processes.items()} == {
        "store:node-a": ("node-a", (0, 1, 2), 1),
        "worker:w-0": ("node-a", (1,), 1),
        "worker:w-1": ("node-a", (0, 2), 2),
        "store:node-b": ("node-b", (3,), 1),
        "worker:w-2": ("node-b", (), 1),
    }
    assert {process.program for process in processes.values()} == set(ENTRY.values())


def test_each_process_gets_its_own_typed_settings() -> None:
    processes = {process.name: process for process in plan().processes}
    store = msgspec.json.decode(processes["store:node-b"].config, type=StoreNodeConfig)
    assert (store.name, store.node, store.layout, store.token, store.transport.secret) == ("node-b", "node-b", MODEL.layout, "t", "s")
    worker = msgspec.json.decode(processes["worker:w-1"].config, type=WorkerConfig)
    assert (worker.name, worker.role, worker.model_path, worker.revision, worker.engine.threads) == ("w-1", "both", "/m", "abc", 2)
    assert worker.engine.max_context_tokens == 1024


def test_the_router_takes_the_shortest_context_of_its_workers() -> None:
    settings = router_settings(config(), MODEL, ACCESS, Path("/logs"), 7)
    assert (settings.max_context_tokens, settings.router.http_port, settings.model_name) == (1024, 7, "smollm2-135m-instruct")


@pytest.mark.parametrize("field", ["engine.kv_cache_bytes", "store.capacity_bytes"])
def test_a_pool_must_hold_one_whole_context(field: str) -> None:
    needed = 4096 // 32 * MODEL.layout.block_bytes
    assert plan(f"{field}={needed}")
    with pytest.raises(ConfigError, match=rf"{field}: {needed - 1} bytes do not hold one context of 4096 tokens, which takes {needed}"):
        plan(f"{field}={needed - 1}")


def test_the_log_level_reaches_every_process() -> None:
    assert {process.log_level for process in plan("log_level=DEBUG").processes} == {"DEBUG"}
    assert router_settings(config("log_level=DEBUG"), MODEL, ACCESS, Path("/logs"), 7).log_level == "DEBUG"


def test_a_plan_survives_the_wire() -> None:
    assert msgspec.json.decode(msgspec.json.encode(plan()), type=Plan) == plan()
