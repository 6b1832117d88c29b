"""Ray as this cluster uses it: a private one in the run folder, or a configured one; the controller in it. Knows nothing of routers or Redis.

Invariant: a private Ray dies with the thread that called `start`, which must live as long as the process.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError

from cluster.config import RayEntry
from cluster.controller import NAME, Controller
from cluster.plan import Plan
from protocol.errors import Unavailable

_SYSTEM_CONFIG: Mapping[str, Any] = {"enable_metrics_collection": False}


class RayRuntime:
    def __init__(self, entry: RayEntry, cluster: str, run_folder: Path) -> None:
        self._entry = entry
        # A configured Ray may hold several clusters, so the namespace is the cluster's.
        self._namespace = f"headrace-{cluster}"
        self._folder = run_folder / "ray"
        self._controller: Any = None

    def start(self) -> None:
        """Blocks for seconds. Raises what ray.init raises."""
        if self._entry.address is not None:
            ray.init(address=self._entry.address, namespace=self._namespace, log_to_driver=False, configure_logging=False)
            return
        _start_private(self._namespace, self._entry, self._folder)

    def start_controller(self, plan: Plan) -> None:
        options = ray.remote(Controller).options(
            name=NAME, get_if_exists=True, lifetime="detached", max_restarts=-1, max_task_retries=-1, max_concurrency=32, num_cpus=1
        )
        self._controller = options.remote(msgspec.json.encode(plan))

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """One call to the controller. Raises Unavailable when it does not answer in time."""
        if self._controller is None:
            raise Unavailable("the controller does not run", stage=method)
        try:
            return ray.get(getattr(self._controller, method).remote(*arguments), timeout=timeout_s)
        except GetTimeoutError:
            raise Unavailable(f"the controller did not answer {method} within {timeout_s:.0f} s", stage=method) from None
        except RayError as error:
            raise Unavailable(f"the controller failed in {method}: {error}", stage=method) from error

    def controller_pid(self) -> int:
        return int(self.call("pid", timeout_s=5.0)) if self._controller is not None else 0

    def stop(self) -> None:
        """Ends the controller and, when it is private, Ray. Idempotent."""
        if self._controller is not None:
            ray.kill(self._controller, no_restart=True)
            self._controller = None
        ray.shutdown()


def _start_private(namespace: str, entry: RayEntry, folder: Path) -> None:
    ray.init(
        address="local",
        namespace=namespace,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        num_cpus=entry.logical_cpus,
        object_store_memory=entry.object_store_bytes,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
        _system_config=dict(_SYSTEM_CONFIG),
    )


class _Empty:
    def ready(self) -> None: ...


@contextlib.contextmanager
def empty_actors(count: int) -> Iterator[None]:
    """A private Ray like a cluster's, with `count` actors that do nothing: what Ray itself costs (bench.idle)."""
    with tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True) as folder:
        _start_private("empty", RayEntry(), Path(folder) / "ray")
        actors = [ray.remote(_Empty).options(num_cpus=1).remote() for _ in range(count)]
        ray.get([actor.ready.remote() for actor in actors])
        try:
            yield
        finally:
            ray.shutdown()
