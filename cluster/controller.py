"""The controller: one detached, restartable Ray actor that starts, places, watches, drains and stops every store node and worker. Knows nothing of requests.

Invariant: its state is its plan plus the names of actors and placement groups that Ray knows, so a restarted controller finds everything again.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import ProcessActor
from cluster.logs import log_to
from cluster.plan import Plan, ProcessSpec

log = logging.getLogger(__name__)

NAME = "controller"
_STOP_GRACE_S = 5.0  # for clean-up after the drain


class Member:
    """One process as the controller sees it. `answered`: when it last answered, or was last known to be starting again (monotonic seconds)."""

    def __init__(self, spec: ProcessSpec, actor: ActorHandle) -> None:
        self.spec = spec
        self.actor = actor
        self.answered = time.monotonic()
        self.ready = False
        self.restarts = 0
        self.kills = 0
        self.status: dict[str, Any] = {"name": spec.name, "node": spec.node, "pid": 0, "state": "starting"}
        self.asked: ray.ObjectRef | None = None

    def accept(self, status: dict[str, Any]) -> None:
        known = self.status["pid"]
        if known and status["pid"] != known:
            self.restarts += 1
            log.warning("%s runs again: pid %d instead of %d", self.spec.name, status["pid"], known)
        self.status = status
        self.answered = time.monotonic()

    def describe(self) -> dict[str, Any]:
        return self.status | {"restarts": self.restarts, "hang_kills": self.kills, "silent_s": round(time.monotonic() - self.answered, 3)}


class Controller:
    """Methods run on several threads of the actor; `_lock` guards the members' table, which never shrinks."""

    def __init__(self, plan_json: bytes) -> None:
        self._plan = msgspec.json.decode(plan_json, type=Plan)
        self._members: dict[str, Member] = {}
        self._machine = ray.get_runtime_context().get_node_id()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        log_to(self._plan.log_path, self._plan.log_level)
        self._create_all()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    # ---- start ----------------------------------------------------------------------------------------------------------------------

    def wait_ready(self, name: str, timeout_s: float) -> str:
        """Waits until the process called `name` serves. Returns the reason when it does not."""
        member = self._members[name]
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and not self._stopping.is_set():
            try:
                error: str = ray.get(member.actor.ready.remote(), timeout=left)
            except GetTimeoutError:
                break
            except ActorUnavailableError:  # it is being restarted
                self._stopping.wait(0.2)
                continue
            except RayError as lost:
                return f"{name}: {type(lost).__name__}"
            member.ready = not error
            return f"{name}: {error}; see {member.spec.log_path}" if error else ""
        return f"{name}: not serving within {timeout_s:.0f} s; see {member.spec.log_path}"

    def _create_all(self) -> None:
        groups = {node: self._group(node) for node in self._plan.node_names()}
        for spec in self._plan.processes:
            self._members[spec.name] = Member(spec, self._create(spec, groups[spec.node]))

    def _group(self, node: str) -> PlacementGroup:
        """A node's processes lie on one machine: one bundle, one CPU for each."""
        name = f"{self._plan.cluster}:{node}"
        try:
            return get_placement_group(name)
        except ValueError:
            bundle = {"CPU": float(len(self._plan.of_node(node)))}
            return placement_group([bundle], strategy="STRICT_PACK", name=name, lifetime="detached")

    def _create(self, spec: ProcessSpec, group: PlacementGroup) -> ActorHandle:
        options = ray.remote(ProcessActor).options(
            name=spec.name,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=4,
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0),
        )
        return options.remote(msgspec.json.encode(spec))

    # ---- watch ----------------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(self._plan.deadlines.watch_s):
            try:
                self._look(timeout_s=self._plan.deadlines.watch_s)
                self._kill_hung()
            except Exception:
                log.exception("a look at the processes failed")

    def _look(self, timeout_s: float) -> None:
        """At most one status call to each member at a time: takes late answers, asks whoever has none outstanding, waits for `timeout_s`."""
        with self._lock:
            self._take_answers(timeout_s=0)
            for member in self._members.values():
                if member.asked is None:
                    member.asked = member.actor.status.remote()
            self._take_answers(timeout_s)

    def _take_answers(self, timeout_s: float) -> None:
        asked = {member.asked: member for member in self._members.values() if member.asked is not None}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        for reference in answered:
            self._take(asked[reference], reference)

    def _take(self, member: Member, reference: ray.ObjectRef) -> None:
        member.asked = None
        try:
            member.accept(ray.get(reference))
        except (ActorUnavailableError, ActorDiedError, RayActorError) as error:
            log.warning("%s is away: %s", member.spec.name, type(error).__name__)
            member.answered = time.monotonic()  # Ray starts it again; the time to hang counts from here
        except RayError as error:
            log.error("%s answered its status call with %s", member.spec.name, error)

    def _kill_hung(self) -> None:
        """A process that does not answer, or never finishes to start, is killed; Ray starts it again."""
        for member in self._members.values():
            silent_s = time.monotonic() - member.answered
            starting_s = time.time() - member.status.get("since", time.time()) if member.status["state"] == "starting" else 0.0
            if silent_s < self._plan.deadlines.hang_s and starting_s < self._plan.deadlines.start_s:
                continue
            log.error("%s: silent for %.0f s, starting for %.0f s: killed", member.spec.name, silent_s, starting_s)
            member.kills += 1
            member.asked = None
            member.answered = time.monotonic()
            self._kill(member)

    def _kill(self, member: Member) -> None:
        """Ray asks a process to end, which a stopped one does not hear: beside us we kill it ourselves."""
        if member.status.get("machine") == self._machine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.status["pid"], signal.SIGKILL)
        else:
            ray.kill(member.actor, no_restart=False)

    # ---- tell -----------------------------------------------------------------------------------------------------------------------

    def pid(self) -> int:
        return os.getpid()

    def describe(self, fresh_s: float = 0.0) -> list[dict[str, Any]]:
        """One entry a process: name, node, pid, state, restarts, silent_s, program. `fresh_s` > 0 asks them first and waits for so long."""
        if fresh_s > 0:
            self._look(fresh_s)
        return [member.describe() for member in self._members.values()]

    # ---- end ------------------------------------------------------------------------------------------------------------------------

    def drain(self, deadline_s: float) -> None:
        """Workers take no new work and finish theirs, all at once."""
        self._each("drain", "worker:", lambda actor: actor.drain.remote(deadline_s), deadline_s + 1)

    def stop(self, drain_s: float) -> None:
        """Drains, lets every process clean up, workers before stores, and ends them for good. Idempotent."""
        self._stopping.set()
        if drain_s > 0:
            self.drain(drain_s)
        for kind in ("worker:", "store:"):
            self._each("stop", kind, lambda actor: actor.stop.remote(), _STOP_GRACE_S)
            for member in self._of_kind(kind):
                ray.kill(member.actor, no_restart=True)
        for node in self._plan.node_names():
            try:
                remove_placement_group(get_placement_group(f"{self._plan.cluster}:{node}"))
            except ValueError:
                continue

    def _of_kind(self, kind: str) -> list[Member]:
        return [member for member in self._members.values() if member.spec.name.startswith(kind)]

    def _each(self, what: str, kind: str, call: Callable[[ActorHandle], "ray.ObjectRef"], timeout_s: float) -> None:
        calls = {call(member.actor): member for member in self._of_kind(kind)}
        if not calls:
            return
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
        for reference in late:
            log.error("%s did not %s within %.1f s", calls[reference].spec.name, what, timeout_s)
        for reference in done:
            try:
                ray.get(reference)
            except RayError as error:
                log.error("%s failed to %s: %s", calls[reference].spec.name, what, error)
