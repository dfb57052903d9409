# SPDX-License-Identifier: Apache-2.0
"""How ranks decide together about the sizes of a graph that exchanges something, such as one with collectives.

Code for one size may exchange in another order or in other buckets than the code for any size, and what every rank
computes for itself from the same values must be the same to the last bit. So in each call all ranks of the group must
run the same code. Two things make sure of that.

**In each call all ranks see the same sizes.** No rank knows what the others see, and to ask would be to wait. So every
size must be one of a DTensor, or of a tensor that a collective exchanges: torch asks for the same shape on all ranks.

**All ranks change in the same call.** Its number is how many operations the process group has begun, which is the same
for all ranks at the same place of the program. For each size there is a `Round`, on a thread beside the calls:

1. A rank whose code is made writes the number at which the size was due. The code waits.
2. When all have, and the numbers are the same, the first rank writes the *switch*, a number that is not reached yet.
3. A rank that reads it before its calls have come so far acknowledges it. From there on its calls look at it.
4. When all have acknowledged, the first rank decides "yes", by a write that the store grants to one rank only.
5. A call at the switch or after it does what was decided. If it does not know yet, it decides "no" by the same write,
   and does what stands there then.

That is right: "yes" can stand there only after all ranks have acknowledged, so each of them looks at the decision from
the switch on; it is one value, which never changes. A rank that is late, has died or sees other sizes has not
acknowledged, so that no rank runs the code. And no rank waits for another: the thread looks into the store now and
then, for `SECONDS` at most, and a call asks it once for a switch, if it must. What is decided stays: the code is never
dropped. If a rank was late, the next switch is further ahead.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from magi_backend._torch_compat import distributed
from magi_backend.errors import BackendError

from .captured import reason_of
from .exchange import Exchange


SECONDS = 300.0
"""How long a rank whose code is made looks for the others. Then none of them runs code of its own for that size."""

AHEAD = 16
"""How many operations ahead the switch is; four times as many after each time that a rank was late."""

LEAST_PAUSE, MOST_PAUSE = 0.01, 0.25
"""How many seconds lie between two looks into the store. They grow with the time that a round takes."""

_YES, _LATE = "yes", "the calls of a rank came to the switch before it knew of it"


@dataclass(eq=False)
class Round:
    """How the ranks of a group decide about the code for one size. It is begun in the call in which the size is due.

    Attributes:
        exchange: What the graph exchanges.
        path: The graph and the size, in the store.
        refuse: Called with the reason, on any thread, if no rank will run the code.
        take: Puts the code in place; None as long as there is neither code nor a reason why not.
    """

    exchange: Exchange
    path: str
    refuse: Callable[[str], None]
    take: Callable[[], None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._began = self.exchange.operations()
        self._nonce = uuid.uuid4().hex  # what an earlier process has left in the store has another one
        self._lock = threading.Lock()
        self._switch: int | None = None
        """The switch that this rank has acknowledged, and that its calls have not come to."""
        self._place = ""
        """Where in the store the decision about it stands."""
        self._runs = False

    def offer(self, take: Callable[[], None], failure: str) -> None:
        """Ask the other ranks to run the code, which *take* puts in place; *failure* tells them why there is none."""
        self.take = take
        rounds.add(self, failure)

    def takes_over(self) -> bool:
        """Whether the code is put in place for this call and those after it.

        Raises:
            BackendError: The store does not answer, so that this rank cannot know what the others do.
        """
        with self._lock:  # so the thread acknowledges no switch that this call has come to
            if self._switch is None or self.exchange.operations() < self._switch:
                return False
            try:
                self._runs = self._runs or self._decide(distributed.store(), _LATE) == _YES
            except Exception as error:
                raise BackendError(
                    "In this call the ranks may have begun to run code of its own for a hot size, but the store of the "
                    f"process group does not answer, so this rank cannot know whether to do so too: {error}. Start all "
                    "ranks again; without magi.hot_sizes they do not need the store here."
                ) from error
            self._switch = None
            if self._runs and self.take is not None:
                self.take()
            return self._runs

    def steps(self, failure: str) -> Generator[None, None, str]:
        """What the thread does for this rank, with pauses. *failure* says why it has no code, or is empty.

        Returns why no rank will run the code, or an empty string.
        """
        members, rank, store = distributed.members(self.exchange.group), distributed.rank(), distributed.store()
        made, everyone = [f"{self.path}/made/{each}" for each in members], f"{self.path}/all"
        store.set(f"{self.path}/made/{rank}", json.dumps([self._nonce, self._began, failure]))
        if rank == members[0]:
            while not store.check(made):
                yield
            store.set(everyone, json.dumps(_compared(members, store.multi_get(made))))
        nonces, why = [], ""
        while self._nonce not in nonces:
            yield
            nonces, why = json.loads(store.get(everyone)) if store.check([everyone]) else ([], "")
        for attempt in itertools.count():
            if why:
                break
            place = f"{self.path}/{nonces[0]}/{attempt}"
            if rank == members[0]:
                store.set(f"{place}/switch", str(self.exchange.operations() + AHEAD * 4**attempt))
            while not store.check([f"{place}/switch"]):
                yield
            self._acknowledge(store, int(store.get(f"{place}/switch")), f"{place}/decision")
            store.set(f"{place}/seen/{rank}", "")
            if rank == members[0]:
                while not store.check([f"{place}/seen/{each}" for each in members]):
                    yield
                self._decide(store, _YES)
            while not store.check([f"{place}/decision"]):
                yield
            decision = self._heed(store, _LATE)
            if decision == _YES:
                break
            why = decision.replace(_LATE, "")
        return why

    def _acknowledge(self, store: Any, switch: int, place: str) -> None:
        """Let calls heed *switch*. If one that should heed it may have begun, no rank does."""
        with self._lock:
            self._place = place
            if self.exchange.operations() < switch:
                self._switch = switch
                return
        self._decide(store, _LATE)

    def _decide(self, store: Any, decision: str) -> str:
        """What is decided about the switch: *decision*, unless a rank has decided before."""
        return str(store.compare_set(self._place, "", decision).decode())

    def _heed(self, store: Any, decision: str) -> str:
        """The same; calls do not ask any more."""
        decision = self._decide(store, decision)
        with self._lock:
            self._runs = decision == _YES
            if not self._runs:
                self._switch = None
        return decision

    def give_up(self) -> str:
        """Look for the other ranks no longer. Returns why, or an empty string if they have decided after all."""
        store, members = distributed.store(), distributed.members(self.exchange.group)
        absent = [str(rank) for rank in members if not store.check([f"{self.path}/made/{rank}"])]
        who = f"the ranks {', '.join(absent)}" if absent else "all ranks"
        why = f"there was no answer from {who} for {SECONDS:.0f} s"
        with self._lock:
            is_open = self._switch is not None or self._runs
        return "" if is_open and self._heed(store, why) == _YES else why


def _compared(ranks: Sequence[int], answers: Sequence[bytes]) -> tuple[list[str], str]:
    """The nonces of *ranks*, of their *answers*, and why they do not run their code, or an empty string."""
    nonces, began, failures = map(list, zip(*map(json.loads, answers), strict=True))
    why = "" if len({*began}) == 1 else "the ranks did not see them in the same call"
    return nonces, next((f"on rank {rank}: {each}" for rank, each in zip(ranks, failures, strict=True) if each), why)


class _Rounds:
    """The thread that looks into the store for the rounds that are open. It ends with the last one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[Round, tuple[Generator[None, None, str], float]] = {}
        self._thread: threading.Thread | None = None

    def add(self, round_: Round, failure: str) -> None:
        """Ask the other ranks to run the code of *round_*, or tell them by *failure* why this one has none."""
        with self._changed:
            self._open[round_] = round_.steps(failure), time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="magi ranks", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._open:
                    self._thread = None
                    self._changed.notify_all()
                    return
                now, each_open = time.monotonic(), list(self._open.items())
            for round_, (steps, begun) in each_open:
                why: str | None = None
                try:
                    next(steps)
                    if now - begun > SECONDS:
                        why = round_.give_up()
                except StopIteration as end:
                    why = end.value
                except Exception as error:  # noqa: BLE001 - the store, the group, or the process is at its end
                    why = f"the ranks cannot decide together: {reason_of(error)}"
                if why:
                    round_.refuse(why)
                if why is not None:
                    with self._changed:
                        del self._open[round_]
            youngest = min(now - begun for _, (_, begun) in each_open)
            time.sleep(min(MOST_PAUSE, LEAST_PAUSE + youngest / 20))

    def wait(self, seconds: float | None) -> bool:
        """Wait until no round is open, for *seconds* at most. Returns whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def forget(self) -> None:
        """In the child of a fork, where this thread does not run and which has no rank of its own."""
        self.__init__()  # type: ignore[misc]


rounds = _Rounds()
os.register_at_fork(after_in_child=rounds.forget)
