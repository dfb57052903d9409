# SPDX-License-Identifier: Apache-2.0
"""A graph as it was captured: which of its inputs are sizes, its code for one size, and what chooses code at each call.

The function that Dynamo calls reads the size inputs, looks for code for them, and calls that code with the other
inputs. Its source is written for each graph, because a loop over the inputs would take longer than all of this.
"""

from __future__ import annotations

import itertools
import linecache
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from magi_backend._torch_compat import state, symbols
from magi_backend._torch_compat.nodes import graph_copy, nodes_in, source_name, tensors_of
from magi_backend._torch_compat.state import CompileState
from magi_backend._torch_compat.values import float_memo


Key = tuple[int, ...]
"""The values of a graph's size inputs in one call, in the order of the inputs."""


@dataclass(frozen=True)
class SizeInput:
    """An input of a graph that is an int, and decides which code a call takes.

    Attributes:
        place: Its position among the inputs.
        symbol: Its symbol, for example ``s27``.
        path: Which argument of the caller it comes from: ``x.size()[0]``, or ``n`` for an argument that is an int.
    """

    place: int
    symbol: str
    path: str


@dataclass(frozen=True)
class GraphInputs:
    """The inputs of a captured graph.

    Attributes:
        names: The name of each placeholder.
        paths: Which argument of the caller each input comes from; empty for inputs that come from none.
        sizes: The ints that decide which code a call takes. An int that torch was asked to leave open, such as the
            handle of an object, is not among them.
        differentiates: Whether a backward may follow a call.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    sizes: tuple[SizeInput, ...]
    differentiates: bool

    @property
    def symbols(self) -> tuple[tuple[str, str], ...]:
        """Each size's symbol and path."""
        return tuple((size.symbol, size.path) for size in self.sizes)


def read_inputs(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphInputs:
    """The inputs of *gm*; *example_inputs* holds a value or a symbol for each."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    paths = tuple(_path(node) for node in placeholders)
    tensors = (tensor for node in gm.graph.nodes for tensor in tensors_of(node))
    in_shapes = {symbol for tensor in tensors for symbol in symbols.free_symbols(tensor)}
    sizes = tuple(
        SizeInput(place, str(value), paths[place] or str(value))
        for place, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
        if isinstance(value, torch.SymInt)
        and (symbols.free_symbols(value) & in_shapes or symbols.source_kind(node) != symbols.LEFT_OPEN)
    )
    trained = any(isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs)
    return GraphInputs(tuple(node.name for node in placeholders), paths, sizes, trained and torch.is_grad_enabled())


def _path(placeholder: Node) -> str:
    match = re.fullmatch(r"L\['(\w+)'\](.*)", source_name(placeholder))
    return f"{match[1]}{match[2]}" if match else ""


def why_symbolic(gm: GraphModule, example_inputs: Sequence[Any], inputs: GraphInputs) -> str:
    """Why code for single sizes of *gm* cannot be made; empty if it can.

    Every symbol in the graph must follow from the inputs. Neither a symbol for a size that depends on data nor the
    ragged size of a nested tensor does.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    known: set[Any] = set()
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(value, torch.SymFloat | torch.SymBool):
            return f"its input {node.name} is a symbolic {type(value).__name__.removeprefix('Sym').lower()}"
        is_size = isinstance(value, torch.SymInt)
        # A float argument is a tensor that Dynamo reads with ``.item()``.
        known |= symbols.free_symbols(value if is_size else float_memo(node.meta.get("example_value")))
    for place in (size.place for size in inputs.sizes):
        if example_inputs[place].node.is_nested_int():
            return f"{inputs.paths[place] or placeholders[place].name} is the ragged size of a nested tensor"
    for node in nodes_in(gm):
        leaves = pytree.tree_leaves(node.meta.get("example_value"))
        unknown = {symbol for leaf in leaves for symbol in symbols.free_symbols(leaf)} - known
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            return f"the size or number {names} of {node.name} is known only when the operator has run"
    return ""


def solved(expression: Any, value: int) -> dict[Any, int]:
    """The one int for the symbol of *expression* for which it is *value*; empty unless there is exactly one."""
    (symbol,) = expression.free_symbols
    found = [root for root in sympy.solve(sympy.Eq(expression, value), symbol) if root.is_integer]
    return {symbol: int(found[0])} if len(found) == 1 else {}


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


_numbers = itertools.count()

MOST_PARAMETERS = 64
"""With more inputs than this, one tuple of all of them is faster than a parameter for each."""


def dispatch_source(inputs: GraphInputs, name: str) -> str:
    """The source of a function that makes the function *name* of the graph's inputs."""
    places = {size.place for size in inputs.sizes}
    if len(inputs.names) <= MOST_PARAMETERS:
        names = [f"size{place}" if place in places else f"input{place}" for place in range(len(inputs.names))]
        parameters = whole = ", ".join(names)
        values = [names[size.place] for size in inputs.sizes]
        kept = [f"inputs = [{', '.join(name for place, name in enumerate(names) if place not in places)}]"]
    else:
        parameters, whole = "*args", "*args"
        values = [f"args[{size.place}]" for size in inputs.sizes]
        dropped = ", ".join(f"inputs[{size.place}]" for size in reversed(inputs.sizes))
        kept = ["inputs = list(args)", f"del {dropped}"]
    under_hooks = [
        "hooks = saved_tensor_hooks(True)",
        "if hooks is not None:",
        f"    return under_hooks(hooks, key, ({whole},))",
    ]
    body = [
        f"key = ({', '.join(values)},)  # {', '.join(size.path for size in inputs.sizes)}",
        *(under_hooks if inputs.differentiates else ()),
        "try:",
        "    code = find(key)",
        "except TypeError:  # a symbolic size: the call is traced",
        f"    return general({whole})",
        "if code is None:",
        f"    return other(key, ({whole},))",
        "code.hits += 1",
        *kept,
        "return code.run(inputs)",
    ]
    lines = [
        "def make(find, other, general, under_hooks, saved_tensor_hooks):",
        f"    def {name}({parameters}):",
        *(f"        {line}" for line in body),
        "",
        f"    return {name}",
    ]
    return "\n".join(lines) + "\n"


def make_dispatch(inputs: GraphInputs, label: str, **parts: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, whose source is shown in tracebacks.

    *parts* are the values that its source uses, by name.
    """
    name = "sizes_of_" + re.sub(r"\W+", "_", label).strip("_").lower()
    source = dispatch_source(inputs, name)
    file = f"<magi_backend sizes {label} {next(_numbers)}>"
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec"), namespace)  # noqa: S102 - it is written above
    dispatch: Callable[..., Any] = namespace["make"](saved_tensor_hooks=state.top_saved_tensor_hooks, **parts)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    weakref.finalize(dispatch, linecache.cache.pop, file, None)
    return dispatch
