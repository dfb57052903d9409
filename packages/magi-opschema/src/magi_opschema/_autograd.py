# SPDX-License-Identifier: Apache-2.0
"""The autograd bridge: one autograd.Function for each op that calls the user's functions at the user's signature.

The Function has `setup_context` apart from `forward`, so that torch.func takes it too. It is reached in two ways:
by the kernel at the Autograd key when an input requires a gradient, and, inside torch.func transforms, by
the kernel at the key in front of them all (a Function cannot be applied below that key:
"could not find kernel for HigherOrderOperator custom_function_call").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from ._bridge import Bridge
from ._flat import Flat, FlatLayout, as_output, as_tuple
from ._gradients import FieldDict, InputShapes, lower_gradients
from ._signature import SignatureLowering
from ._torch_compat import any_requires_grad, below_autograd
from ._tree import Leaf, Node, Record, Sequence, dotted, leaves
from ._vmap import VmapRule, vmap_by_loop
from .errors import MissingBackwardError, MutationError


@dataclass(frozen=True)
class Formula:
    """The user's gradient functions."""

    setup_context_fn: Callable[..., None] | None
    backward_fn: Callable[..., Any]


class NeedsGrad(Mapping[str, bool]):
    """`ctx.needs_grad`: whether a gradient is wanted, by the dotted path of a Tensor leaf."""

    def __init__(self, index: Mapping[str, int], flags: tuple[bool, ...]) -> None:
        self._index = index
        self._flags = flags

    def __getitem__(self, path: str) -> bool:
        return self._flags[self._index[path]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def make_function(
    lowering: SignatureLowering, op: Any, formula: Formula | None, vmap_rule: Callable[[], VmapRule | None]
) -> type[torch.autograd.Function]:
    """The autograd.Function of *op*. Its arguments and outputs are flat, with lists of Tensors spread out."""
    inputs_layout = FlatLayout.of_arguments(lowering.arguments)
    outputs_layout = FlatLayout.of_outputs([leaf.schema_type for leaf in lowering.return_leaves])
    outputs_count = len(lowering.return_leaves)

    def forward(*spread: Any) -> Any:
        with below_autograd():
            output = inputs_layout.call(op, inputs_layout.gather(spread))
        return as_output(outputs_layout.spread(as_tuple(output, outputs_count)))

    def vmap(info: Any, in_dims: Any, *spread: Any) -> Any:
        rule = vmap_rule()
        if rule is None:
            return vmap_by_loop(info, in_dims, spread, apply)
        flat, dims = inputs_layout.gather(spread), inputs_layout.gather(_dims_of(in_dims, spread))
        output, out_dims = rule(info, dims, *flat)
        return as_output(outputs_layout.spread(output)), as_output(outputs_layout.spread(out_dims))

    bridge = (
        _missing_backward(lowering) if formula is None else _bridge(lowering, formula, inputs_layout, outputs_layout)
    )
    function: Any = type(
        f"{lowering.name}_function",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "vmap": staticmethod(vmap), **bridge},
    )
    apply = function.apply
    return cast("type[torch.autograd.Function]", function)


def _dims_of(in_dims: Any, spread: Flat) -> Flat:
    """*in_dims* in the layout of *spread*; the counts of lists are no values and have no dimension."""
    return tuple(
        item if isinstance(item, tuple) and isinstance(dim, tuple) else dim
        for item, dim in zip(spread, in_dims, strict=True)
    )


def _missing_backward(lowering: SignatureLowering) -> dict[str, Any]:
    def setup_context(ctx: Any, inputs: Flat, output: Any) -> None:
        """Nothing is saved: the backward only raises."""

    def backward(*_: Any) -> Any:
        text = (
            "a gradient was asked of this op, which has no backward_fn. "
            "Give it one, or call it under torch.no_grad() or on detached Tensors."
        )
        raise MissingBackwardError(lowering.sentence(text))

    return {"setup_context": staticmethod(setup_context), "backward": staticmethod(backward)}


def _bridge(lowering: SignatureLowering, formula: Formula, inputs: FlatLayout, outputs: FlatLayout) -> dict[str, Any]:
    position = {name: i for i, name in enumerate(inputs.names)}
    tensors = {
        parameter.name: [leaf for leaf in leaves(parameter.node) if leaf.is_tensor] for parameter in lowering.parameters
    }
    index = {dotted(leaf.path): position[leaf.name] for below in tensors.values() for leaf in below}
    positions = [[position[leaf.name] for leaf in below] for below in tensors.values()]
    outputs_count = len(lowering.return_leaves)
    bridge = Bridge(lowering)

    def setup_context(ctx: Any, spread: Flat, spread_output: Any) -> None:
        flat = inputs.gather(spread)
        flags = _flags(inputs, spread, ctx.needs_input_grad)
        ctx.needs_grad = NeedsGrad(index, flags)
        ctx.needs_input_grad = tuple(any(flags[i] for i in below) for below in positions)
        ctx._magi_inputs = InputShapes.of(lowering, flat)  # noqa: SLF001
        output = spread_output if outputs.tensor_lists else as_tuple(spread_output, outputs_count)
        ctx._magi_counts = output[0] if outputs.tensor_lists else None  # noqa: SLF001
        if formula.setup_context_fn is not None:
            formula.setup_context_fn(ctx, bridge.rebuild(*flat), structure(lowering.returns, outputs.gather(output)))

    def backward(ctx: Any, *spread_grads: Any) -> Any:
        grads = outputs.gather(spread_grads, ctx._magi_counts)  # noqa: SLF001
        returned = formula.backward_fn(ctx, *_positional(lowering.returns, structure(lowering.returns, grads)))
        shapes = ctx._magi_inputs  # noqa: SLF001
        found = lower_gradients(returned, lowering, shapes)
        # A list without gradients still has a place for each of its Tensors.
        for name in (inputs.names[i] for i in inputs.tensor_lists):
            if name in shapes.by_name:
                found.setdefault(name, [None] * len(shapes.by_name[name]))
        spread = inputs.spread(tuple(found.get(name) for name in inputs.names))
        return as_output((None, *spread[1:]) if inputs.tensor_lists else spread)

    return {"setup_context": staticmethod(setup_context), "backward": staticmethod(backward)}


def _flags(inputs: FlatLayout, spread: Flat, needs_input_grad: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether each flat argument needs a gradient; a list does if one of its Tensors does."""
    if not inputs.tensor_lists:
        return needs_input_grad
    gathered = inputs.gather((spread[0], *needs_input_grad[1:]))
    return tuple(any(flag) if isinstance(flag, list) else bool(flag) for flag in gathered)


def structure(node: Node | None, flat: Flat) -> Any:
    """Flat outputs, or their gradients, in the structure of the user's return: for a record, a dict by field."""
    if node is None:
        return None
    items = iter(flat)

    def build(part: Node) -> Any:
        match part:
            case Record():
                return FieldDict({field.name: build(field.node) for field in part.fields})
            case Sequence():
                return tuple(build(item) for item in part.items)
            case Leaf():
                return next(items)
        raise AssertionError(part)

    if isinstance(node, Record) and node.kind == "namedtuple":
        return tuple(build(field.node) for field in node.fields)
    return build(node)


def _positional(node: Node | None, structured: Any) -> Flat:
    """How `backward_fn` gets gradients: each item of a tuple on its own, anything else as one."""
    if node is None:
        return ()
    is_tuple = isinstance(node, Sequence) or (isinstance(node, Record) and node.kind == "namedtuple")
    return tuple(structured) if is_tuple else (structured,)


def autograd_kernel(
    lowering: SignatureLowering, op: Any, function: type[torch.autograd.Function]
) -> Callable[..., Any]:
    """The kernel at the Autograd key: through *function* where a gradient is wanted, else straight on."""
    layout = FlatLayout.of_arguments(lowering.arguments)
    is_grad_enabled, apply = torch.is_grad_enabled, function.apply
    outputs = FlatLayout.of_outputs([leaf.schema_type for leaf in lowering.return_leaves])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if is_grad_enabled() and any_requires_grad(*args, **kwargs):
            output = apply(*layout.spread(layout.fill(args, kwargs)))
            return as_output(outputs.gather(output)) if outputs.tensor_lists else output
        with below_autograd():
            return op(*args, **kwargs)

    return kernel


def transforms_kernel(lowering: SignatureLowering, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The kernel in front of torch.func transforms."""
    apply: Callable[..., Any] = function.apply
    layout = FlatLayout.of_arguments(lowering.arguments)
    outputs = FlatLayout.of_outputs([leaf.schema_type for leaf in lowering.return_leaves])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        output = apply(*layout.spread(layout.fill(args, kwargs)))
        return as_output(outputs.gather(output)) if outputs.tensor_lists else output

    return kernel


def mutation_kernel(lowering: SignatureLowering, op: Any) -> Callable[..., Any]:
    """The kernel at the Autograd key of an op that writes into its arguments."""
    layout = FlatLayout.of_arguments(lowering.arguments)
    mutated = [(layout.names.index(argument.name), dotted(argument.leaves[0].path)) for argument in lowering.mutated]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            flat = layout.fill(args, kwargs)
            for position, path in mutated:
                if any_requires_grad(flat[position]):
                    text = (
                        f"'{path}' is written into, and it requires a gradient or is part of a graph, "
                        "which would be wrong afterwards. Call the op under torch.no_grad(), on a detached Tensor, or on a buffer."
                    )
                    raise MutationError(lowering.sentence(text))
        with below_autograd():
            return op(*args, **kwargs)

    return kernel
