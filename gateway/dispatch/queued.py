"""What waits in the pool's queue, as far as this process knows: what it put there itself, and the leader's last look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from gateway.queue.base import Session, Waiting
from policies.ordering import late_by_class
from policies.schema import Policy
from policies.vocabulary import Work

LOOK_AHEAD_TTFT_CLASS = 512
LOOK_AHEAD_OTHER = 64
LOOK_AHEAD_MOST = 4096


class Queued:
    """See the module header."""

    __slots__ = ("_depths", "_here", "_hidden", "_latest", "_works", "overdue")

    def __init__(self) -> None:
        self._depths: Mapping[tuple[str, str], int] = {}
        self._works: Sequence[Work] = ()
        self._here: dict[str, int] = {}
        self._latest: dict[str, Work] = {}
        self._hidden: Counter[str] = Counter()
        self.overdue = False
        """A class without an objective had waited longer than it should at the last look."""

    # -- what happens ----------------------------------------------------------------------------------------------

    def entered(self, work: Work) -> None:
        """A work of this process began to wait."""
        self._here[work.class_name] = self._here.get(work.class_name, 0) + 1

    def left(self, work: Work) -> None:
        """A work of this process stopped waiting: granted, cancelled or refused."""
        self._here[work.class_name] -= 1

    def granted(self, work: Work) -> None:
        """A work of the pool starts."""
        self._latest[work.class_name] = work

    def bounds(self, policy: Policy) -> dict[str, int]:
        """How many works of each class the next look shows. Those of silent processes do not count: nobody may start them,
        and behind what a dead process had waiting others would stay unseen until its session is over."""
        return {
            name: min(
                (LOOK_AHEAD_TTFT_CLASS if one.has_ttft_objective else LOOK_AHEAD_OTHER) + self._hidden[name],
                LOOK_AHEAD_MOST,
            )
            for name, one in policy.classes.items()
        }

    def looked(self, waiting: Waiting) -> None:
        """The queue showed its works."""
        self._depths, self._works = waiting.depths, waiting.works

    def apart_from(self, silent: Collection[Session], owners: Mapping[str, Session]) -> Sequence[Work]:
        """What the last look showed, without the works of silent processes."""
        if not silent:
            self._hidden.clear()
            return self._works
        found = [work for work in self._works if owners.get(work.id) not in silent]
        self._hidden = Counter(work.class_name for work in self._works)
        self._hidden.subtract(work.class_name for work in found)
        return found

    def forget_look(self) -> None:
        """Another process looks from now on."""
        self._depths, self._works = {}, ()
        self._hidden.clear()
        self.overdue = False

    # -- what is known ---------------------------------------------------------------------------------------------

    @property
    def anything(self) -> bool:
        """Something waits."""
        return bool(self._depths) or any(self._here.values())

    @property
    def seen(self) -> int:
        """Works that the queue held at the last look."""
        return sum(self._depths.values())

    @property
    def by_tenant(self) -> Mapping[tuple[str, str], int]:
        """Works waiting by class and tenant, at the last look."""
        return self._depths

    def depth(self, class_name: str) -> int:
        """Works of a class."""
        seen = sum(count for (name, _tenant), count in self._depths.items() if name == class_name)
        return max(self._here.get(class_name, 0), seen)

    def depths(self) -> dict[str, int]:
        """`depth` of every class with anything waiting."""
        names = {name for name, _tenant in self._depths} | set(self._here)
        return {name: self.depth(name) for name in names}

    def late(self, policy: Policy, now_s: float) -> Mapping[str, int]:
        """Of each class, how many cannot be in time any more."""
        return late_by_class(self._works, self._depths, policy, now_s)

    def oldest(self) -> dict[str, Work]:
        """Of each class with anything waiting, the work accepted first, as far as the last look went."""
        found: dict[str, Work] = {}
        for work in self._works:
            if self.depth(work.class_name):
                first = found.get(work.class_name)
                found[work.class_name] = work if first is None or work.accepted_s < first.accepted_s else first
        return found

    def typical(self, class_name: str) -> Work | None:
        """A work of the class to explain its guards by: the oldest that waits, else the latest granted; None: neither."""
        return self.oldest().get(class_name) or self._latest.get(class_name)

    def comes_before(self, work: Work, policy: Policy) -> bool:
        """True when a work of this process waits whose class has its turn no later than that of this one."""
        own = policy.place_of(work.class_name)
        return any(count and policy.place_of(name) <= own for name, count in self._here.items())
