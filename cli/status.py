"""A table of a running cluster from its router's GET /cluster. Knows nothing of how the router learns it."""

import time
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from protocol.errors import Unavailable


def show(url: str, watch: bool, interval_s: float, console: Console) -> None:
    """Once, or until interrupted. Raises Unavailable when no router answers, while watching only at the first look."""
    with httpx.Client(base_url=url, timeout=5) as client:
        body = _cluster(client)
        if not watch:
            console.print(render(body))
            return
        with Live(render(body), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                try:
                    live.update(render(_cluster(client)), refresh=True)
                except Unavailable as error:
                    live.update(Text(error.message), refresh=True)


def _cluster(client: httpx.Client) -> dict[str, Any]:
    try:
        response = client.get("/cluster").raise_for_status()
        body: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unavailable(f"no router answers at {client.base_url}: {type(error).__name__}") from None
    return body


def render(body: Mapping[str, Any]) -> RenderableType:
    head = f"{body['model']}  policy {body['policy']}  running requests {body['running_requests']}"
    if body["draining"]:
        head += "  draining"
    if body["registry"]["lost"]:
        head += "  Redis does not answer"
    return Group(Text(head), _workers(body["workers"]), _transfers(body["workers"]), _stores(body["stores"]))


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = _table("workers", ["worker", "role", "node", "pid", "health", ">sequences", ">waiting tokens", ">steps", ">blocks used", ">cached", ">total"])
    for worker in workers:
        used = worker["blocks_total"] - worker["blocks_free"] - worker["blocks_cached"]
        health = "draining" if worker["draining"] else "ok" if worker["healthy"] else worker["trouble"]
        identity = [worker["name"], worker["role"], worker["node"], worker["attributes"].get("pid", ""), health]
        numbers = [worker[name] for name in ("sequences", "waiting_tokens", "steps")] + [used, worker["blocks_cached"], worker["blocks_total"]]
        table.add_row(*identity, *map(str, numbers))
    return table


def _transfers(workers: list[dict[str, Any]]) -> Table:
    """One row for each counter that any worker has: bytes and blocks moved, tokens computed and reused, what went wrong."""
    table = _table("counters", ["counter", *(f">{worker['name']}" for worker in workers)])
    for name in sorted({name for worker in workers for name, value in worker["counters"].items() if value}):
        values = [worker["counters"].get(name) for worker in workers]
        table.add_row(name, *("" if value is None else _number(name, value) for value in values))
    return table


def _stores(stores: list[dict[str, Any]]) -> Table:
    """What the stores last said of themselves when they renewed their registration."""
    counts = ("slots_total", "slots_free", "slots_cached", "slots_reserved", "slots_quarantined", "leases", "holds")
    table = _table("stores", ["store", "node", "pid", "transport", *(f">{name.removeprefix('slots_')}" for name in counts)])
    for store in stores:
        attributes = store["attributes"]
        table.add_row(store["name"], store["node"], *(attributes.get(name, "") for name in ("pid", "transport", *counts)))
    return table


def _number(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return f"{value / 1e6:.1f} MB"
    return f"{value:.3f}" if value != int(value) else f"{int(value)}"


def _table(title: str, columns: list[str]) -> Table:
    """A column whose name begins with ">" is a number."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table
