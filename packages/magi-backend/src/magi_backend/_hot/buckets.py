# SPDX-License-Identifier: Apache-2.0
"""Inputs that are padded to a size of ``magi.buckets``, and outputs that are cut back, so that few sizes exist.

Only dimensions that the user names are padded, with every other input that has the same size in the captured graph.
A row that is added repeats the last one, so it holds nothing that the model has not seen. Whether rows may be added at
all is decided on the graph (`rows_apart`), once. Whether a bucket fits what the graph was captured for is decided for
each size, because the guards are known only when Dynamo has finished.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from magi_backend._records.log import CompilationLog
from magi_backend._torch_compat import frames, symbols
from magi_backend._torch_compat.nodes import called_name, graph_copy, is_higher_order, nodes_in
from magi_backend._torch_compat.values import is_wrapper
from magi_backend._verify.compare import with_strides
from magi_backend.errors import BucketsError, did_you_mean
from magi_backend.records import BucketUse

from .captured import Captured, Condition, Key, capture, read_inputs, reason_of
from .entry import as_saved, inputs_as_text
from .row_walk import Found, MixesRowsError
from .rows import rows_apart


logger = logging.getLogger("magi_backend")

MOST_PLANS = 1024
"""How many sizes of calls are remembered with the sizes that they are padded to."""

Buckets = Mapping[str, Mapping[int, Sequence[int]]]


@dataclass
class Bucketed:
    """A size that is padded, with what happened to it.

    Attributes:
        place: Its position among the size inputs of the graph.
        path: The named dimension that it is.
        buckets: The sizes that it may have then, from small to large.
        found: Which rows it counts.
    """

    place: int
    path: str
    buckets: Sequence[int]
    found: Found
    calls: int = 0
    too_large: int = 0
    unfit: int = 0
    rows: int = 0
    run: int = 0

    def bucket(self, size: int) -> int:
        """The smallest bucket that *size* fits into; *size* itself if there is none."""
        place = bisect_left(self.buckets, size)
        return self.buckets[place] if size and place < len(self.buckets) else size


@dataclass(eq=False)
class Padding:
    """Pads the calls of one captured graph.

    Attributes:
        captured: The graph.
        sizes: The sizes that are padded.
        condition: For which sizes the rows stay apart; None for all.
        changed: Called when a bucket is used for the first time.
        only: Why no call is padded, or empty.
    """

    captured: Captured
    sizes: Sequence[Bucketed]
    condition: Condition | None
    changed: Callable[[], None]
    only: str = ""
    _used: set[Key] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._places = [size.place for size in self.captured.inputs.sizes]
        self._inputs = {place: self._rows(place, "inputs") for size in self.sizes for place in size.found.inputs}
        self._outputs = {place: self._rows(place, "outputs") for size in self.sizes for place in size.found.outputs}
        self._strides = {place: self._powers(self.captured.fakes[place]) for place in self._inputs}
        self._numbers = {place: size.place for size in self.sizes for place in size.found.numbers}
        self._written = {place for size in self.sizes for place in size.found.written}
        self._holds: Condition | None = None

    def _rows(self, place: int, kind: str) -> _Dims:
        given = self.captured.inputs.sizes  # torch may have found the number of one, or that it follows from others
        names = [size.symbol if size.symbol.isidentifier() else sympy.Dummy() for size in given]
        found = ((size.place, getattr(size.found, kind).get(place, {})) for size in self.sizes)
        return {dim: (size, sympy.lambdify([names], inner)) for size, rows in found for dim, inner in rows.items()}

    def _powers(self, fake: Any) -> tuple[dict[int, int], ...]:
        """How often each padded size is a factor of each stride of an input."""
        names = {size.place: self.captured.fakes[self._places[size.place]].node.expr for size in self.sizes}
        factors = [symbols.factors(stride) for stride in fake.stride()]
        return tuple({place: have[name] for place, name in names.items() if name in have} for have in factors)

    def around(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """The function that runs each call by *answer*, which gets padded inputs."""
        places, plan = self._places, functools.lru_cache(MOST_PLANS)(self._plan)

        def padded(*inputs: Any) -> Any:
            key = tuple([inputs[place] for place in places])
            try:
                wanted = plan(key)
            except TypeError:  # a symbolic size: the call is traced
                return answer(*inputs)
            self._count(key, wanted)
            return answer(*inputs) if wanted == key else self._run(answer, inputs, key, wanted)

        return as_saved(padded, answer)

    def padded_key(self, key: Key) -> Key:
        """The sizes that a call with the sizes *key* is padded to, if they fit the graph."""
        wanted = list(key)
        for size in self.sizes if not self.only else ():
            wanted[size.place] = size.bucket(key[size.place])
        return tuple(wanted)

    def _plan(self, key: Key) -> Key:
        """The sizes that a call with the sizes *key* runs with."""
        wanted = self.padded_key(key)
        return wanted if wanted == key or self._fits(key, wanted) else key

    def _fits(self, key: Key, wanted: Key) -> bool:
        """Whether the code holds for both sizes, and rows stay apart for both."""
        if self._holds is None:
            self._holds = symbols.holds([self.captured.fakes[place] for place in self._places])
        conditions = [self._holds, *([self.condition] if self.condition else [])]
        return all(condition(sizes) for condition in conditions for sizes in (key, wanted))

    def _count(self, key: Key, wanted: Key) -> None:
        with self._lock:
            for size in self.sizes:
                rows, run = key[size.place], wanted[size.place]
                size.calls, size.rows, size.run = size.calls + 1, size.rows + rows, size.run + run
                size.too_large += rows > size.buckets[-1]
                size.unfit += rows == run and rows != size.bucket(rows)
            run_with = tuple([size.bucket(key[size.place]) for size in self.sizes])
            is_new = wanted != key and run_with not in self._used
            if is_new:
                self._used.add(run_with)
        if is_new:
            self.changed()

    def _run(self, answer: Callable[..., Any], inputs: Sequence[Any], key: Key, wanted: Key) -> Any:
        given = list(inputs)
        for place, size in zip(self._places, wanted, strict=True):
            given[place] = size
        for place, rows in self._inputs.items():
            given[place] = _grown(inputs[place], rows, self._strides[place], key, wanted)
        results = list(answer(*given))
        for place in self._written:
            inputs[place].copy_(_cut(given[place], self._inputs[place], key, wanted))
        for place, rows in self._outputs.items():
            results[place] = _cut(results[place], rows, key, wanted)
        for place, size in self._numbers.items():
            results[place] = key[size]
        return tuple(results)

    def outcome(self) -> tuple[BucketUse, ...]:
        """What happened to each size until now."""
        names = self.captured.inputs.sizes
        with self._lock:
            return tuple(
                BucketUse(
                    size.path,
                    names[size.place].symbol,
                    tuple(size.buckets),
                    size.calls,
                    size.rows,
                    size.run,
                    size.too_large,
                    size.unfit,
                    self.only,
                )
                for size in self.sizes
            )


_Dims = dict[int, tuple[int, Callable[[Key], int]]]
"""For each dimension with rows the position of the size that counts them, and how many entries belong to a row.

The latter follows from all sizes.
"""


def _grown(x: Any, rows: _Dims, powers: Sequence[Mapping[int, int]], before: Key, after: Key) -> Any:
    """The input *x* with its last row repeated, of the strides that it would have with so many rows."""
    strides = list(x.stride())
    for dim, factors in enumerate(powers):
        for place, power in factors.items():
            strides[dim] = strides[dim] // before[place] ** power * after[place] ** power
    for dim, (place, _) in rows.items():
        if before[place] == after[place]:
            continue
        shape = list(x.shape)
        shape[dim] = after[place] - before[place]
        x = torch.cat([x, x.detach().narrow(dim, before[place] - 1, 1).expand(shape)], dim)
    return _laid_out(x, strides)


def _cut(x: Any, rows: _Dims, real: Key, run: Key) -> Any:
    """The output *x* without the added rows. If it had no gaps in memory, the result has none."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), dim))
    is_dense = x.numel() == 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    for dim, (place, inner) in rows.items():
        entries = inner(run)
        size, kept = run[place] * entries, real[place] * entries
        if x.shape[dim] == size:
            x = x.narrow(dim, 0, kept)
        else:
            x = x.unflatten(dim, (-1, size)).narrow(dim + 1, 0, kept).flatten(dim, dim + 1)
    strides = [1] * x.dim()
    for outer, dim in reversed(list(itertools.pairwise(order))):
        strides[outer] = strides[dim] * x.shape[dim]
    return _laid_out(x, strides) if is_dense else x


def _laid_out(x: Any, strides: Sequence[int]) -> Any:
    """*x* with these strides, itself if it has them."""
    pairs = zip(x.stride(), strides, x.shape, strict=True)
    return x if all(have == want for have, want, size in pairs if size > 1) else with_strides(x, strides)


def with_buckets(
    gm: GraphModule, example_inputs: Sequence[Any], asked: Buckets, log: CompilationLog, *, eager_random: bool
) -> Padding | None:
    """What pads the calls of *gm* to the sizes *asked* for; None if they name no size of this graph.

    With *eager_random*, random numbers must be those of eager, and a graph that draws some for each row is not padded.

    Raises:
        BucketsError: *asked* does not fit the graph, or the graph may mix the rows that would be added with others.
    """
    inputs = read_inputs(gm, example_inputs)
    if not inputs.sizes:
        return None
    symbols.capture_with_constants(gm)
    captured = capture(graph_copy(gm), example_inputs, inputs)
    wanted = _wanted(captured, asked)
    if not wanted:
        return None
    sizes: list[Bucketed] = []

    def follow(graph: GraphModule, fakes: Sequence[Any], _: str) -> Any:
        core = symbols.core_graph(graph, fakes)
        for place, (path, buckets) in wanted.items():
            found = rows_apart(core, fakes[inputs.sizes[place].place].node.expr, inputs.paths)
            sizes.append(Bucketed(place, path, buckets, found))
            if why := _why_not(captured, sizes[-1]):
                raise MixesRowsError(why)
        return core

    condition, why = None, captured.reason
    if not why:
        captured.context.finish()
        try:
            hints = tuple(int(captured.fakes[size.place].node.hint) for size in inputs.sizes)
            _, condition = captured.compiled(hints, follow, beside_others=True, for_any=True)
        except Exception as error:  # noqa: BLE001 - what cannot be taken apart is not padded
            is_known = isinstance(error, MixesRowsError)
            why = str(error) if is_known else f"nothing is known of its rows, because of {reason_of(error)}"
    if why:
        path, _ = list(wanted.values())[min(len(sizes), len(wanted) - 1)]
        refused = BucketsError(
            f"magi.buckets: {path} cannot be padded. {why}. Take it out of magi.buckets, or compile the part of the "
            "model that treats each row by itself"
        )
        if not _is_of_several_dims(captured, wanted):
            raise refused
        logger.warning(
            "%s: in this graph it is the size of several dimensions, so it runs as it is. %s", log.label, refused
        )
        sizes = [Bucketed(place, path, buckets, Found()) for place, (path, buckets) in wanted.items()]
        why = f"not padded, since it is the size of several dimensions in this graph: {why}"
    elif eager_random and any(size.found.draws for size in sizes):
        why = "not padded, because its random numbers must be those of eager"
    padding = Padding(captured, sizes, condition, log.write_counts, why)
    log.counts["buckets"] = padding.outcome
    return padding


def _is_of_several_dims(captured: Captured, wanted: Mapping[int, Any]) -> bool:
    """Whether a size is that of different dimensions of inputs, perhaps by chance: torch captures these as one size."""
    named = {captured.fakes[captured.inputs.sizes[place].place].node.expr: set[int]() for place in wanted}
    for fake in captured.fakes:
        shape: Sequence[Any] = fake.shape if isinstance(fake, torch.Tensor) else ()
        for dim, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr in named:
                named[size.node.expr].add(dim)
    return any(len(dims) > 1 for dims in named.values())


def _wanted(captured: Captured, asked: Buckets) -> dict[int, tuple[str, Sequence[int]]]:
    """Which sizes of the graph are named: the position of each among the size inputs, its path and its buckets."""
    paths = {path: fake for path, fake in zip(captured.inputs.paths, captured.fakes, strict=True) if path}
    expressions = [captured.fakes[size.place].node.expr for size in captured.inputs.sizes]
    wanted: dict[int, tuple[str, Sequence[int]]] = {}
    named = False
    for name, dims in asked.items():
        found = [path for path in paths if path == name or path.endswith(f"[{name!r}]")]
        named |= bool(found)
        for path in found:
            for dim, buckets in dims.items():
                value = paths[path]
                if not isinstance(value, torch.Tensor) or not -value.dim() <= dim < value.dim():
                    raise _unfit(captured, f"{path} has no dimension {dim}")
                text = f"{path}.shape[{dim % value.dim()}]"
                size: Any = value.shape[dim]
                if not isinstance(size, torch.SymInt):
                    continue  # the graph has a number there
                if size.node.expr not in expressions:
                    raise _unfit(captured, f"{text} is {size}, which is computed from other sizes")
                place = expressions.index(size.node.expr)
                if wanted.setdefault(place, (text, buckets))[1] != buckets:
                    msg = f"{text} and {wanted[place][0]} are the same size, and have different buckets"
                    raise _unfit(captured, msg)
    if not named and not frames.is_resumed():
        (first, *_) = asked
        close = get_close_matches(first, paths, n=1)
        raise _unfit(captured, f"no input of the graph is called {first!r}{did_you_mean(close)}")
    return wanted


def _why_not(captured: Captured, size: Bucketed) -> str:
    """Why *size* cannot be padded although its rows stay apart, or empty."""
    found, inputs = size.found, captured.inputs
    symbol = captured.fakes[inputs.sizes[size.place].place].node.expr
    if not found.inputs:
        return "torch fixes the size where it takes the operators of the graph apart"
    if size.buckets[-1] > found.most[0]:
        return f"the bucket {size.buckets[-1]} is too large: {found.most[1]}"
    for other in inputs.sizes:
        expression = captured.fakes[other.place].node.expr
        if symbol in expression.free_symbols and expression != symbol:
            return f"{other.path} is a size that is computed from it"
    for place in found.inputs:
        if is_wrapper(captured.fakes[place]):
            return f"{inputs.paths[place]} is a {type(captured.fakes[place]).__name__}"
        for stride in captured.fakes[place].stride():
            if any(symbol in factor.free_symbols and not factor.is_Symbol for factor in symbols.factors(stride)):
                return f"{inputs.paths[place]} has the stride {stride}, which is not a multiple of it"
    if found.written and (inputs.differentiates or symbols.share_memory(captured.descriptions)):
        names = ", ".join(inputs.paths[place] or inputs.names[place] for place in sorted(found.written))
        return f"the graph writes to {names}, which shares memory with other inputs, or while gradients are computed"
    if inputs.differentiates:
        own = [
            node for node in nodes_in(captured.gm) if is_higher_order(node.target) and "autograd" in called_name(node)
        ]
        if own:
            return (
                f"nothing is known of the gradient of {called_name(own[0])}, a function of its own, which may mix rows"
            )
    return ""


def _unfit(captured: Captured, why: str) -> BucketsError:
    return BucketsError(
        f"magi.buckets: {why}. Name an input, one of its dimensions, and the sizes to pad it to, such as "
        f"{{'input_ids': {{1: (128, 256)}}}}. The inputs of the graph are: {inputs_as_text(captured)}"
    )
