"""The queue before the batch. Owns the order in which waiting sequences are tried and each tenant's share; knows nothing of blocks.

The order: classes by priority; within a class the tenant that was served least (virtual token counters); within a tenant those that ran before or waited
longer than the age cap, by arrival, then the others by the admission policy's rank.
Invariants:
- Within a class and tenant nobody overtakes a sequence that has waited past the cap; between tenants the counters alone decide, so a flood of old requests
  gains nothing.
- A tenant that comes back starts level with the least served one present: staying away saves nothing up.
"""

import bisect
from collections import Counter
from collections.abc import Iterator

from engine.admission import Admission
from engine.sequence import Sequence

WINDOW = 256  # of a tenant's sequences are ranked at a time: bounds the work of one round


class TenantShares:
    def __init__(self) -> None:
        self._present: Counter[str] = Counter()  # sequences
        self._served: dict[str, int] = {}

    def served(self, tenant: str) -> int:
        return self._served[tenant]

    def enter(self, tenant: str) -> None:
        if tenant not in self._present:
            self._served[tenant] = max(self._served.get(tenant, 0), self._least())
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._present[tenant] -= 1
        if self._present[tenant]:
            return
        del self._present[tenant]
        least = self._least()
        self._served = {name: served for name, served in self._served.items() if name in self._present or (self._present and served > least)}

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] += tokens

    def _least(self) -> int:
        return min((self._served[tenant] for tenant in self._present), default=0)


class WaitingQueue:
    def __init__(self, admission: Admission, shares: TenantShares, age_cap_s: float) -> None:
        self._admission = admission
        self._shares = shares
        self._age_cap_s = age_cap_s
        self._lines: dict[int, dict[str, list[Sequence]]] = {}  # priority -> tenant -> by arrival
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for tenants in self._lines.values() for line in tenants.values() for sequence in line)

    @property
    def top_priority(self) -> int:
        """Of those that wait; the caller asked whether somebody does."""
        return min(self._lines)

    def add(self, sequence: Sequence) -> None:
        tenants = self._lines.setdefault(sequence.request.priority, {})
        bisect.insort(tenants.setdefault(sequence.request.tenant, []), sequence, key=lambda other: other.order)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        tenants = self._lines[sequence.request.priority]
        line = tenants[sequence.request.tenant]
        line.pop(bisect.bisect_left(line, sequence.order, key=lambda other: other.order))
        self._length -= 1
        if not line:
            del tenants[sequence.request.tenant]
        if not tenants:
            del self._lines[sequence.request.priority]

    def candidates(self, now: float) -> Iterator[Sequence]:
        """In the order of admission. The caller may remove what it was given, and add, between two of them."""
        for priority in sorted(self._lines):
            ranked = {tenant: self._ranked(line, now) for tenant, line in self._lines.get(priority, {}).items()}
            while ranked:
                tenant = min(ranked, key=self._shares.served)
                sequence = next(ranked[tenant], None)
                if sequence is None:
                    del ranked[tenant]
                else:
                    yield sequence

    def _ranked(self, line: list[Sequence], now: float) -> Iterator[Sequence]:
        def rank(sequence: Sequence) -> tuple[bool, float]:
            due = sequence.times.started > 0 or now - sequence.times.queued >= self._age_cap_s
            return (False, 0.0) if due else (True, self._admission.rank(sequence))

        yield from sorted(line[:WINDOW], key=rank)
