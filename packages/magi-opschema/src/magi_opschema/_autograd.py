# SPDX-License-Identifier: Apache-2.0
"""Derivatives of an op, by the user's gradient functions, and torch.vmap over an op.

An op has one autograd.Function, made at its first use, whose `setup_context` is apart from `forward`, as torch.func
requires. Two kernels apply it: one at the Autograd key, and one at the key above all transforms, because below it there
is "no kernel for HigherOrderOperator custom_function_call". Outside of transforms it is applied without torch's own
`Function.apply`, which binds the arguments by inspect.signature at every call (torch/autograd/function.py). That would
take longer than the rest of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import torch

from magi_opschema import _torch_compat as compat
from magi_opschema._call.bridge import Bridge, structure
from magi_opschema._codegen.functions import compile_saved
from magi_opschema._codegen.source import compile_at_first_call
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import Argument, Flat, FlatLayout, as_output, as_tuple, tensors_in
from magi_opschema._model.tree import Leaf, ListOrTuple, MaskedList, Node, Optional, Record, Sequence, dotted, leaves
from magi_opschema._text import nearest, show_value
from magi_opschema.errors import ForwardModeError, GradientError, MissingBackwardError, MutationError, RuleError


Shapes = Mapping[str, Any]
"""By leaf name, for the inputs of the forward: the shape of a Tensor, the shapes of a list of them, None for None; for
a list of optional Tensors also its mask."""


def flatten_gradients(returned: Any, lowering: SignatureLowering, shapes: Shapes) -> dict[str, Any]:
    """The gradient of each Tensor leaf, by leaf name; leaves without one are absent.

    Raises:
        GradientError: a wrong count, an unknown field, a gradient for a leaf that is not a Tensor, a wrong shape.
    """
    names = [parameter.name for parameter in lowering.parameters]
    if len(names) == 1 and type(returned) is not tuple:  # a named tuple is the gradient of a record
        returned = (returned,)
    flattener = _Flattener(lowering, shapes)
    if not isinstance(returned, tuple):
        text = f"returned {_kind(returned)}, expected a tuple with one gradient"
        flattener.fail("", f"{text} for each of ({', '.join(names)})")
    if len(returned) != len(names):
        text = f"returned {len(returned)} gradients, expected {len(names)}"
        flattener.fail("", f"{text}, one for each of ({', '.join(names)})")
    found: dict[str, Any] = {}
    for parameter, gradient in zip(lowering.parameters, returned, strict=True):
        found |= flattener.flatten(parameter.node, gradient)
    return found


@dataclass(frozen=True)
class _Flattener:
    lowering: SignatureLowering
    shapes: Shapes

    def fail(self, path: str, text: str, fix: str = "") -> NoReturn:
        of = f" for '{path}'" if path else ""
        raise GradientError(self.lowering.sentence(f"backward_fn{of} {text}.{fix}"))

    def flatten(self, node: Node, gradient: Any) -> dict[str, Any]:
        if gradient is None:
            return {}
        match node:
            case Leaf():
                return {node.name: self._leaf(node, gradient)}
            case MaskedList():
                return self._masked(node, gradient)
            case Optional() | ListOrTuple():
                return self.flatten(node.inner, gradient)
            case Record():
                parts = self._fields(node, gradient)
            case Sequence():
                items = self._items(node.path, gradient, len(node.items))
                parts = list(zip(node.items, items, strict=True))
        found: dict[str, Any] = {}
        for part, value in parts:
            found |= self.flatten(part, value)
        return found

    def _leaf(self, leaf: Leaf, gradient: Any) -> Any:
        path = dotted(leaf.path)
        if not leaf.is_tensor:
            self.fail(path, f"returned {_kind(gradient)}, expected None: a {leaf.schema_type} has no gradient")
        shape = self.shapes.get(leaf.name)
        if shape is None:
            self.fail(path, f"returned {_kind(gradient)}, expected None: this call passed None")
        if not leaf.is_list:
            self._check_tensor(path, gradient, shape)
            return gradient
        if not isinstance(gradient, (list, tuple)) or len(gradient) != len(shape):
            self.fail(path, f"returned {_kind(gradient)}, expected None or a list of {len(shape)}")
        for i, (item, item_shape) in enumerate(zip(gradient, shape, strict=True)):
            if item is not None:
                self._check_tensor(f"{path}[{i}]", item, item_shape)
        return list(gradient)

    def _check_tensor(self, path: str, gradient: Any, shape: torch.Size) -> None:
        if not isinstance(gradient, torch.Tensor):
            self.fail(path, f"returned {_kind(gradient)}, expected None or a Tensor of shape {tuple(shape)}")
        if compat.is_dynamo_compiling():  # This is compiled autograd, where Dynamo sees a symbolic size as an int.
            return
        sizes = (*gradient.shape, *shape)
        # A symbolic size is compared by the compiler; a comparison here would add a guard.
        if all(type(size) is int for size in sizes) and not _sums_to(gradient.shape, shape):
            self.fail(path, f"returned shape {tuple(gradient.shape)}, expected {tuple(shape)} or one that sums to it")

    def _fields(self, record: Record, gradient: Any) -> list[tuple[Node, Any]]:
        """The nodes of the fields of *record* that *gradient* is about, each with its gradient."""
        path, fields = dotted(record.path), {part.name: part.node for part in record.fields}
        if isinstance(gradient, Mapping):
            for name in gradient:
                if name not in fields:
                    text = f"names the field {show_value(name)}, which {record.label} does not have; it has"
                    self.fail(path, f"{text} {', '.join(fields)}", nearest(name, fields))
            given: Mapping[str, Any] = gradient
        elif record.kind in {"dataclass", "object"} and isinstance(gradient, record.cls):
            # Fields that are not Tensors hold the values that the instance was built with, which mean nothing here.
            given = {
                name: getattr(gradient, name)
                for name, node in fields.items()
                if any(leaf.is_tensor for leaf in leaves(node))
            }
        elif isinstance(gradient, (tuple, list)):
            if len(gradient) != len(fields):
                text = f"returned {len(gradient)} gradients, expected {len(fields)}"
                self.fail(path, f"{text}, one for each of ({', '.join(fields)})")
            given = dict(zip(fields, gradient, strict=True))
        else:
            forms = f"None, a dict by field, a {record.label}, or a tuple in field order"
            self.fail(path, f"returned {_kind(gradient)}, expected {forms}")
        return [(fields[name], value) for name, value in given.items()]

    def _masked(self, node: MaskedList, gradient: Any) -> dict[str, Any]:
        present = self.shapes.get(node.present.name) or []
        items = self._items(node.path, gradient, len(present))
        for i, (item, there) in enumerate(zip(items, present, strict=True)):
            if item is not None and not there:
                self.fail(f"{dotted(node.path)}[{i}]", f"returned {_kind(item)}, expected None: this call passed None")
        values = [item for item, there in zip(items, present, strict=True) if there]
        return {node.values.name: self._leaf(node.values, values)}

    def _items(self, path: tuple[str, ...], gradient: Any, count: int) -> AbstractSequence[Any]:
        if not isinstance(gradient, (list, tuple)) or len(gradient) != count:
            self.fail(dotted(path), f"returned {_kind(gradient)}, expected None or a tuple of {count}")
        return gradient


def _sums_to(shape: torch.Size, target: torch.Size) -> bool:
    """True if a gradient of *shape* sums to *target*, as autograd sums over broadcast dimensions."""
    if len(shape) < len(target):
        return False
    rest = shape[len(shape) - len(target) :]
    return all(want in (have, 1) for have, want in zip(rest, target, strict=True))


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


class NeedsGrad(Mapping[str, bool]):
    """`ctx.needs_grad`: whether a gradient is wanted, by the dotted path of a Tensor leaf.

    It looks at nothing before it is asked, because it is made at every call with a gradient.
    """

    def __init__(self, index: Mapping[str, int], flags: tuple[bool, ...]) -> None:
        self._index = index
        self._flags = flags

    def __getitem__(self, path: str) -> bool:
        return self._flags[self._index[path]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


VmapRule: TypeAlias = Callable[..., tuple[Any, Any]]
"""`rule(info, in_dims, *flat) -> (flat outputs, their dims)`."""


def vmap_by_loop(
    lowering: SignatureLowering, info: Any, in_dims: Any, values: tuple[Any, ...], call: Callable[..., Any]
) -> tuple[Any, Any]:
    """The outputs of *call* for each element of the batch, stacked along a new first dimension."""
    if info.batch_size == 0:
        text = "torch.vmap calls it for each element of the batch, which is empty, so that nothing says what it returns"
        raise RuleError(lowering.sentence(f"{text}. Give a rule for the whole batch with register_vmap."))
    results = [
        call(*[_select(value, dim, i) for value, dim in zip(values, in_dims, strict=True)])
        for i in range(info.batch_size)
    ]
    if not isinstance(results[0], tuple):
        return _stack(results)
    stacked = [_stack(column) for column in zip(*results, strict=True)]
    return tuple(value for value, _ in stacked), tuple(dim for _, dim in stacked)


def _select(value: Any, dim: Any, i: int) -> Any:
    """Element *i* of a Tensor, or of each Tensor in a list, as a view, so that writes into it change the batch."""
    if isinstance(value, torch.Tensor):
        return value if dim is None else value.select(dim, i)
    if isinstance(value, list) and isinstance(dim, (list, tuple)):
        return [_select(item, item_dim, i) for item, item_dim in zip(value, dim, strict=True)]
    return value


def _stack(column: Any) -> tuple[Any, Any]:
    first = column[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(column)), 0
    return first, None


_TENSORS = {"Tensor", "Tensor?"}
_SETTLED: dict[str, type] = {"float": float, "SymInt": int, "bool": bool, "str": str, "Tensor[]": list}
"""By schema type, the class of the values that the dispatcher does not convert."""


@dataclass(frozen=True)
class Formula:
    """The user's gradient functions."""

    setup_context_fn: Callable[..., None] | None
    backward_fn: Callable[..., Any]


@dataclass(eq=False)
class Derivative:
    """The Function of one op, and how it is applied. Its arguments and outputs are flat, with lists spread out."""

    lowering: SignatureLowering
    op: Any
    formula: Formula | None
    vmap_rule: VmapRule | None = None
    """Both may be given after the op; the Function reads them when it runs."""

    @functools.cached_property
    def outputs(self) -> FlatLayout:
        """The layout of the flat outputs."""
        return FlatLayout.of([Argument(leaf.name, leaf.schema_type, (leaf,)) for leaf in self.lowering.return_leaves])

    def differentiate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op from outside of the dispatcher, which may have to differentiate it.

        The Function is applied directly if the dispatcher would do nothing but call the kernel at the Autograd key,
        which applies the same Function. The dispatcher is called if it has more to do, or if it would convert a value,
        because `setup_context_fn` must see what the body sees.
        """
        layout = self.lowering.layout
        flat = layout.fill(args, kwargs) if kwargs or layout.bundles else args
        positions, classes = self._settled
        is_settled = [type(flat[i]) for i in positions] == classes
        if not is_settled or compat.has_torch_function(*flat) or not compat.is_dispatch_plain():
            return self.op(*args, **kwargs)
        if not self._has_lists:
            return self.eager(*flat)
        if any(compat.has_torch_function_among(flat[i]) for i in layout.tensor_lists):
            return self.op(*args, **kwargs)
        return self._gather_output(self.eager(*layout.spread(flat)))

    @functools.cached_property
    def _has_lists(self) -> bool:
        return bool(self.lowering.layout.tensor_lists or self.outputs.tensor_lists)

    @functools.cached_property
    def _settled(self) -> tuple[list[int], list[type | None]]:
        """The positions of the slots without Tensors, and the classes whose values the dispatcher does not convert."""
        others = [(i, s.schema_type) for i, s in enumerate(self.lowering.slots) if s.schema_type not in _TENSORS]
        return [i for i, _ in others], [_SETTLED.get(schema_type) for _, schema_type in others]

    @functools.cached_property
    def eager(self) -> Callable[..., Any]:
        """A function that applies the Function for eager autograd and AOTAutograd."""
        return compat.apply_in_eager(self._function)

    @functools.cached_property
    def transforms(self) -> Callable[..., Any]:
        """A function that applies the Function for torch.func transforms."""
        return cast("Callable[..., Any]", self._function.apply)

    @functools.cached_property
    def _function(self) -> Any:
        # The first two functions are written out, because they are most of the time of a call with a gradient.
        lowering, layout, outputs = self.lowering, self.lowering.layout, self.outputs
        count, lists, output_lists = len(outputs.names), layout.tensor_lists, outputs.tensor_lists
        dispatch = functools.partial(compat.dispatch, compat.dispatch_handle(self.op))
        needs_call = layout.keyword_only or layout.bundles
        op: Callable[..., Any] = (lambda *flat: layout.call(dispatch, flat)) if needs_call else dispatch
        make, unused = compat.below_autograd_pool.make, compat.below_autograd_pool.unused
        run_backward, values = self._backward, Bridge(lowering)
        saved = compile_at_first_call(functools.partial(compile_saved, lowering))
        tensors = [leaf for leaf in lowering.leaves if leaf.is_tensor]
        index = {dotted(leaf.path): layout.names.index(leaf.name) for leaf in tensors}

        def forward(*spread: Any) -> Any:
            flat = layout.gather(spread) if lists else spread
            try:
                context = unused.pop()
            except IndexError:
                context = make()
            with context:
                output = op(*flat)
            unused.append(context)
            return outputs.spread(as_tuple(output, count)) if output_lists else output

        def setup_context(ctx: Any, spread: Flat, output: Any) -> None:
            formula = self.formula
            if formula is None:
                return
            flat, flags = spread, ctx.needs_input_grad
            if lists:
                # A list needs a gradient if one of its Tensors does.
                flat, gathered = layout.gather(spread), layout.gather((spread[0], *flags[1:]))
                flags = tuple(any(flag) if isinstance(flag, list) else bool(flag) for flag in gathered)
            ctx.needs_grad = NeedsGrad(index, flags)
            ctx.needs_input_grad, ctx._magi_shapes = saved(flags, *flat)  # noqa: SLF001
            if output_lists:
                output = outputs.gather(output)
                ctx._magi_counts = tuple(len(output[i]) for i in output_lists)  # noqa: SLF001
            else:
                output = as_tuple(output, count)
            if formula.setup_context_fn is not None:
                formula.setup_context_fn(ctx, values.rebuild(*flat), structure(lowering, output))

        def backward(ctx: Any, *grads: Any) -> Any:
            return run_backward(ctx, *grads)

        def vmap(info: Any, in_dims: Any, *spread: Any) -> Any:
            if (rule := self.vmap_rule) is None:
                return vmap_by_loop(lowering, info, in_dims, spread, self.transforms)
            # The counts of lists, which `spread` begins with, have no dimension.
            pairs = zip(spread, in_dims, strict=True)
            dims = layout.gather(tuple(s if isinstance(s, tuple) and isinstance(d, tuple) else d for s, d in pairs))
            output, out_dims = rule(info, dims, *layout.gather(spread))
            return as_output(outputs.spread(output)), as_output(outputs.spread(out_dims))

        namespace: dict[str, Any] = {
            "forward": staticmethod(forward),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
            "jvp": staticmethod(functools.partial(refuse_forward_mode, lowering)),
            "vmap": staticmethod(vmap),
        }
        return type(f"{lowering.name}_function", (torch.autograd.Function,), namespace)

    def call(self, apply: Callable[..., Any], args: Flat, kwargs: dict[str, Any]) -> Any:
        """Call *apply* with arguments as the dispatcher passes them.

        Returns the output in the form that the dispatcher expects.
        """
        layout = self.lowering.layout
        return self._gather_output(apply(*layout.spread(layout.fill(args, kwargs))))

    def _gather_output(self, spread: Any) -> Any:
        return as_output(self.outputs.gather(spread)) if self.outputs.tensor_lists else spread

    def _backward(self, ctx: Any, *spread_grads: Any) -> Any:
        formula = self.formula
        if formula is None:
            text = "this op has no backward_fn, and a gradient through it is needed. "
            fix = "Give it one, or call it under torch.no_grad() or on detached Tensors."
            raise MissingBackwardError(self.lowering.sentence(f"{text}{fix}"))
        lowering, layout = self.lowering, self.lowering.layout
        if self.outputs.tensor_lists:
            spread_grads = self.outputs.gather(spread_grads, ctx._magi_counts)  # noqa: SLF001
        grads, shapes = structure(lowering, spread_grads), ctx._magi_shapes  # noqa: SLF001
        given = () if lowering.returns is None else grads if isinstance(grads, tuple) else (grads,)
        returned = formula.backward_fn(ctx, *given)
        found = flatten_gradients(returned, lowering, shapes)
        # A list without gradients still has an entry for each of its Tensors.
        for name in (layout.names[i] for i in layout.tensor_lists):
            if shapes[name] is not None:
                found.setdefault(name, [None] * len(shapes[name]))
        spread = layout.spread(tuple([found.get(name) for name in layout.names]))
        return as_output((None, *spread[1:]) if layout.tensor_lists else spread)


def refuse_forward_mode(lowering: SignatureLowering, *_: Any) -> NoReturn:
    """Raise the error about a forward-mode derivative, which torch.library.custom_op would return as zero."""
    text = "this op has no forward-mode derivative, which torch.func.jvp, jacfwd and dual numbers need. "
    fix = "Use reverse mode (torch.func.vjp, jacrev, grad), or detach what the op takes."
    raise ForwardModeError(lowering.sentence(f"{text}{fix}"))


def autograd_kernel(derivative: Derivative) -> Callable[..., Any]:
    """The kernel at the Autograd key: it applies a Function only if a derivative may be wanted."""
    is_grad_enabled, any_requires_grad = torch.is_grad_enabled, compat.any_requires_grad
    make, unused = compat.below_autograd_pool.make, compat.below_autograd_pool.unused
    dispatch, handle = compat.dispatch, compat.dispatch_handle(derivative.op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if (is_grad_enabled() and any_requires_grad(*args, **kwargs)) or compat.is_forward_ad_active():
            return derivative.call(derivative.eager, args, kwargs)
        try:
            context = unused.pop()
        except IndexError:
            context = make()
        with context:
            output = dispatch(handle, *args, **kwargs)
        unused.append(context)
        return output

    return compat.hide_from_dynamo(kernel)


def transforms_kernel(derivative: Derivative) -> Callable[..., Any]:
    """The kernel at the key above all torch.func transforms."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if compat.is_functionalizing():
            return compat.run_functionalized(derivative.op, args, kwargs)
        return derivative.call(derivative.transforms, args, kwargs)

    return compat.hide_from_dynamo(kernel)


def mutation_kernel(lowering: SignatureLowering, op: Any) -> Callable[..., Any]:
    """The kernel at the Autograd key of an op that writes into its arguments."""
    layout = lowering.layout

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if compat.is_forward_ad_active():
            given = tensors_in((*args, *kwargs.values()))
            if any(compat.forward_ad.unpack_dual(tensor).tangent is not None for tensor in given):
                refuse_forward_mode(lowering)
        if torch.is_grad_enabled():
            flat = layout.fill(args, kwargs)
            for position, path in layout.mutated.items():
                if compat.any_requires_grad(flat[position]):
                    text = (
                        f"'{path}' is written into, and it requires a gradient or is part of a graph, "
                        "which would be wrong afterwards. "
                        "Call the op under torch.no_grad(), on a detached Tensor, or on a buffer."
                    )
                    raise MutationError(lowering.sentence(text))
        with compat.below_autograd_pool.make():
            return op(*args, **kwargs)

    return compat.hide_from_dynamo(kernel)
