"""What happened to recent requests: instants, work of each side, workers, failures. Bounded; knows nothing of HTTP.

Invariant: at most `capacity` timelines are kept; a running request keeps its own alive.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from protocol import headrace_pb2 as pb
from protocol.errors import HeadraceError
from protocol.instants import Instant
from router.placement import Placement

_ORDER = {instant.value: index for index, instant in enumerate(Instant)}


@dataclass(frozen=True, slots=True)
class Event:
    """`by`: "router" or a worker's name. `attempt` 0: before the first dispatch. Unix seconds."""

    name: str
    at: float
    by: str
    attempt: int


@dataclass(slots=True)
class Side:
    """One dispatch: a phase of the request on a worker."""

    phase: str
    worker: str
    generation: int
    node: str
    attempt: int
    work: pb.Work | None = None
    kv_pushed: bool = False
    outcome: str = "running"


@dataclass(slots=True)
class Timeline:
    request_id: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    retries: int = 0
    migrations: int = 0
    events: list[Event] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    placements: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, instant: Instant, at: float, attempt: int = 0) -> None:
        self.events.append(Event(instant.value, at, "router", attempt))

    def add_row(self, row: pb.Row, side: Side) -> None:
        self.events.extend(Event(instant.name, instant.at, side.worker, side.attempt) for instant in row.instants)
        if row.HasField("work"):
            side.work = row.work
        if row.finish_reason:
            side.outcome = row.finish_reason
        side.kv_pushed = side.kv_pushed or row.kv_pushed

    def add_placement(self, placement: Placement, attempt: int) -> None:
        prefill = placement.prefill.name if placement.prefill else None
        self.placements.append(
            {"attempt": attempt, "prefill": prefill, "decode": placement.decode.name, "reason": placement.reason, "last_resort": placement.last_resort}
        )

    def add_failure(self, error: HeadraceError, side: Side | None, at: float) -> None:
        if side is not None:
            side.outcome = error.code
        worker = side.worker if side else None
        self.failures.append({"worker": worker, "attempt": side.attempt if side else 0, "code": error.code, "message": error.message, "at": at})

    @property
    def stage(self) -> str:
        """The last instant reached."""
        return max(self.events, key=lambda event: event.at).name if self.events else Instant.RECEIVED.value

    def body(self) -> dict[str, Any]:
        events = sorted(self.events, key=lambda event: (event.at, _ORDER.get(event.name, len(_ORDER))))
        start = events[0].at if events else 0.0
        return {
            "request_id": self.request_id,
            "finish_reason": self.finish_reason or None,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "retries": self.retries,
            "migrations": self.migrations,
            "instants": [
                {"name": event.name, "at": event.at, "since_received_s": event.at - start, "by": event.by, "attempt": event.attempt} for event in events
            ],
            "placements": self.placements,
            "sides": [_side_body(side) for side in self.sides],
            "failures": self.failures,
        }


class TimelineStore:
    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def __len__(self) -> int:
        return len(self._timelines)

    def add(self, public_id: str, timeline: Timeline) -> None:
        """A later request of the same id takes the place of the earlier one."""
        self._timelines[public_id] = timeline
        self._timelines.move_to_end(public_id)
        while len(self._timelines) > self._capacity:
            self._timelines.popitem(last=False)

    def get(self, public_id: str) -> Timeline | None:
        """By x-request-id or by the id of the answer."""
        return self._timelines.get(public_id) or self._timelines.get(public_id.removeprefix("chatcmpl-").removeprefix("cmpl-"))


def _side_body(side: Side) -> dict[str, Any]:
    body: dict[str, Any] = {
        "phase": side.phase,
        "worker": side.worker,
        "generation": side.generation,
        "node": side.node,
        "attempt": side.attempt,
        "outcome": side.outcome,
        "kv_pushed": side.kv_pushed,
        "work": None,
    }
    if side.work is not None:
        work = {field.name: getattr(side.work, field.name) for field in pb.Work.DESCRIPTOR.fields}
        work["pushed_gb_per_s"] = _rate(side.work.pushed_bytes, side.work.pushed_s)
        work["pulled_gb_per_s"] = _rate(side.work.pulled_bytes, side.work.pulled_s)
        body["work"] = work
    return body


def _rate(num_bytes: int, seconds: float) -> float | None:
    return num_bytes / seconds / 1e9 if seconds > 0 else None
