"""What an engine tells its worker, step by step. Data alone; `key` says whose it is.

Invariant: blocks of an Exported event are pinned until the receiver says `unpin`; every Load event is answered by one `loaded`.
"""

from dataclasses import dataclass, field

from engine.lora import Adapter
from engine.scheduler import LoadItem
from engine.sequence import Sequence, SequenceKey, Tally
from protocol.errors import HeadraceError
from protocol.logprobs import TokenLogprob


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and text of a sequence. `finish_reason`: "", "stop", "length", or "handoff" when a one-token sequence would go on.
    `logprobs`: one for each token, where the request asks; `prompt_logprobs`: with the first token of an answer, where it asks for these.
    `embedding`: fp32 values, instead of tokens, where the request wants them; then the only chunk."""

    sequence: Sequence
    tokens: list[int]
    text: str
    finish_reason: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: tuple[float, ...] = ()

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over here; `tally`: what had been done for it."""

    key: SequenceKey
    error: HeadraceError
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The sequence left the queue and has its blocks."""

    sequence: Sequence

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key


@dataclass(frozen=True, slots=True)
class Load:
    """KV is wanted in these blocks; answer with `Engine.loaded`."""

    sequence: Sequence
    items: list[LoadItem]

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key


@dataclass(frozen=True, slots=True)
class Exported:
    """Blocks whose KV is complete, pinned for the receiver."""

    sequence: Sequence
    items: list[LoadItem]

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key


Event = Admitted | Chunk | Failed | Load | Exported


@dataclass(slots=True)
class EngineStatus:
    """The counters that end in `_s` part the engine thread's whole time: idle_s, command_s, schedule_s, build_s, run_s, sample_s, update_s."""

    steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    adapters: tuple[Adapter, ...] = ()
    counters: dict[str, float] = field(default_factory=dict)


def stage_of(sequence: Sequence) -> str:
    """Where a sequence was when it ended, in the words of the life-cycle."""
    phase = "prefill" if sequence.times.first_token == 0 and sequence.num_given == sequence.num_prompt else "decode"
    if not sequence.times.started:
        return f"{phase}_queued"
    return phase if sequence.times.kv_ready else "kv_loading"
