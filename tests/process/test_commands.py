"""The commands as a user runs them, on the real model: the demo from start to end, and a served cluster that SIGTERM ends."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = [sys.executable, "-m", "cli.main"]


@pytest.mark.timeout(240)
def test_the_demo_answers_tells_what_moved_and_leaves_nothing() -> None:
    done = subprocess.run([*HEADRACE, "demo"], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    instants, moved = ("received", "prefill_started", "kv_pushed", "first_token", "decode_started", "finished"), ("blocks pushed", "GB/s", "raw", "nixl")
    for words in (*instants, *moved, "stopped: none of"):
        assert words in done.stdout, done.stdout


@pytest.mark.timeout(240)
def test_a_served_cluster_ends_with_sigterm_and_leaves_no_process() -> None:
    serving = subprocess.Popen([*HEADRACE, "serve", "--set", "router.http_port=0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert serving.stdout is not None
    url = serving.stdout.readline().split()[-1]
    below = psutil.Process(serving.pid).children(recursive=True)
    assert len(below) > 6
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0)
        chunks = client.completions.create(model=model, prompt="Hello", max_tokens=4, temperature=0, stream=True)
        assert whole.usage is not None and whole.usage.completion_tokens == 4
        assert "".join(chunk.choices[0].text for chunk in chunks)
    serving.send_signal(signal.SIGTERM)
    _, errors = serving.communicate(timeout=60)
    assert serving.returncode == 0, errors
    assert errors.rstrip().endswith("stopped")
    assert psutil.wait_procs(below, timeout=5)[1] == []
