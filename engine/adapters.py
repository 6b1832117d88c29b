"""The adapters of one engine: those that new sequences may use, and those that only wait for their last sequence. Touched by the engine thread alone.

Invariants: a sequence keeps the adapter that it began with, whatever is loaded or unloaded meanwhile; every `done` is called once, that of an unload
when the last sequence has ended.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Protocol

import torch

from engine.batch import AdapterRows
from engine.lora import Adapter
from protocol.errors import HeadraceError, InvalidRequest, Overloaded, UnknownModel

Done = Callable[[HeadraceError | None], None]


class Adapters:
    def __init__(self, max_loaded: int, adapters: Iterable[Adapter] = ()) -> None:
        self._max_loaded = max_loaded
        self._loaded = {adapter.name: adapter for adapter in adapters}
        self._retiring: list[tuple[Adapter, Done]] = []
        self._answers: list[tuple[Done, HeadraceError | None]] = []

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        return tuple(self._loaded.values())

    def find(self, name: str, revision: str) -> Adapter | None:
        """None: not here in this revision (empty: in any)."""
        adapter = self._loaded.get(name)
        return adapter if adapter is not None and revision in ("", adapter.revision) else None

    def load(self, adapter: Adapter, done: Done) -> None:
        """Loading the same again is no error."""
        error = self._objection(adapter)
        if error is None:
            self._loaded[adapter.name] = adapter
        self._answers.append((done, error))

    def _objection(self, adapter: Adapter) -> HeadraceError | None:
        present = self._loaded.get(adapter.name)
        if present is not None and present.revision != adapter.revision:
            return InvalidRequest(f"adapter {adapter.name!r} is loaded with other weights; unload it first", field="lora_name")
        if present is None and len(self._loaded) + len(self._retiring) >= self._max_loaded:
            return Overloaded(f"{self._max_loaded} adapters are loaded, as many as lora.max_loaded allows", field="lora_name")
        return None

    def unload(self, name: str, done: Done) -> None:
        """No new sequence gets the adapter from now on; `done` when the last one has ended."""
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            self._answers.append((done, UnknownModel(f"adapter {name!r} is not loaded", field="lora_name")))
        else:
            self._retiring.append((adapter, done))

    def settle(self, is_used: Callable[[Adapter], bool]) -> None:
        """Let go of the unloaded adapters that no sequence uses any more, and answer all that is due. Called when the engine's status is out."""
        ended = [one for one in self._retiring if not is_used(one[0])]
        self._retiring = [one for one in self._retiring if one not in ended]
        answers, self._answers = self._answers + [(done, None) for _, done in ended], []
        for done, error in answers:
            done(error)


class Adapted(Protocol):
    """What is asked of a sequence here."""

    adapter: Adapter | None


def adapter_rows(scheduled: Many[tuple[Adapted, int]]) -> tuple[AdapterRows, ...]:
    """Which rows of a batch of these sequences, so many tokens of each, belong to which adapter."""
    rows: dict[int, tuple[Adapter, list[int]]] = {}
    first = 0
    for sequence, num_tokens in scheduled:
        if sequence.adapter is not None:
            rows.setdefault(id(sequence.adapter), (sequence.adapter, []))[1].extend(range(first, first + num_tokens))
        first += num_tokens
    return tuple(AdapterRows(adapter, torch.tensor(some)) for adapter, some in rows.values())
