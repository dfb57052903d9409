# SPDX-License-Identifier: Apache-2.0
"""``magi.check``: the first call of each compiled piece and of each body of its operators, and the operator to blame.

An operator is to blame if its compiled result, or gradient, differs from eager although its inputs are those of eager.
The graph is cut into parts that are compiled side by side in one graph and compute from eager values, so each is judged
separately: errors of earlier operators never reach it, and all parts of one cut cost one compilation. The first wrong
part is cut again, until it is one operator. If no part is wrong, the difference needs several operators together; then
the range is shortened from both ends while it stays wrong.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import magi_opschema
import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from magi_backend import _torch_compat
from magi_backend._register import registered
from magi_backend._torch_compat.nodes import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE
from magi_backend._torch_compat.values import storage_id
from magi_backend.errors import MismatchError

from .compare import (
    Difference,
    Outcome,
    alone,
    copy_inputs,
    differences,
    leaves_of,
    replayed_random_numbers,
    run,
    run_eager,
    states_of,
    tensors_of,
    with_leaves,
)


Unit = tuple[Node, ...]
"""Calls that a cut cannot separate; nearly always a single one."""


@dataclass(frozen=True)
class Part:
    """Consecutive calls of a graph."""

    nodes: tuple[Node, ...]
    before: tuple[Node, ...]
    """Calls before it that switch on a mode, such as autocast, that is still on where it starts."""
    given: tuple[Node, ...]
    """The values that it reads but does not compute; constants of the graph are copied with it, as *constants*."""
    constants: tuple[Node, ...]
    leaving: tuple[Node, ...]
    """Those of its values that are read after it."""


def units(gm: GraphModule) -> tuple[Unit, ...]:
    """The calls of *gm* in order, grouped if they cannot be separated.

    An item of a tuple is grouped with the call that made the tuple, if it follows directly. Calls between two calls
    that open and close a level of ``torch.func`` form one group.
    """
    found: list[list[Node]] = []
    depth = 0
    for node in gm.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        opened = _torch_compat.nodes.nesting(node)
        if found and (depth or _torch_compat.nodes.tuple_of(node) in found[-1]):
            found[-1].append(node)
        else:
            found.append([node])
        depth += opened
    return tuple(map(tuple, found))


def part_of(gm: GraphModule, chosen: Iterable[Unit]) -> Part:
    """The part of *gm* that consists of *chosen*, which must be consecutive."""
    nodes = tuple(node for unit in chosen for node in unit)
    inside = set(nodes)
    read = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside)
    before = tuple(_modes_on(gm, nodes[0]))
    given = tuple(node for node in read if node not in before and node.op != "get_attr")
    constants = tuple(node for node in read if node.op == "get_attr")
    read_later = (node for node in nodes if not node.users or any(user not in inside for user in node.users))
    leaving = tuple(node for node in read_later if any(tensors_of(node.meta.get("example_value"))))
    return Part(nodes, before, given, constants, leaving)


def _modes_on(gm: GraphModule, first: Node) -> Iterator[Node]:
    """The calls before *first* that switched on a mode that is still on at *first*."""
    grad_mode = None
    regions: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node is first:
            break
        if node.target is SET_GRAD_MODE:
            grad_mode = node
        elif node.target is ENTER_AUTOCAST:
            regions[node] = None
        elif node.target is EXIT_AUTOCAST:
            regions.pop(node.args[0], None)
    if grad_mode is not None:
        yield grad_mode
    yield from regions


def side_by_side(gm: GraphModule, parts: Sequence[Part], entered: Sequence[Entered]) -> GraphModule:
    """One graph with a copy of each of *parts*.

    Its inputs are the values that *entered* them, its output a tuple for each.
    """
    graph = Graph()
    given = [
        {node: graph.placeholder(f"part{index}_{node.name}") for node in part.given} for index, part in enumerate(parts)
    ]
    outputs = []
    for part, known, each in zip(parts, given, entered, strict=True):
        # A compiled graph that writes to an input cannot always differentiate it, although it could inside a larger
        # graph.
        copied = [node for node, place in zip(part.given, each.copied, strict=True) if place]
        known |= {node: graph.call_method("clone", (known[node],)) for node in copied}
        outputs.append((*_copied(part, known, graph), *(known[node] for node in copied)))
    graph.output(tuple(outputs))
    return GraphModule(gm, graph)


def _copied(part: Part, known: dict[Node, Node], graph: Graph) -> tuple[Any, ...]:
    for node in (*part.constants, *part.before, *part.nodes):
        known[node] = graph.node_copy(node, known.__getitem__)
    outputs = tuple(_tensors_in(known[node], node.meta.get("example_value"), graph) for node in part.leaving)
    for node in reversed((*part.before, *part.nodes)):
        closed = any(user.target is EXIT_AUTOCAST and user in known for user in node.users)
        if node.target is ENTER_AUTOCAST and not closed:
            graph.call_function(EXIT_AUTOCAST, (known[node],))
    if any(node.target is SET_GRAD_MODE for node in (*part.before, *part.nodes)):
        graph.call_function(SET_GRAD_MODE, (torch.is_grad_enabled(),))
    return outputs


def _tensors_in(node: Node, value: Any, graph: Graph) -> Any:
    """*node*, or its items if it is a tuple, because a compiled graph returns only tensors."""
    if not isinstance(value, tuple | list):
        return node
    items = (graph.call_function(operator.getitem, (node, index)) for index in range(len(value)))
    return tuple(_tensors_in(item, each, graph) for item, each in zip(items, value, strict=True))


@dataclass(frozen=True)
class Entered:
    """The values that entered a part, as they were when it started, detached from any autograd graph."""

    values: tuple[Any, ...]
    copied: tuple[bool, ...]
    """Whether the part works on a copy of the value, which is then one of its outputs."""


class _Recorder(Interpreter):
    """Runs a graph, and keeps the values that enter each of *parts*."""

    def __init__(self, gm: GraphModule, parts: Sequence[Part]) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._parts = parts
        self._values: dict[int, tuple[Any, ...]] = {}
        self._copies: dict[int, tuple[Any, ...]] = {}
        self._states: dict[int, object] = {}
        self._written: set[int] = set()

    def run_node(self, node: Node) -> Any:
        for index, part in enumerate(self._parts):
            if node is part.nodes[0]:
                self._values[index] = tuple(self.env[each] for each in part.given)
                self._copies[index], _ = copy_inputs(self._values[index])
                self._states[index] = states_of(self._values[index])
        value = super().run_node(node)
        for index, part in enumerate(self._parts):
            if node is part.nodes[-1] and states_of(self._values[index]) != self._states[index]:
                self._written.add(index)
        return value

    def entered(self, index: int) -> Entered:
        """The values that entered part *index*, which require gradients like the originals.

        Values that share memory share it here only if the part writes, because gradients through shared memory cannot
        be told apart.
        """
        written = index in self._written
        pairs = zip(leaves_of(self._copies[index]), leaves_of(self._values[index]), strict=True)
        leaves = iter(
            [
                (twin.detach() if written else alone(twin)).requires_grad_(value.requires_grad)
                if isinstance(value, torch.Tensor)
                else twin
                for (_, twin), (_, value) in pairs
            ]
        )
        values = tuple(with_leaves(self._copies[index], lambda _: next(leaves)))
        for node, value in zip(self._parts[index].given, values, strict=True):
            captured = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and isinstance(captured, torch.Tensor):
                for dim, size in enumerate(captured.shape):
                    if isinstance(size, int):  # a constant in the capture is one here
                        _torch_compat.values.fix_size(value, dim)
        sharing = Counter(storage_id(tensor) for _, tensor in tensors_of(values))
        copied = (
            written and isinstance(value, torch.Tensor) and value.requires_grad and sharing[storage_id(value)] == 1
            for value in values
        )
        return Entered(values, tuple(copied))


Compile = Callable[[GraphModule], Callable[..., Any]]

WAYS = 16
"""Into how many parts a range is cut."""
AT_ONCE = 24
"""A range of at most so many operators is cut into single ones."""
TYPICAL, MOST = 1.5, 3.0
"""What a search compiles, in multiples of the operators of the graph: a typical value, and the limit."""
SMALL = 4 * AT_ONCE
"""So many operators may always be compiled, because in small graphs the limit would end a search that costs little."""


def first_operator(gm: GraphModule, args: tuple[Any, ...], compile_part: Compile, *, gradients: bool) -> str:
    """A sentence on the operator of *gm* whose output, or with *gradients* whose gradient, differs for inputs *args*.

    *compile_part* compiles a graph that consists of a part of *gm*.
    """
    whole = units(gm)
    search = _Search(gm, args, compile_part, gradients=gradients, left=max(int(MOST * len(whole)), SMALL))
    span = search.narrow(whole)
    if len(span) == 1:
        direction = " on the way back from the outputs" if gradients else ""
        return f"The first operator that differs{direction} is {described(span[0])}."
    if len(span) == len(whole):
        return "No shorter part of it differs when it is compiled separately, so only the whole piece goes wrong."
    return (
        f"It is among {len(span)} operators that differ when they are compiled together, and of which no part was "
        f"found to differ by itself: from {described(span[0])} to {described(span[-1])}."
    )


@dataclass
class _Search:
    """One search, with the operators that it may still compile."""

    gm: GraphModule
    args: tuple[Any, ...]
    compile_part: Compile
    gradients: bool
    left: int

    @functools.cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of the tensors in the whole graph, whose errors a part of it may have."""
        return _torch_compat.nodes.dtypes_in(self.gm)

    def narrow(self, span: tuple[Unit, ...]) -> tuple[Unit, ...]:
        """The shortest range in *span* that was found to differ."""
        alone_right = False
        while len(span) > 1 and self.left >= len(span):
            count = len(span) if len(span) <= AT_ONCE else WAYS
            bounds = itertools.pairwise(len(span) * index // count for index in range(count + 1))
            wrong = None if alone_right else self._wrong([span[start:end] for start, end in bounds])
            if wrong is None:
                alone_right = alone_right or len(span) <= AT_ONCE
                wrong = self._wrong_without_an_end(span)
            if wrong is None:
                return span
            span = wrong
        return span

    def _wrong_without_an_end(self, span: tuple[Unit, ...]) -> tuple[Unit, ...] | None:
        """*span* without its last or first quarter, whichever is still wrong."""
        quarter = max(len(span) // 4, 1)
        candidates = [part for part in (span[:-quarter], span[quarter:]) if len(part) > 1]
        return self._wrong(candidates) if candidates and self.left >= sum(map(len, candidates)) else None

    def _wrong(self, candidates: Sequence[tuple[Unit, ...]]) -> tuple[Unit, ...] | None:
        """The first of *candidates* that differs; for gradients the last, because the backward reaches that first."""
        self.left -= sum(map(len, candidates))
        parts = [part_of(self.gm, units) for units in candidates]
        found = [units for units, differ in zip(candidates, self._differ(parts), strict=True) if differ]
        if not found:
            return None
        return found[-1] if self.gradients else found[0]

    def _differ(self, parts: Sequence[Part]) -> list[bool]:
        recorder = _Recorder(self.gm, parts)
        recorder.run(*copy_inputs(self.args)[0])
        entered = [recorder.entered(index) for index in range(len(parts))]
        together = side_by_side(self.gm, parts, entered)
        flat = tuple(value for each in entered for value in each.values)
        compiled = self.compile_part(_torch_compat.nodes.graph_copy(together))
        with replayed_random_numbers() as numbers:
            eager = run_eager(together, flat, numbers.rewind)
            numbers.rewind()
            actual, expected = eager.settle(run(compiled, flat)), eager.outcome
        verdicts, start = [], 0
        for index, each in enumerate(entered):
            places = range(start, start + len(each.values))
            ours, theirs = (_outcome(each, index, places) for each in (actual, expected))
            found = differences(ours, theirs, kind="input", computed_in=self.dtypes)
            wrong = [difference for difference in found if not difference.agrees]
            verdicts.append(any(self.gradients or not d.name.startswith("gradient") for d in wrong))
            start = places.stop
        return verdicts


def _outcome(outcome: Outcome, index: int, places: range) -> Outcome:
    """The part of *outcome* that belongs to part *index*, whose inputs are those at *places*."""
    prefixes = tuple(f"[0][{place}]" for place in places)
    return replace(
        outcome,
        outputs=outcome.outputs[index],
        inputs=tuple(outcome.inputs[0][place] for place in places),
        written=frozenset(path for path in outcome.written if path.startswith(prefixes)),
        gradients={path: gradient for path, gradient in outcome.gradients.items() if path.startswith(prefixes)},
    )


def described(unit: Unit) -> str:
    """The operator, and the innermost line of user code that called it."""
    node: Node = unit[0]
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    calls = [index for index, line in enumerate(lines) if line.startswith("File ")]
    if not calls:
        return f"{target} (node {node.name})"
    where, code = lines[calls[-1]], lines[calls[-1] + 1 :][:1]
    return f"{target} (node {node.name}), {where}: {' '.join(code)}"


_ROOT = re.compile(r"[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def input_names(gm: GraphModule) -> dict[str, str]:
    """The name of each input of *gm* by its placeholder: the name of a parameter in its module, or that of an argument.

    Inputs whose source Dynamo does not give are left out.
    """
    return {
        str(node.target): name
        for node in gm.graph.find_nodes(op="placeholder")
        if (name := readable(_torch_compat.nodes.source_name(node)))
    }


def readable(source: str) -> str:
    """*source*, Dynamo's Python expression for a value, as its owner would write it; empty if it cannot be parsed.

    Example:
        >>> readable("L['self']._modules['blocks']._modules['0']._parameters['weight']")
        'blocks.0.weight'
        >>> readable("L['cfg'].scale")
        'cfg.scale'
    """
    root = _ROOT.match(source)
    if root is None:
        return ""
    path = _MEMBER.sub(r".\1", source[root.end() :])
    return path.removeprefix(".") if root[1] == "self" and path else root[1] + path


logger = logging.getLogger("magi_backend")


@dataclass(eq=False)
class CheckedPiece:
    """A compiled piece that compares its first call with *eager*, the graph that it was compiled from."""

    compiled: Callable[..., Any]
    eager: GraphModule
    title: str
    names: Mapping[str, str]
    """The names of inputs, by placeholder, of those that have a name."""
    blame: Callable[[tuple[Any, ...], bool], str]
    """Finds the first operator that differs, given the inputs and whether a gradient differs."""
    report: Callable[[str, tuple[Difference, ...]], None]
    seconds: float
    """How long compiling the piece took so far; a backward is compiled in the first call."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _checked: bool = False

    def __call__(self, *args: Any) -> Any:
        """Call the compiled piece; before that, check it, until one check has succeeded."""
        with self._lock:
            first, self._checked = not self._checked, True
        if first:
            try:
                self._check(args)
            except BaseException:
                self._checked = False  # after a wrong or unfinished check, the next call is checked again
                raise
        return self.compiled(*args)

    def _check(self, args: tuple[Any, ...]) -> None:
        placeholders = [str(node.target) for node in self.eager.graph.find_nodes(op="placeholder")]
        names = {f"[0][{place}]": self.names.get(name, name) for place, name in enumerate(placeholders)}
        dtypes = _torch_compat.nodes.dtypes_in(self.eager)
        with replayed_random_numbers() as numbers:
            expected = run_eager(self.eager, args, numbers.rewind, _listed)

            def wrong_of(fn: Callable[..., Any], title: str) -> tuple[Difference | None, float]:
                numbers.rewind()
                actual = expected.settle(run(lambda *args: _listed(fn(*args)), args))
                found = differences(actual, expected.outcome, kind="input", names=names, computed_in=dtypes)
                self.report(title, found)
                return next((difference for difference in found if not difference.agrees), None), actual.seconds

            wrong, seconds = wrong_of(self.compiled, self.title)
            for op, body in () if wrong else _other_bodies(self.eager):
                of = f"the body '{body}' of {op}"
                with magi_opschema.use_implementation(op, body):
                    other, _ = wrong_of(self.eager, f"{self.title}, {of}")
                if other is not None:
                    raise MismatchError(f"magi.check: {self.title}: {_how(other, f'eager code with {of}')}")
        if wrong is not None:
            msg = f"magi.check: {self.title}: {_how(wrong, 'the compiled code')}"
            seconds += self.seconds
            cost = f"about {TYPICAL * seconds:.0f} s, at most about {MOST * seconds:.0f} s"
            logger.warning("%s Searching for the operator, which takes %s.", msg, cost)
            try:
                culprit = self.blame(args, wrong.name.startswith("gradient"))
            except Exception as error:
                logger.warning("The search failed.", exc_info=True)
                culprit = f"The search for the operator failed with {type(error).__name__}: {error}"
            raise MismatchError(f"{msg} {culprit}")


def _other_bodies(gm: GraphModule) -> Iterator[tuple[str, str]]:
    """The operators of *gm* that have several bodies, each with the name of each body."""
    called = dict.fromkeys(node.target for node in _torch_compat.nodes.nodes_in(gm))
    for known in filter(None, map(registered, called)):
        bodies = [one.name for one in known.implementations]
        yield from ((known.name, body) for body in ([*bodies, "default"] if bodies else ()))


def _how(wrong: Difference, code: str) -> str:
    size = f"by {wrong.largest:.3g}" if not wrong.note else f": {wrong.note}"
    allowed = f"{wrong.tolerance.atol:.1g} + {wrong.tolerance.rtol:.1g} x the value"
    return f"{wrong.name} of {code} differs from eager {size} (allowed: {allowed})."


def _listed(outputs: Any) -> list[Any]:
    """The leaves of *outputs*, because a piece returns a tuple and its compiled code a list."""
    return [leaf for _, leaf in leaves_of(outputs)]
