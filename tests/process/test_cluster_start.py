"""A whole cluster of stand-in programs: real Redis, Ray, controller and host process."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis as redis_client

from cli.config import parse
from cluster.config import HeadraceConfig
from cluster.footprint import Footprint
from cluster.local import Cluster
from cluster.plan import Model
from cluster.programs import Programs
from kvstore.layout import BlockLayout
from protocol.errors import ConfigError, Unavailable

FAKES = Path(__file__).parent.parent / "fakes"
PROGRAMS = Programs(store="stand_in_process:StandInStore", worker="stand_in_process:StandInWorker", router_module="stand_in_router", python_path=str(FAKES))
MODEL = Model(path="/nowhere", revision="r", layout=BlockLayout(30, 3, 64, 32, "bfloat16"))
TWO_NODES = """
cluster: stand-in
nodes:
  - {name: node-a, workers: [{name: prefill-0, role: prefill, cores: [CORE]}]}
  - {name: node-b, workers: [{name: decode-0, role: decode}]}
router: {http_port: 0}
deadlines: {watch_s: 0.3, start_s: 60, hang_s: 4}
""".replace("CORE", str(min(os.sched_getaffinity(0))))
ONE_NODE = """
cluster: stand-in
nodes: [{name: node-a, workers: [{name: NAME, role: both}]}]
router: {http_port: 0}
deadlines: {start_s: 60}
"""

LAUNCHER = """
import sys, time
from test_cluster_start import configured, new_cluster
from pathlib import Path
cluster = new_cluster(configured(sys.argv[2], "a"), Path(sys.argv[1]))
cluster.start()
print("up", cluster._sentinel.pid, cluster.pids()["host"], cluster.footprint.run_folder, cluster.url, flush=True)
time.sleep(300)
"""


def configured(text: str, name: str = "a") -> HeadraceConfig:
    return parse(text.replace("NAME", name))


def new_cluster(config: HeadraceConfig, folder: Path) -> Cluster:
    return Cluster(config, log_folder=folder, model=MODEL, programs=PROGRAMS)


def eventually(what: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if what():
            return
        time.sleep(0.1)
    pytest.fail("did not come true in time")


def status_of(cluster: Cluster, name: str) -> dict:
    return next(member for member in cluster.describe() if member["name"] == name)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with new_cluster(configured(TWO_NODES), tmp_path_factory.mktemp("logs")) as running:
        yield running


def test_everything_runs_where_the_config_says(cluster: Cluster) -> None:
    pids = cluster.pids()
    assert set(pids) == {"host", "redis", "router", "controller", "store:node-a", "store:node-b", "worker:prefill-0", "worker:decode-0"}
    assert len(set(pids.values())) == len(pids)
    core = min(os.sched_getaffinity(0))
    for name in ("worker:prefill-0", "store:node-a"):
        program = status_of(cluster, name)["program"]
        assert program["cores"] == [core]
        assert program["threads"] == "1"


def test_secrets_are_in_no_log_and_on_no_command_line(cluster: Cluster) -> None:
    password = cluster.redis_url.split("@")[0].split(":")[-1]
    assert len(password) >= 32
    for path in cluster.log_folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        text = path.read_text()
        assert password not in text
        assert cluster.token not in text
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert password not in " ".join(process.cmdline())


def test_nothing_listens_beyond_this_machine(cluster: Cluster) -> None:
    listening = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            listening += [(process.name(), c.laddr.ip, c.laddr.port) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert len(listening) > 2
    assert [entry for entry in listening if not entry[1].removeprefix("::ffff:").startswith("127.")] == []


def test_a_killed_worker_runs_again_with_a_new_generation(cluster: Cluster) -> None:
    before = status_of(cluster, "worker:decode-0")
    os.kill(cluster.pids()["worker:decode-0"], signal.SIGKILL)
    eventually(lambda: status_of(cluster, "worker:decode-0")["restarts"] > before["restarts"])
    eventually(lambda: status_of(cluster, "worker:decode-0")["state"] == "serving")
    after = status_of(cluster, "worker:decode-0")
    assert after["program"]["generation"] > before["program"]["generation"]
    assert after["pid"] != before["pid"]


def test_a_killed_controller_finds_its_processes_again(cluster: Cluster) -> None:
    before = cluster.pids()
    os.kill(before["controller"], signal.SIGKILL)
    eventually(lambda: _answers(cluster))
    after = cluster.pids()
    assert after.pop("controller") != before.pop("controller")
    assert after == before


def _answers(cluster: Cluster) -> bool:
    try:
        return bool(cluster.pids())
    except Unavailable:
        return False


def test_a_hung_store_is_killed_and_runs_again(cluster: Cluster) -> None:
    pid = cluster.pids()["store:node-b"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: status_of(cluster, "store:node-b")["pid"] != pid)
    assert status_of(cluster, "store:node-b")["hang_kills"] == 1


def test_a_killed_redis_and_router_come_back_at_the_same_address(cluster: Cluster) -> None:
    before = cluster.pids()
    for name in ("redis", "router"):
        os.kill(before[name], signal.SIGKILL)
    eventually(lambda: {"redis", "router"} <= set(cluster.pids()))
    client = redis_client.Redis.from_url(cluster.redis_url)
    eventually(lambda: _pings(client))
    assert cluster.pids()["redis"] != before["redis"]
    eventually(lambda: Footprint(Path("/nonexistent"), url=cluster.url).remaining() != [])


def _pings(client: "redis_client.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis_client.RedisError:
        return False


def test_stop_leaves_nothing(cluster: Cluster) -> None:
    """Last of this module: stops the shared cluster."""
    assert cluster.footprint is not None
    run_folder = cluster.footprint.run_folder
    assert stat.S_IMODE(run_folder.stat().st_mode) == 0o700
    cluster.stop()
    assert cluster.footprint.remaining() == []
    assert len(cluster.footprint.processes) >= 8
    assert not run_folder.exists()
    assert "ended at the last: process" not in (cluster.log_folder / "cluster.log").read_text()
    cluster.stop()


def test_a_program_that_does_not_start_stops_everything(tmp_path: Path) -> None:
    cluster = new_cluster(configured(ONE_NODE, "broken"), tmp_path)
    with pytest.raises(Unavailable, match="worker:broken: RuntimeError: this stand-in does not start"):
        cluster.start()
    assert cluster.footprint is not None
    assert cluster.footprint.remaining() == []


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = parse(ONE_NODE.replace("NAME", "a"), [f"router.http_port={port}"])
        cluster = new_cluster(config, tmp_path)
        with pytest.raises(ConfigError, match=rf"router.http_port: 127.0.0.1:{port} is not free"):
            cluster.start()
    assert cluster.footprint is None


@pytest.mark.parametrize("victims", [("launcher",), ("launcher", "host")])
def test_a_killed_launcher_leaves_nothing(tmp_path: Path, victims: tuple[str, ...]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FAKES), str(Path(__file__).parent)])}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), ONE_NODE], stdout=subprocess.PIPE, text=True, env=environment)
    assert launcher.stdout is not None
    _, sentinel, host, run_folder, url = launcher.stdout.readline().split()
    footprint = Footprint(Path(run_folder), url=url)
    footprint.add_tree(int(sentinel))
    assert len(footprint.processes) > 6
    pids = {"launcher": launcher.pid, "host": int(host)}
    for victim in reversed(victims):
        os.kill(pids[victim], signal.SIGKILL)
    launcher.wait(10)
    launcher.stdout.close()
    try:
        eventually(lambda: footprint.remaining() == [])
    finally:
        footprint.clear()
