# SPDX-License-Identifier: Apache-2.0
"""The entry: a captured graph compiled for any size, and for single sizes if the settings ask for it.

``magi.compile_sizes`` names sizes by input, as values of the symbols of the graph.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch.fx import GraphModule

from magi_backend._records.log import CompilationLog
from magi_backend._settings import CompileConfig
from magi_backend._torch_compat import distributed, symbols
from magi_backend._torch_compat.nodes import graph_copy
from magi_backend.errors import CompileSizesError
from magi_backend.records import SizesOutcome

from .captured import Captured, Compile, Key, Run, capture, read_inputs, solved
from .ranks import Exchange
from .table import SizeTable


logger = logging.getLogger("magi_backend")


def explicit_keys(captured: Captured, asked: Sequence[Mapping[str, Any]]) -> list[Key]:
    """The values of the size inputs of *captured* for each of the sizes *asked* for, without repetitions.

    Sizes that name no input of this graph are for another graph of the same function, as are other sizes than 0 or 1
    where this graph has these, and different sizes of an input where it was captured with equal ones.

    Raises:
        CompileSizesError: Sizes that do not fit the graph, or that leave a symbol open; or none of those asked for
            names an input of this graph.
    """
    inputs = {path: fake for path, fake in zip(captured.inputs.paths, captured.fakes, strict=True) if path}
    ours = [sizes for sizes in asked if any(path in inputs for path in sizes)]
    if asked and not ours:
        (first, *_) = (path for sizes in asked for path in sizes)
        close = get_close_matches(first, inputs, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise _refused(captured, f"no input of the graph is called {first!r}{hint}")
    return list(
        dict.fromkeys(_key(captured, sizes, inputs) for sizes in ours if not _is_elsewhere(captured, sizes, inputs))
    )


def _is_elsewhere(captured: Captured, sizes: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
    """Whether *sizes* are for another graph: this one is for a size of 0 or 1, or for equal sizes of an input."""
    for path in sizes.keys() & inputs.keys():
        pairs = [(have, number) for _, have, number in _pairs(captured, path, inputs[path], sizes[path])]
        numbers = {(have.node.expr if isinstance(have, torch.SymInt) else have, number) for have, number in pairs}
        if len({have for have, _ in numbers}) < len(numbers):
            return True
        if any(isinstance(have, int) and have in (0, 1) and have != number for have, number in pairs):
            return True
    return False


def _key(captured: Captured, sizes: Mapping[str, Any], inputs: Mapping[str, Any]) -> Key:
    values: dict[Any, int] = {}
    computed: list[tuple[str, Any, int]] = []
    ours = ((path, inputs[path], wanted) for path, wanted in sizes.items() if path in inputs)
    for where, have, number in itertools.chain.from_iterable(_pairs(captured, *each) for each in ours):
        expression = have.node.expr if isinstance(have, torch.SymInt) else None
        if expression is None:
            if have != number:
                raise _refused(captured, f"{where} is {number}, but the graph was captured with {have} fixed there")
        elif not expression.is_Symbol:
            computed.append((where, expression, number))
        elif values.setdefault(expression, number) != number:
            msg = f"{where} is {number}, but the same symbol {expression} is {values[expression]} elsewhere"
            raise _refused(captured, msg)
    for where, expression, number in computed:
        if len(expression.free_symbols - set(values)) == 1:
            values |= solved(expression.xreplace(values), number)
        found = expression.xreplace(values)
        if found != number and not found.free_symbols:
            raise _refused(captured, f"{where} is {number}, but the graph computes {found} for it")
    key = []
    for size in captured.inputs.sizes:
        value = symbols.as_int(captured.fakes[size.place], values)
        if value is None:
            raise _refused(captured, f"{dict(sizes)} leaves {size.path} ({size.symbol}) open")
        key.append(value)
    numbers = [captured.fakes[size.place] for size in captured.inputs.sizes]
    if broken := symbols.broken_guard(numbers, values):
        raise _refused(captured, f"{dict(sizes)} breaks what the graph was captured for: {broken}")
    return tuple(key)


def _pairs(captured: Captured, path: str, value: Any, wanted: Any) -> Iterator[tuple[str, Any, int]]:
    """Each size of the input *value* that is *wanted*: where it is, what it is in the graph, and its number."""
    if not isinstance(value, torch.Tensor):
        if not isinstance(wanted, int):
            raise _refused(captured, f"{path} = {wanted!r}, but it is an int")
        yield path, value, wanted
    elif isinstance(wanted, Sequence) and len(wanted) == value.dim():
        for dim, (have, number) in enumerate(zip(value.shape, wanted, strict=True)):
            yield f"{path}.shape[{dim}]", have, number
    else:
        raise _refused(captured, f"{path} = {wanted!r}, but it has {value.dim()} dimensions")


def inputs_as_text(captured: Captured) -> str:
    """The inputs of a graph that a user may name, with their shapes."""
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    inputs = []
    for node, path, value in zip(placeholders, captured.inputs.paths, captured.fakes, strict=True):
        if path and not symbols.is_parameter(node) and not path.endswith("]._base"):
            if isinstance(value, torch.Tensor):
                inputs.append(f"{path} {tuple(value.shape)}")
            elif isinstance(value, torch.SymInt) and symbols.source_kind(node) != symbols.SIZE_OF_INPUT:
                inputs.append(f"{path} {value}")
    return "; ".join(inputs)


def _refused(captured: Captured, why: str) -> CompileSizesError:
    return CompileSizesError(
        f"magi.compile_sizes: {why}. Give a shape for each tensor and a number for each int, such that every symbol of "
        f"the graph follows. Its inputs are: {inputs_as_text(captured)}"
    )


def with_sizes(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: CompileConfig,
    log: CompilationLog,
    compile_general: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    compile_static: Compile,
    hot: frozenset[Key] = frozenset(),
    exchange: Exchange | None = None,
    padded: Callable[[Key], Key] | None = None,
) -> Callable[..., Any]:
    """Compile *gm* for any size. Returns the function that also finds code for single sizes.

    *hot* are sizes that had such code in an earlier process, which caches have, and *padded* are those that a call with
    some sizes runs with. If the settings are off and no report counts sizes, it returns the code for any size itself.
    *exchange* is what the graph exchanges with other ranks.

    Raises:
        CompileSizesError: ``magi.compile_sizes`` does not fit the graph.
    """
    wanted = config.hot_sizes or config.compile_sizes or log.watched
    inputs = read_inputs(gm, example_inputs) if wanted else None
    if inputs is None or not inputs.sizes:
        return compile_general(gm, example_inputs)
    captured = capture(graph_copy(gm), example_inputs, inputs)
    general = compile_general(gm, example_inputs)
    if captured.reason:
        log.update(sizes=SizesOutcome(captured.inputs.symbols, (), 0, 0, symbolic=captured.reason))
        return general
    captured.context.finish()
    exchange = exchange and exchange.of_sizes(captured)
    if exchange and exchange.why and config.hot_sizes:
        logger.warning("%s: no size gets code because it comes back: %s", log.label, exchange.why)
    explicit = explicit_keys(captured, config.compile_sizes)

    def make(key: Key, beside_others: bool) -> Run | None:
        # What belongs to the process cannot be set for one thread.
        if beside_others and not captured.state.is_of_process():
            return None
        return symbols.boxed(captured.compiled(key, compile_static, beside_others=beside_others)[0])

    table = SizeTable(
        inputs,
        general,
        make,
        hot_sizes=config.hot_sizes,
        hot_after=config.hot_after,
        explicit=explicit if padded is None else list(dict.fromkeys(map(padded, explicit))),
        label=log.label,
        changed=log.write_counts,
        in_background=config.hot_in_background
        or distributed.ranks() > 1,  # where others would wait for a call that compiles
        hot_before=hot,
        exchange=exchange,
    )
    log.counts["sizes"] = table.outcome
    return as_saved(table.dispatch(), general)


def as_saved(dispatch: Callable[..., Any], general: Callable[..., Any]) -> Callable[..., Any]:
    """*dispatch* with what ahead-of-time compilation reads of a backend's result, to save *general*."""
    for name in ("serialize", "zero_grad", "named_parameters", "named_buffers"):
        if hasattr(general, name):
            setattr(dispatch, name, getattr(general, name))
    return dispatch
