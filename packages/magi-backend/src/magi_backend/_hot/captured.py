# SPDX-License-Identifier: Apache-2.0
"""A graph as it was captured, the state in which it was compiled, and the code of one size made from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from magi_backend._torch_compat import state, symbols
from magi_backend._torch_compat.nodes import graph_copy, nodes_in
from magi_backend._torch_compat.state import CompileState

from .dispatch import GraphInputs, Key, solved, why_symbolic


Compile = Callable[[GraphModule, Sequence[Any], str], Callable[..., Any]]
"""Compiles a graph without symbols, given its inputs and a title."""

Run = Callable[[list[Any]], Any]
"""Code for one size: a function of a list of the inputs that are not sizes."""

Condition = Callable[[Sequence[int]], bool]
"""Whether code holds for the values of a graph's size inputs."""


def is_stream_captured() -> bool:
    """Whether the current CUDA stream is being captured into a graph, which a compilation would break."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def why_not_now() -> str:
    """Why this call must not compile, or empty."""
    if is_stream_captured():
        return "a CUDA stream is being captured"
    if state.is_compiling():
        return "the call is part of another compilation"
    if state.is_dispatch_observed():
        return "the call runs under a dispatch mode or a function transform"
    return ""


def reason_of(failure: Exception) -> str:
    """Why a size gets no code, in a line."""
    return f"{type(failure).__name__}: {failure}".partition("\n")[0]


def put_numbers(gm: GraphModule, world: symbols.FakeWorld) -> None:
    """Replace the sizes in *gm* by numbers: its inputs that are sizes, and what it computes from them.

    Sizes that *world* keeps open stay. Each other node, also in the graphs inside it, gets the example value that it
    has in that world, which passes before AOTAutograd and the splitting at boundary operators read.
    """
    nodes = [node for node in nodes_in(gm) if "example_value" in node.meta]
    numbers: dict[Node, int] = {}
    world.describe([node.meta["example_value"] for node in nodes])
    for node in nodes:
        value = node.meta["example_value"]
        is_number = isinstance(value, torch.SymInt) and node.graph is gm.graph
        if is_number and not world.knows(value):
            continue  # an int that stays an input
        node.meta["example_value"] = world.of(value)
        if is_number and not world.symbols():
            numbers[node] = node.meta["example_value"]
    for node in gm.graph.nodes:
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: numbers.get(n, n))
    for node in reversed(numbers):
        gm.graph.erase_node(node)
    gm.recompile()


@dataclass(frozen=True)
class Captured:
    """A captured graph as it was before its first compilation, which may change a graph."""

    gm: GraphModule
    inputs: GraphInputs
    fakes: tuple[Any, ...]
    """The captured inputs: fake tensors, numbers and symbols."""
    descriptions: tuple[Any, ...]
    """The same with a description of each tensor, made before the graph ran on it."""
    context: symbols.CaptureContext
    state: CompileState
    reason: str
    """Why no code can be made for single sizes, or empty."""

    def values(self, key: Key) -> dict[Any, int]:
        """The number of each symbol if the size inputs have the values *key*."""
        values: dict[Any, int] = {}
        for size, number in zip(self.inputs.sizes, key, strict=True):
            expression = self.fakes[size.place].node.expr
            if expression.is_Symbol:
                values[expression] = number
            elif len(expression.free_symbols) == 1:
                values |= {s: n for s, n in solved(expression, number).items() if s not in values}
        return values

    def compiled(
        self, key: Key, compile_graph: Compile, *, beside_others: bool, for_any: bool = False
    ) -> tuple[Callable[..., Any], Condition | None]:
        """Code for the sizes *key*, or *for_any* size with these hints, and for which sizes it holds.

        Code for any size takes all inputs, and other code those that are not sizes. None as a condition means all sizes
        that the graph was captured for. With *beside_others*, other threads go on.

        Raises:
            StaysSymbolicError: A size in the graph does not follow from *key*, or the code would need a guard: for any
                size, one on something that is not a size.
            Exception: Whatever a compiler raises.
        """
        world = symbols.FakeWorld(self.values(key))
        if for_any and key:
            world.open([self.fakes[size.place] for size in self.inputs.sizes])
        gm = graph_copy(self.gm)
        given = list(zip(self.fakes, self.descriptions, gm.graph.find_nodes(op="placeholder"), strict=True))
        if not world.symbols():
            for size in reversed(self.inputs.sizes):
                del given[size.place]
        with self.state.restored(beside_others=beside_others), self.context.compiling(world):
            inputs = [world.input(fake, description, node) for fake, description, node in given]
            put_numbers(gm, world)
            title = ", ".join(f"{size.symbol}={number}" for size, number in zip(self.inputs.sizes, key, strict=True))
            compiled = compile_graph(gm, inputs, title)
        return compiled, world.condition()


def capture(gm: GraphModule, example_inputs: Sequence[Any], inputs: GraphInputs) -> Captured:
    """*gm*, a graph that is not compiled yet, and will not be changed, with what its compilations read."""
    reason = why_symbolic(gm, example_inputs, inputs)
    fakes, descriptions = list(example_inputs), list[Any]()
    if not reason:
        try:
            fakes = symbols.fakes_of_capture(example_inputs)
            descriptions = symbols.describe(fakes)
        except (NotImplementedError, RuntimeError) as error:
            reason = f"an input cannot be described: {error}"
    context, now = symbols.CaptureContext(gm), CompileState.now()
    return Captured(gm, inputs, tuple(fakes), tuple(descriptions), context, now, reason)
