# SPDX-License-Identifier: Apache-2.0
"""A graph as it was captured, and the code of one size made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from magi_backend._torch_compat import graph_copy

from . import _torch_compat
from .inputs import GraphInputs, StaysSymbolicError, read_inputs, solved, why_symbolic
from .moment import CompileState, compile_state, restored
from .static import Twins, put_numbers


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

    from .inputs import Key

    Compile = Callable[[GraphModule, Sequence[Any], str], Callable[..., Any]]


@dataclass(frozen=True)
class Captured:
    """A captured graph as it was before its first compilation, which may change the graph.

    Attributes:
        gm: A copy of the graph.
        inputs: What its inputs are.
        fakes: The captured inputs: fake tensors, numbers and symbols.
        descriptions: The same with a description of each tensor, made before the graph ran on it.
        context: The context that Dynamo compiled it in.
        state: The state that it was compiled in.
        reason: Why no code can be made for single sizes, or empty.
    """

    gm: GraphModule
    inputs: GraphInputs
    fakes: tuple[Any, ...]
    descriptions: tuple[Any, ...]
    context: _torch_compat.CaptureContext
    state: CompileState
    reason: str

    def values(self, key: Key) -> dict[Any, int]:
        """The number of each symbol if the size inputs have the values *key*."""
        values: dict[Any, int] = {}
        for size, number in zip(self.inputs.sizes, key, strict=True):
            expression = _torch_compat.expression(self.fakes[size.place])
            if expression.is_Symbol:
                values[expression] = number
            elif len(expression.free_symbols) == 1:
                values |= {s: n for s, n in solved(expression, number).items() if s not in values}
        return values

    def title(self, key: Key) -> str:
        """The sizes in *key* with their names, for the report."""
        return ", ".join(f"{size.symbol}={number}" for size, number in zip(self.inputs.sizes, key, strict=True))

    def compiled(self, key: Key, compile_static: Compile) -> Callable[[list[Any]], Any]:
        """Code for the sizes *key*: a function of a list of the other inputs.

        Raises:
            StaysSymbolicError: A size in the graph does not follow from *key*, or the code would need a guard.
            Exception: Whatever a compiler raises.
        """
        values, world = self.values(key), _torch_compat.FakeWorld()
        gm = graph_copy(self.gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        places = {size.place for size in self.inputs.sizes}
        with restored(self.state), self.context.compiling(world):
            twins = Twins(values, world)
            inputs = [
                self._input(place, node, twins, world) for place, node in enumerate(placeholders) if place not in places
            ]
            put_numbers(gm, values, world)
            compiled = compile_static(gm, inputs, self.title(key))
        if assumed := world.assumptions():
            msg = f"its code would need a guard that the captured graph does not have: {assumed[0]}"
            raise StaysSymbolicError(msg)
        return _torch_compat.boxed(compiled)

    def _input(self, place: int, node: Any, twins: Twins, world: _torch_compat.FakeWorld) -> Any:
        value, captured = self.descriptions[place], self.fakes[place]
        if isinstance(value, torch.SymInt):
            return world.open_int(value, node)
        if not _torch_compat.is_description(value):
            return value
        twin = twins.of_description(value)
        world.remember_number(twin, captured, node)
        return twin


def capture(gm: GraphModule, example_inputs: Sequence[Any]) -> Captured | None:
    """A copy of *gm*, a graph that is not compiled yet; None if none of its inputs is a size."""
    inputs = read_inputs(gm, example_inputs)
    if not inputs.sizes:
        return None
    reason = why_symbolic(gm, example_inputs, inputs)
    fakes: tuple[Any, ...] = tuple(example_inputs)
    descriptions: tuple[Any, ...] = ()
    if not reason:
        try:
            fakes = tuple(_torch_compat.fakes_of_capture(example_inputs))
            descriptions = tuple(_torch_compat.describe(fakes))
        except (NotImplementedError, RuntimeError) as error:
            reason = f"an input cannot be described: {error}"
    return Captured(
        gm=graph_copy(gm),
        inputs=inputs,
        fakes=fakes,
        descriptions=descriptions,
        context=_torch_compat.CaptureContext(gm),
        state=compile_state(),
        reason=reason,
    )
