"""The `headrace` command from outside: exit codes, one clear line, and what help does not load."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli.demo import instants_table, moved_table
from cli.status import render

CONFIG = "nodes: [{name: a, workers: [{name: w, role: both}]}]\n"


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=60)


def text_of(*what: object) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(*what)
    return console.export_text()


def test_version_and_help() -> None:
    assert headrace("--version").stdout.startswith("headrace 0.")
    words = headrace("--help").stdout
    assert all(command in words for command in ("serve", "demo", "status", "model", "bench"))


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, cli.main, cli.status, cli.bench; print([m for m in ('torch', 'ray', 'transformers', 'openai', 'grpc') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["--set", "engine.block_token=32"], "headrace: engine.block_token: unknown; did you mean block_tokens?\n"),
        (["--set", "nodes.0.workers.0.cores=[4096]"], "headrace: nodes[0].workers[0].cores: this machine has no core 4096; it has "),
        (["--set", "model=/nowhere/at/all", "--set", "router.http_port=0"], "headrace: no model '/nowhere/at/all': expected one of "),
    ],
)
def test_a_config_error_is_one_line_and_code_2(tmp_path: Path, settings: list[str], line: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG + f"cache_dir: {tmp_path}\n")
    done = headrace("serve", "--config", str(file), *settings)
    assert done.returncode == 2
    last = [text for text in done.stderr.splitlines(keepends=True) if not text.startswith("logs:")]
    assert len(last) == 1
    assert last[0].startswith(line)
    assert "Traceback" not in done.stderr


def test_status_without_a_router_is_one_line_and_code_1() -> None:
    done = headrace("status", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("headrace: no router answers at http://127.0.0.1:9")


def test_an_unknown_option_is_code_2() -> None:
    assert headrace("serve", "--nope").returncode == 2


def test_status_shows_workers_load_and_counters() -> None:
    worker = {
        "name": "decode-0",
        "role": "decode",
        "node": "node-b",
        "attributes": {"pid": "77"},
        "healthy": False,
        "trouble": "stalled",
        "draining": False,
        "sequences": 3,
        "waiting_tokens": 500,
        "steps": 12,
        "blocks_total": 100,
        "blocks_free": 60,
        "blocks_cached": 30,
        "counters": {"pulled_bytes": 2e6, "zero": 0.0},
    }
    attributes = {"pid": "78", "transport": "nixl", "layout": "l", "slots_total": "40", "slots_free": "7", "slots_cached": "31", "slots_reserved": "2"}
    attributes |= {"slots_quarantined": "0", "leases": "4", "holds": "5"}
    store = {"name": "store-b", "node": "node-b", "address": "127.0.0.1:5", "generation": 9, "attributes": attributes}
    body = {
        "model": "m",
        "policy": "p",
        "running_requests": 1,
        "draining": False,
        "registry": {"lost": True, "failures": 2},
        "workers": [worker],
        "stores": [store],
    }
    text = text_of(render(body))
    row = next(line for line in text.splitlines() if "decode-0" in line and "stalled" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["decode-0", "decode", "node-b", "77", "stalled", "3", "500", "12", "10", "30", "100"]
    assert "Redis does not answer" in text
    assert "2.0 MB" in text
    assert "zero" not in text
    row = next(line for line in text.splitlines() if "store-b" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["store-b", "node-b", "78", "nixl", "40", "7", "31", "2", "0", "4", "5"]


def test_the_demo_shows_instants_and_what_moved() -> None:
    zeros = "pushed_blocks pushed_bytes pulled_blocks pulled_bytes computed_prompt_tokens computed_tokens"
    zeros += " reused_device_tokens reused_store_tokens handoff_tokens recomputed_tokens"
    work: dict[str, object] = dict.fromkeys(zeros.split(" "), 0)
    work |= {"pushed_blocks": 2, "pushed_bytes": 1474560, "pushed_gb_per_s": 5.5, "pulled_gb_per_s": None, "codec": "raw", "transport": "nixl"}
    timeline = {
        "instants": [
            {"name": "received", "since_received_s": 0.0, "by": "router"},
            {"name": "routed", "since_received_s": 0.0015, "by": "router"},
            {"name": "first_token", "since_received_s": 0.0505, "by": "prefill-0"},
        ],
        "sides": [{"phase": "prefill", "worker": "prefill-0", "node": "node-a", "work": work}, {"phase": "decode", "worker": "d", "node": "n", "work": None}],
    }
    text = text_of(instants_table(timeline), moved_table(timeline))
    first = next(line for line in text.splitlines() if "first_token" in line)
    assert [cell.strip() for cell in first.strip("│").split("│")] == ["first_token", "prefill-0", "50.5", "49.0"]
    assert "1,474,560" in text
    assert "5.50 GB/s" in text
    assert "nixl" in text
