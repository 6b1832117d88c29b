"""The demo: one cluster, one question, where the time went and what moved, and the proof that nothing is left. Uses only what any client could use."""

import time
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from cli.progress import Stages
from cluster.config import HeadraceConfig
from cluster.local import Cluster
from protocol.errors import HeadraceError

_MAX_TOKENS = 64
_REQUEST_S = 120.0


def run(config: HeadraceConfig, question: str, out: Console, err: Console) -> int:
    """The exit code. Whatever fails, the cluster is stopped and the reason and the log folder are named."""
    started = time.monotonic()
    cluster: Cluster | None = None
    reason = ""
    try:
        with Stages(err) as stages:
            cluster = Cluster(config, progress=stages.update)
            cluster.start()
        out.print(f"cluster at {cluster.url} after {time.monotonic() - started:.1f} s")
        request_id = ask(cluster.url, config.model_name, question, out)
        timeline = httpx.get(f"{cluster.url}/v1/requests/{request_id}/timeline", timeout=10).raise_for_status().json()
        out.print(instants_table(timeline), moved_table(timeline))
    except KeyboardInterrupt:
        reason = "interrupted"
    except HeadraceError as error:
        reason = error.message
    except Exception as error:  # of the client libraries
        reason = f"{type(error).__name__}: {error}"
    left = stop(cluster, err)
    if left:
        reason = f"{reason}; left behind: {', '.join(left)}" if reason else f"left behind: {', '.join(left)}"
    if reason:
        err.print(f"headrace: {reason}; logs: {cluster.log_folder if cluster else 'none'}", soft_wrap=True, markup=False)
        return 1
    assert cluster is not None and cluster.footprint is not None
    out.print(f"stopped: none of {len(cluster.footprint.processes)} processes, no port, socket, folder or shared memory is left")
    out.print(f"total {time.monotonic() - started:.1f} s")
    return 0


def ask(url: str, model: str, question: str, out: Console) -> str:
    """Streams the answer to `out`; returns the request's id."""
    from openai import OpenAI

    out.print(f"\n[bold]{question}[/bold]")
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=_REQUEST_S, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        sent = time.perf_counter()
        first = 0.0
        with client.chat.completions.with_raw_response.create(
            model=model, messages=messages, stream=True, max_tokens=_MAX_TOKENS, temperature=0, stream_options={"include_usage": True}
        ).parse() as chunks:
            request_id = chunks.response.headers["x-request-id"]
            for chunk in chunks:
                text = chunk.choices[0].delta.content if chunk.choices else None
                if text:
                    first = first or time.perf_counter()
                    out.print(text, end="", markup=False, soft_wrap=True)
        ended = time.perf_counter()
    out.print(f"\n(first token {1e3 * (first - sent):.0f} ms, whole answer {1e3 * (ended - sent):.0f} ms, seen by the client)\n")
    return str(request_id)


def stop(cluster: Cluster | None, err: Console) -> list[str]:
    """What is left behind; nothing, or the demo failed."""
    if cluster is None:
        return []
    err.print("stopping")
    cluster.stop()
    still = cluster.footprint.remaining() if cluster.footprint is not None else []
    return cluster.left_behind + still


def instants_table(timeline: Mapping[str, Any]) -> Table:
    table = Table(title="where the time went", title_justify="left")
    for column in ("instant", "by", "ms since received", "ms since the one before"):
        table.add_column(column, justify="right" if column.startswith("ms") else "left")
    before = 0.0
    for instant in timeline["instants"]:
        since = 1e3 * instant["since_received_s"]
        table.add_row(instant["name"], instant["by"], f"{since:.1f}", f"{since - before:.1f}")
        before = since
    return table


def moved_table(timeline: Mapping[str, Any]) -> Table:
    """One column a side. "computed": positions that went through the model there; "reused": read from a pool or a store instead."""
    sides = [side for side in timeline["sides"] if side["work"] is not None]
    table = Table(title="what moved", title_justify="left")
    table.add_column("")
    for side in sides:
        table.add_column(f"{side['phase']}\n{side['worker']} on {side['node']}", justify="right")
    for label, value in _MOVED.items():
        table.add_row(label, *(value(side["work"]) for side in sides))
    return table


def _rate(work: Mapping[str, Any], direction: str) -> str:
    rate = work[f"{direction}_gb_per_s"]
    return "" if rate is None else f"{rate:.2f} GB/s"


_MOVED: Mapping[str, Any] = {
    "blocks pushed": lambda work: str(work["pushed_blocks"]),
    "bytes pushed": lambda work: f"{work['pushed_bytes']:,}",
    "push rate": lambda work: _rate(work, "pushed"),
    "blocks pulled": lambda work: str(work["pulled_blocks"]),
    "bytes pulled": lambda work: f"{work['pulled_bytes']:,}",
    "pull rate": lambda work: _rate(work, "pulled"),
    "codec": lambda work: work["codec"],
    "transport": lambda work: work["transport"],
    "prompt tokens computed": lambda work: str(work["computed_prompt_tokens"]),
    "tokens computed": lambda work: str(work["computed_tokens"]),
    "reused from its own pool": lambda work: str(work["reused_device_tokens"]),
    "reused from the store": lambda work: str(work["reused_store_tokens"]),
    "of these handed off": lambda work: str(work["handoff_tokens"]),
    "recomputed": lambda work: str(work["recomputed_tokens"]),
}
