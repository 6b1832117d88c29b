"""Which evictable block goes next. Knows names only: nothing of slots, leases or bytes.

Contract, checked for every row of EVICTION by tests/contract/test_eviction.py: the store adds a block when it becomes evictable and removes it when it is
pinned or dropped, so a victim is always evictable; each verb is O(1).
"""

from collections import OrderedDict
from importlib import import_module
from typing import Protocol

from protocol.errors import ConfigError


class Eviction(Protocol):
    def __len__(self) -> int: ...

    def __contains__(self, name: bytes) -> bool: ...

    def add(self, name: bytes) -> None: ...

    def touch(self, name: bytes) -> None:
        """The block was asked for; nothing where it is not evictable."""
        ...

    def remove(self, name: bytes) -> None:
        """KeyError where it was not added."""
        ...

    def victim(self) -> bytes | None:
        """The next to go, still added; None when nothing is evictable."""
        ...


EVICTION = {"lru": "kvstore.eviction:LeastRecentlyUsed"}


class LeastRecentlyUsed:
    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def add(self, name: bytes) -> None:
        self._names[name] = None

    def touch(self, name: bytes) -> None:
        if name in self._names:
            self._names.move_to_end(name)

    def remove(self, name: bytes) -> None:
        del self._names[name]

    def victim(self) -> bytes | None:
        return next(iter(self._names), None)


def open_eviction(name: str) -> Eviction:
    try:
        module, _, attribute = EVICTION[name].partition(":")
    except KeyError:
        raise ConfigError(f"store.eviction: {name!r} is none of {', '.join(EVICTION)}", field="store.eviction") from None
    eviction: Eviction = getattr(import_module(module), attribute)()
    return eviction
