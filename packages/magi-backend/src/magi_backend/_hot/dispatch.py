# SPDX-License-Identifier: Apache-2.0
"""Which inputs of a captured graph are sizes, and the source of the function that Dynamo calls on each call.

It reads the size inputs, looks for code for them, and calls that code with the other inputs. The source is written for
each graph, because a loop over the inputs would take longer than all of this.
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
from torch.utils import _pytree as pytree

from magi_backend._torch_compat import state, symbols
from magi_backend._torch_compat.nodes import nodes_in, source_name, tensors_of
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
