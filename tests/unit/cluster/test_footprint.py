"""What is left of a cluster: seen, named, removed; nothing else is touched."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster import tether
from cluster.footprint import Footprint, sweep
from cluster.local import check_port_free
from cluster.logs import new_log_folder
from protocol.errors import ConfigError


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])


def test_a_process_is_seen_and_killed(tmp_path: Path) -> None:
    child = sleeper()
    footprint = Footprint(tmp_path / "run")
    footprint.add_tree(child.pid)
    assert footprint.remaining() == [f"process {child.pid} {footprint.processes[child.pid][1]}"]
    assert len(footprint.clear()) == 1
    assert not psutil.pid_exists(child.pid)
    child.wait()
    assert footprint.remaining() == []


def test_a_reused_pid_is_not_taken_for_ours(tmp_path: Path) -> None:
    child = sleeper()
    footprint = Footprint(tmp_path / "run", processes={child.pid: (1.0, "ours, long ago")})
    assert footprint.clear() == []
    assert child.poll() is None
    child.kill()
    child.wait()


def test_folder_port_and_shared_memory_are_seen(tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        footprint = Footprint(tmp_path / "run", url=url, shared_memory={segment})
        footprint.run_folder.mkdir()
        assert footprint.remaining() == [f"shared memory {segment}", f"folder {tmp_path / 'run'}", f"port of {url}"]
    footprint.clear()
    assert footprint.remaining() == []


def test_sweep_removes_folders_of_dead_sentinels_only(tmp_path: Path) -> None:
    child = sleeper()
    for name, pid in (("headrace-dead", "999999999"), ("headrace-live", str(child.pid)), ("headrace-new", ""), ("other", "999999999")):
        (tmp_path / name).mkdir()
        if pid:
            (tmp_path / name / "sentinel.pid").write_text(pid)
    sweep(tmp_path, "headrace-")
    child.kill()
    child.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headrace-live", "headrace-new", "other"]


def test_a_tethered_program_dies_with_its_parent() -> None:
    code = f"""
import os, subprocess, sys
sleep = [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(60)"]
child = subprocess.Popen([sys.executable, "-S", {tether.__file__!r}, str(os.getpid()), *sleep])
print(child.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    pid = max(int(parent.stdout.readline()), int(parent.stdout.readline()))
    footprint = Footprint(Path("/nonexistent"))
    footprint.add_tree(pid)
    assert len(footprint.running()) == 1
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # ends when the last holder of the pipe is gone: the child
    parent.stdin.close()
    parent.stdout.close()
    _, alive = psutil.wait_procs(footprint.running(), timeout=10)
    assert alive == []


def test_only_the_newest_log_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "logs" / "other-20200101-000000-1").mkdir(parents=True)
    for index in range(7):
        (tmp_path / "logs" / f"c-2020010{index}-000000-1").mkdir()
    newest = new_log_folder(tmp_path, "c")
    kept = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert len(kept) == 6
    assert "other-20200101-000000-1" in kept
    assert newest.name in kept
    assert "c-20200102-000000-1" not in kept


def test_a_taken_port_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"router.http_port: 127.0.0.1:{port} is not free"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", 0)
