"""Which program each process of a cluster runs: the one table between the cluster and the layers it starts. Rows are imported inside the process alone.

Contract of a row of ENTRY (stores and workers), called as `Row(config_json: bytes)`:
- `start()` blocks until the process serves and is announced in the registry; raises what is wrong.
- `status() -> dict` is light and answers at any time after `start` has returned, from any thread.
- `drain(deadline_s)` takes no new work, and returns when the running work is over or after `deadline_s`.
- `stop()` ends its threads, sockets and memory; the process is ended right after.
"""

from typing import Any, Protocol

import msgspec

ENTRY = {"store": "kvstore.process:StoreProcess", "worker": "worker.process:WorkerProcess"}
ROUTER_MODULE = "router"  # python -m router CONFIG_FILE; prints "ready http://host:port"


class Program(Protocol):
    def start(self) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def drain(self, deadline_s: float) -> None: ...
    def stop(self) -> None: ...


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """Other programs for tests. `python_path`: a folder where they are found."""

    store: str = ENTRY["store"]
    worker: str = ENTRY["worker"]
    router_module: str = ROUTER_MODULE
    python_path: str = ""
