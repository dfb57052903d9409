# SPDX-License-Identifier: Apache-2.0
"""What a captured graph exchanges with other ranks, and how they decide together about its sizes if it does.

A rank decides alone about a graph that exchanges nothing: no other rank waits for anything in it, so none sees which
code it runs. Of any other graph, such as one with collectives, code for one size may exchange in another order or in
other buckets than the code for any size, and what every rank computes for itself from the same values must be the same
to the last bit. So in each call all ranks of the group must run the same code. Two things make sure of that.

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

import hashlib
import inspect
import itertools
import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from magi_backend._register import registered
from magi_backend._split import boundary_overloads, is_boundary
from magi_backend._torch_compat import distributed, symbols, values
from magi_backend._torch_compat.nodes import is_higher_order, nodes_in, operator_name, tensors_of
from magi_backend.errors import BackendError

from .captured import Captured, reason_of


_ALIKE = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
"""The collectives that take tensors of the same shape on all ranks."""

_OF_TORCH = ("aten", "prim", "prims", "rngprims", "inductor", "profiler", "quantized", "quantized_decomposed")
"""The namespaces of torch's operators that exchange nothing."""


@dataclass(frozen=True)
class Exchange:
    """What a captured graph exchanges with other ranks.

    Attributes:
        why: Why the ranks cannot decide together about its sizes, or empty.
        group: The name of the process group.
        device: The type of device of the tensors that are exchanged.
        alike: The symbols that have the same value on all ranks.
        path: The graph, in the store.
    """

    why: str = ""
    group: str = ""
    device: str = ""
    alike: frozenset[Any] = frozenset()
    path: str = ""

    def of_sizes(self, captured: Captured) -> Exchange:
        """The same, with a reason if a size may be another one on another rank in the same call."""
        for size in captured.inputs.sizes:
            if not self.why and not symbols.free_symbols(captured.fakes[size.place]) <= self.alike:
                why = (
                    f"ranks may see different {size.path} ({size.symbol}) in one call: it is a size of no DTensor, nor "
                )
                return replace(self, why=f"{why}of what a collective that needs the same shape on all ranks exchanges")
        return self

    def operations(self) -> int:
        """The number of operations that the group has begun."""
        return distributed.operations(self.group, self.device)


def exchange_of(gm: GraphModule, boundary_ops: Sequence[str]) -> Exchange | None:
    """What the captured graph *gm* exchanges with other ranks; None if nothing.

    What happens outside of the graph, such as what DDP and FSDP2 do around it, is not part of it. Neither is a boundary
    operator, one of *boundary_ops* or another: the graph is cut there, and it is called in its place by all code.
    """
    if distributed.ranks() == 1:
        return None
    named, found = boundary_overloads(boundary_ops), dict[str, Exchange]()
    for node in nodes_in(gm):
        runs_always = node.graph is gm.graph
        exchange = None if runs_always and is_boundary(node, named) else _exchange(node)
        if exchange is not None and exchange.why:
            return exchange
        if exchange is not None:
            before = found.get(exchange.group, Exchange()).alike
            found[exchange.group] = replace(exchange, alike=before | exchange.alike if runs_always else before)
    if len(found) > 1:
        return Exchange(f"it exchanges in {len(found)} process groups, which do not count together")
    for exchange in found.values():
        try:
            exchange.operations()
        except Exception as error:  # noqa: BLE001 - each kind of group has its own
            return Exchange(f"its process group does not count what it does: {reason_of(error)}")
        return replace(exchange, path=_path(gm, exchange))
    return None


_captured: Counter[str] = Counter()


def _path(gm: GraphModule, exchange: Exchange) -> str:
    """What to call *gm* in the store: by its nodes, its ranks, and how many such graphs were captured before it.

    If that is not the same on all ranks, they do not decide together.
    """
    nodes = [(node.name, [tuple(each.shape) for each in tensors_of(node)]) for node in nodes_in(gm)]
    digest = hashlib.sha256(f"{distributed.members(exchange.group)} {nodes}".encode()).hexdigest()[:16]
    path = f"magi/{digest}"
    _captured[path] += 1
    return f"{path}/{_captured[path]}"


def _exchange(node: Node) -> Exchange | None:
    """What *node* exchanges with other ranks, if anything."""
    tensors = tensors_of(node)
    for wrapper in filter(values.is_wrapper, tensors):
        group = distributed.group_of_wrapper(wrapper)
        if group is None:
            return Exchange(f"{node.name} is a {type(wrapper).__name__}, whose operators may wait for other ranks")
        return Exchange(group=group, device=wrapper.device.type, alike=_alike(tensors))
    if node.op != "call_function":
        return None
    namespace, _, name = operator_name(node.target).partition("::")
    if namespace.startswith("_c10d_functional"):
        if name == "wait_tensor":
            return None
        names = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, str)]
        given = [tensor for each in node.all_input_nodes for tensor in tensors_of(each)]
        if not names or not given:
            return Exchange(f"which ranks {namespace}::{name} waits for cannot be read from it")
        takes_alike = name.rstrip("_").removesuffix("_coalesced").removesuffix("_out") in _ALIKE
        return Exchange(group=names[-1], device=given[0].device.type, alike=_alike(given if takes_alike else ()))
    if namespace:
        definition = registered(node.target)
        is_local = definition is not None and "subgraph_boundary" not in definition.traits
        may_wait = namespace not in _OF_TORCH and not is_local
        name = f"{namespace}::{name}"
    else:
        module, name = str(getattr(node.target, "__module__", "")), getattr(node.target, "__qualname__", node.name)
        is_local = module.partition(".")[0] in ("torch", "math", "einops") and not module.startswith(
            "torch.distributed"
        )
        may_wait = not (is_local or inspect.isbuiltin(node.target) or is_higher_order(node.target))
    way_out = "name an operator in magi.boundary_ops, and it is called outside of compiled code"
    return Exchange(f"whether {name} waits for other ranks cannot be read from it; {way_out}") if may_wait else None


def _alike(tensors: Sequence[torch.Tensor]) -> frozenset[Any]:
    """The symbols that are a size of one of *tensors*, or a multiple of which is."""
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    each = ((size.node.expr, symbol) for size in sizes for symbol in symbols.free_symbols(size))
    return frozenset(symbol for expression, symbol in each if (expression / symbol).is_number)


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
