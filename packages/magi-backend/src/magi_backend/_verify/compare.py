# SPDX-License-Identifier: Apache-2.0
"""Runs of a function with their gradients, and two of them compared. `explain` and `magi.check` both use this.

Values are containers, pytree nodes, and every dataclass. Pytrees are not enough: for them, an unregistered dataclass is
one opaque leaf, and the tensors in it would be neither copied nor compared.

Both runs get copies of the inputs that are like the originals in everything that a compiler may read, and the same
random numbers.

A piece of a graph may return memory that an allocation left as it was. vLLM allocates the output of an attention in one
piece, for example, and the attention, which is a boundary, writes to it. Eager runs with zeros in this memory, and
again with NaN, or with the largest number for integers. Elements that become NaN, or another integer, depend on it, and
so are not compared.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from magi_backend import _torch_compat
from magi_backend._torch_compat.values import storage_id


@dataclass(frozen=True)
class Container:
    """A value that holds others, and the function that builds one of the same kind from other parts."""

    kind: object
    """Equal for two values of one class with parts of the same names and the same constants."""
    parts: tuple[tuple[str, Any], ...]
    """The values inside, each with the text of the step to it: ``.weight``, ``[0]``, ``['mask']``."""
    build: Callable[[list[Any]], Any]


def container_of(value: Any) -> Container | None:
    """*value* taken apart by one level; None for a leaf."""
    if isinstance(value, torch.Tensor):
        return None
    try:
        keyed, spec = pytree.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
        parts = tuple((pytree.keystr(path), child) for path, child in keyed)
    except ValueError:  # a container whose class was registered without names for its children
        children, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
        parts = tuple((f"[{index}]", child) for index, child in enumerate(children))
    if not spec.is_leaf():
        return Container(spec, parts, lambda built: pytree.tree_unflatten(built, spec))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        fields = tuple((f".{name}", getattr(value, name)) for name in names)

        def build(built: list[Any]) -> Any:
            twin = copy.copy(value)  # no __init__ or __post_init__ runs, and attributes that are not fields are kept
            for name, part in zip(names, built, strict=True):
                object.__setattr__(twin, name, part)
            return twin

        return Container((type(value), names), fields, build)
    return None


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of *value*, each with its path, which begins with *path*."""
    container = container_of(value)
    if container is None:
        yield path, value
        return
    for step, part in container.parts:
        yield from leaves_of(part, path + step)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the leaves of *value*, each with its path, which begins with *path*."""
    return ((place, leaf) for place, leaf in leaves_of(value, path) if isinstance(leaf, torch.Tensor))


def with_leaves(value: Any, replacement: Callable[[Any], Any]) -> Any:
    """*value* built again with another value for each of its leaves, in the order of `leaves_of`."""
    container = container_of(value)
    if container is None:
        return replacement(value)
    return container.build([with_leaves(part, replacement) for _, part in container.parts])


@dataclass(frozen=True)
class Tolerance:
    """``|a - b| <= atol + rtol * |b|``, as in ``torch.allclose``."""

    rtol: float
    atol: float


# The error of reordered sums in networks of ordinary depth; the defaults of torch.testing are for single operators.
TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-7, 1e-7),
    torch.complex128: Tolerance(1e-7, 1e-7),
    torch.float32: Tolerance(1e-4, 1e-4),
    torch.complex64: Tolerance(1e-4, 1e-4),
    torch.float16: Tolerance(1e-2, 1e-2),
    torch.bfloat16: Tolerance(4e-2, 4e-2),
    # One step between neighbours, and between those next to 0: what is rounded to them differs a little.
    torch.float8_e4m3fn: Tolerance(2**-3, 2**-9),
    torch.float8_e4m3fnuz: Tolerance(2**-3, 2**-10),
    torch.float8_e5m2: Tolerance(2**-2, 2**-16),
    torch.float8_e5m2fnuz: Tolerance(2**-2, 2**-17),
    torch.float8_e8m0fnu: Tolerance(0.0, 1.0),  # of the exponent, which is all that it has
}
EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Difference:
    """One tensor of the compiled run, compared with the same tensor of the eager run.

    Attributes:
        name: "output", "output[1].mean", "gradient of conv_in.weight".
        largest: Largest absolute difference; infinite if shape, dtype or presence differ, or only one is finite.
        tolerance: What was allowed.
        agrees: Whether every element is within the tolerance.
        note: Why *largest* is infinite, or empty.
    """

    name: str
    largest: float
    tolerance: Tolerance
    agrees: bool
    note: str = ""


def tolerance_of(dtype: torch.dtype, computed_in: Collection[torch.dtype] = ()) -> Tolerance:
    """What is allowed for values of *dtype* that were *computed_in* others too.

    Under autocast, gradients of float32 parameters have the errors of products in bfloat16.

    Example:
        >>> import torch
        >>> tolerance_of(torch.float32).rtol, tolerance_of(torch.float32, {torch.bfloat16}).rtol
        (0.0001, 0.04)
    """
    usual = TOLERANCES.get(dtype, EXACT)
    if dtype.itemsize == 1 or usual is EXACT:
        return usual
    halves = [TOLERANCES[each] for each in (torch.float16, torch.bfloat16) if each in computed_in]
    return max([usual, *halves], key=lambda tolerance: tolerance.rtol)


def compare(
    name: str,
    actual: object,
    expected: object,
    *,
    scale: float = 1.0,
    computed_in: Collection[torch.dtype] = (),
) -> Difference:
    """The difference between *actual*, from the compiled run, and *expected*, from the eager run.

    *scale* is the magnitude of the values if it is far from 1. Gradients of a mean, for example, are all small, so an
    absolute tolerance made for outputs would accept zeros for them. For *computed_in* see `tolerance_of`.
    """
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if _is_same(actual, expected):
            return Difference(name, 0.0, EXACT, agrees=True)
        return Difference(name, math.inf, EXACT, agrees=False, note=f"{actual!r} is not {expected!r}")
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        note = f"{actual.dtype} {tuple(actual.shape)} is not {expected.dtype} {tuple(expected.shape)}"
        return Difference(name, math.inf, EXACT, agrees=False, note=note)
    usual = tolerance_of(expected.dtype, computed_in)
    a, b = comparable(actual.detach()), comparable(expected.detach())
    size = _typical(b) if usual.rtol >= TOLERANCES[torch.float16].rtol else 1.0
    tolerance = Tolerance(usual.rtol, usual.atol * scale * max(size, 1.0))
    if not a.numel():
        return Difference(name, 0.0, tolerance, agrees=True)
    agrees = torch.allclose(a, b, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    return Difference(name, _largest(a, b), tolerance, agrees)


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """*tensor* in a dtype that torch compares: float8 as float32, exponents and pairs of float4 as their bytes."""
    if tensor.dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
        return tensor.view(torch.uint8).short()  # differences of uint8 have no sign
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def compare_trees(
    name: str, actual: object, expected: object, computed_in: Collection[torch.dtype] = ()
) -> tuple[Difference, ...]:
    """The difference of each leaf of *actual* from the leaf of *expected* at the same place."""
    ours, theirs = container_of(actual), container_of(expected)
    if ours is None and theirs is None:
        return (compare(name, actual, expected, computed_in=computed_in),)
    if ours is None or theirs is None or ours.kind != theirs.kind:
        note = f"structure {_shown(ours, actual)} is not {_shown(theirs, expected)}"
        return (Difference(name, math.inf, EXACT, agrees=False, note=note),)
    return tuple(
        difference
        for (step, part), (_, other) in zip(ours.parts, theirs.parts, strict=True)
        for difference in compare_trees(name + step, part, other, computed_in)
    )


def _shown(container: Container | None, value: object) -> str:
    return type(value).__qualname__ if container is None else str(container.kind)


def _typical(tensor: torch.Tensor) -> float:
    """The root of the mean square of the finite values in *tensor*.

    An element of a product that happens to be close to 0 has the rounding error of the others.
    """
    finite = tensor[tensor.isfinite()].abs().double()
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _is_same(actual: Any, expected: Any) -> bool:
    """Whether both are equal and of one class; two nans count as equal."""
    if actual is expected:
        return True
    both_nan = actual != actual and expected != expected  # noqa: PLR0124
    return type(actual) is type(expected) and bool(actual == expected or both_nan)


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.dtype == torch.bool:
        return float((a != b).any())
    wide = torch.complex128 if a.is_complex() else torch.float64
    difference = (a.to(wide) - b.to(wide)).abs()
    same = (a == b) | (a.isnan() & b.isnan())  # two infinities of one sign do not differ
    largest = float(difference.masked_fill(same, 0.0).max())
    return math.inf if math.isnan(largest) else largest  # nan: one of them is not finite


def copy_inputs(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """*tree* with copies of its tensors, and by path those of them to differentiate by, which require a gradient.

    A copy has the strides and the marks of dynamic dimensions of the original. Tensors that share memory become views
    of one copy of all of it. They do not lead to all of it by themselves: one that was detached, or made in inference
    mode, does not know of which tensor it is a view.
    """
    leaves = list(tensors_of(tree))
    sharing = Counter(storage_id(leaf) for leaf in {id(leaf): leaf for _, leaf in leaves}.values())
    memories: dict[int, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    for path, leaf in leaves:
        if id(leaf) not in copies:  # one that is at several places has one copy
            with torch.inference_mode(leaf.is_inference()):
                if sharing[storage_id(leaf)] > 1:
                    copies[id(leaf)] = _view_of_copy(leaf, memories)
                    continue
                twin = alone(leaf).requires_grad_(leaf.requires_grad)
                _torch_compat.values.copy_dynamic_marks(leaf, twin)
                if leaf.requires_grad:
                    wanted[path] = twin
                # Code may write to an input that is not a leaf, although it requires a gradient.
                copies[id(leaf)] = twin if leaf.is_leaf else twin.clone()
    return with_leaves(tree, lambda leaf: copies.get(id(leaf), leaf)), wanted


def _view_of_copy(tensor: torch.Tensor, memories: dict[int, torch.Tensor]) -> torch.Tensor:
    """*tensor* as a view of a copy of all the memory that it is in; *memories* has the copies by storage."""
    storage = storage_id(tensor)
    if storage not in memories:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        memories[storage] = whole.clone()
    size = memories[storage].numel() // tensor.dtype.itemsize * tensor.dtype.itemsize  # without a part of an element
    elements = memories[storage][:size].view(tensor.dtype)
    return elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def state_of(tensor: torch.Tensor) -> object:
    """A value that is equal for *tensor* later if nobody has written to it in the meantime.

    Torch counts writes, but not those to a tensor made in inference mode, of which it is the contents.
    """
    if not tensor.is_inference():
        return _torch_compat.values.version(tensor)
    if _torch_compat.values.is_wrapper(tensor):
        inner = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return tuple(state_of(getattr(tensor, name)) for name in inner)
    return _Contents(tensor.detach().clone())


@dataclass(frozen=True, eq=False)
class _Contents:
    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Contents) and torch.equal(self._bits(), other._bits())

    __hash__ = None  # type: ignore[assignment]

    def _bits(self) -> torch.Tensor:
        """The bytes, because NaN is not equal to itself."""
        is_strided = self.tensor.layout is torch.strided
        return self.tensor.contiguous().view(-1).view(torch.uint8) if is_strided else self.tensor


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the strides of *tensor*."""
    original = tensor.detach()
    if original.layout is not torch.strided or _torch_compat.values.is_wrapper(original):
        return original.clone()
    return with_strides(original, original.stride())


def with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of *tensor* in memory of its own, with these *strides*."""
    once = tensor
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.size(dim) > 1:
            once = once.narrow(dim, 0, 1)  # elements that share memory cannot be written separately
    twin = torch.empty_strided(once.size(), strides, dtype=tensor.dtype, device=tensor.device).copy_(once)
    return twin.expand(tensor.size()) if twin.size() != tensor.size() else twin


@dataclass(frozen=True)
class Replay:
    """The states of the generators of the CPU and of every GPU at one time."""

    states: tuple[torch.Tensor, ...] = field(
        default_factory=lambda: (torch.random.get_rng_state(), *torch.cuda.get_rng_state_all())
    )

    def rewind(self) -> None:
        """Restore the generators."""
        torch.random.set_rng_state(self.states[0])
        torch.cuda.set_rng_state_all(self.states[1:])

    def were_drawn(self) -> bool:
        """Whether random numbers were generated since."""
        return not all(map(torch.equal, self.states, Replay().states))


@contextmanager
def replayed_random_numbers() -> Iterator[Replay]:
    """A context with the current states of the generators, to go back to; they are restored at the end.

    Example:
        >>> with replayed_random_numbers() as numbers:
        ...     first = torch.rand(2)
        ...     numbers.rewind()
        ...     torch.equal(torch.rand(2), first)
        True
    """
    # Without a list of devices `fork_rng` warns where there is more than one (torch/random.py).
    with torch.random.fork_rng(list(range(torch.cuda.device_count()))):
        yield Replay()


@dataclass(frozen=True)
class Outcome:
    """What a function computed from copies of its inputs, and how long that took with its gradients."""

    outputs: Any
    inputs: Any
    """``(args, kwargs)`` after the call."""
    written: frozenset[str]
    """The paths of the tensors in *inputs* that were written to, or added."""
    gradients: Mapping[str, torch.Tensor | None]
    """By the name of a parameter or the path of an input; None where the outputs do not depend on it."""
    seconds: float


def run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    module: nn.Module | None = None,
) -> Outcome:
    """Run *fn* on copies of its arguments and differentiate its outputs; the buffers of *module* are restored."""
    inputs, wanted = copy_inputs((args, dict(kwargs or {})))
    before = states_of(inputs)
    owner = nn.Module() if module is None else module
    parameters = {name: parameter for name, parameter in owner.named_parameters() if parameter.requires_grad}
    buffers = copy.deepcopy(dict(owner.named_buffers()))
    try:
        start = time.perf_counter()
        outputs = fn(*inputs[0], **inputs[1])
        gradients = _gradients(outputs, parameters | wanted)
        _torch_compat.values.synchronize()
        seconds = time.perf_counter() - start
        outputs = with_leaves(outputs, lambda leaf: alone(leaf) if isinstance(leaf, torch.Tensor) else leaf)
    finally:
        with torch.no_grad():
            for name, buffer in owner.named_buffers():
                buffer.copy_(buffers[name])
    written = frozenset(path for path, state in states_of(inputs).items() if before.get(path) != state)
    inputs = with_leaves(inputs, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    return Outcome(outputs, inputs, written, gradients, seconds)


def differences(
    actual: Outcome,
    expected: Outcome,
    *,
    kind: str = "argument",
    names: Mapping[str, str] | None = None,
    computed_in: Collection[torch.dtype] = (),
) -> tuple[Difference, ...]:
    """The difference of every output, written input and gradient of the compiled run from that of the eager one.

    An input is called *kind* and its path, or what *names* has for the path. *computed_in* are the graph's dtypes.
    """
    known = names or {}
    gradients = (gradient for gradient in expected.gradients.values() if gradient is not None and gradient.numel())
    size = max((float(gradient.detach().abs().max()) for gradient in gradients), default=1.0)
    written = {f"{kind}{path}" for path in actual.written | expected.written}

    def input_title(name: str) -> str:
        return f"{known.get(name.removeprefix(kind)) or name} after the call"

    def gradient_title(key: str) -> str:
        return f"gradient of {known.get(key) or (f'{kind}{key}' if key.startswith('[') else key)}"

    return (
        *compare_trees("output", actual.outputs, expected.outputs, computed_in),
        *(
            replace(difference, name=input_title(difference.name))
            for difference in compare_trees(kind, actual.inputs, expected.inputs, computed_in)
            if difference.name in written or not difference.agrees
        ),
        *(
            compare(gradient_title(key), ours, theirs, scale=min(1.0, size), computed_in=computed_in)
            for key, theirs in expected.gradients.items()
            if (ours := actual.gradients.get(key)) is not None or theirs is not None
        ),
    )


def other_layouts(actual: Outcome, expected: Outcome) -> tuple[str, ...]:
    """A line for each output of *actual* that has other strides than that of *expected*, and the same shape."""
    pairs = zip(leaves_of(actual.outputs, "output"), leaves_of(expected.outputs, "output"), strict=False)
    return tuple(
        f"{path} has strides {ours.stride()} where eager's are {theirs.stride()}"
        for (path, ours), (_, theirs) in pairs
        if isinstance(ours, torch.Tensor)
        and isinstance(theirs, torch.Tensor)
        and ours.shape == theirs.shape
        and ours.layout is theirs.layout is torch.strided
        # Strides of dimensions of size 1 do not matter.
        and any(size > 1 and a != b for size, a, b in zip(ours.shape, ours.stride(), theirs.stride(), strict=True))
    )


def states_of(tree: Any) -> dict[str, tuple[int, object]]:
    """The tensor at each path, and what changes when it is written to."""
    return {path: (id(leaf), state_of(leaf)) for path, leaf in tensors_of(tree)}


def _gradients(outputs: Any, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    roots = [leaf for _, leaf in tensors_of(outputs) if leaf.requires_grad]
    if not roots or not wanted:
        return dict.fromkeys(wanted)
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(root.shape, generator=generator, dtype=root.dtype).to(root.device) for root in roots]
    found = torch.autograd.grad(roots, list(wanted.values()), cotangents, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


@dataclass(frozen=True)
class Expected:
    """What eager computes, and again with *other* contents in memory that nobody has written, if there is any."""

    outcome: Outcome
    other: Outcome | None

    def settle(self, actual: Outcome) -> Outcome:
        """*actual*, with the elements of `outcome` where these depend on memory that nobody has written."""
        if self.other is None:
            return actual
        return replace(
            actual,
            outputs=_settled(actual.outputs, self.outcome.outputs, self.other.outputs),
            inputs=_settled(actual.inputs, self.outcome.inputs, self.other.inputs),
            gradients=_settled(actual.gradients, self.outcome.gradients, self.other.gradients),
        )


def run_eager(
    gm: GraphModule,
    args: tuple[Any, ...],
    rewind: Callable[[], object],
    result: Callable[[Any], Any] = lambda outputs: outputs,
) -> Expected:
    """Run *gm* on copies of *args*, and after *rewind* a second time if its result may depend on what was in memory.

    *result* converts the outputs before they are copied.
    """
    if not any(_torch_compat.nodes.is_empty(node) for node in gm.graph.nodes):
        return Expected(run(lambda *args: result(gm(*args)), args), None)
    first = run(lambda *args: result(_Filled(gm, zeros=True).run(*args)), args)
    rewind()
    return Expected(first, run(lambda *args: result(_Filled(gm, zeros=False).run(*args)), args))


class _Filled(Interpreter):
    """Runs a graph, and fills the memory that its calls leave as it was: with *zeros*, or NaN or the largest number."""

    def __init__(self, gm: GraphModule, *, zeros: bool) -> None:
        super().__init__(gm)
        self._zeros = zeros

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if _torch_compat.nodes.is_empty(node):
            memory = value.view(torch.uint8) if value.dtype is torch.float4_e2m1fn_x2 else value
            has_nan = memory.is_floating_point() or memory.is_complex()
            with torch.no_grad():
                if self._zeros or memory.dtype is torch.bool:
                    memory.fill_(not self._zeros)
                else:
                    memory.fill_(math.nan if has_nan else torch.iinfo(memory.dtype).max)
        return value


def _settled(actual: Any, expected: Any, other: Any) -> Any:
    """*actual*, with the elements of *expected* that are others in *other*."""
    places = {path: (leaf, twin) for (path, leaf), (_, twin) in zip(leaves_of(expected), leaves_of(other), strict=True)}
    leaves = iter([_settled_leaf(leaf, *places.get(path, (None, None))) for path, leaf in leaves_of(actual)])
    return with_leaves(actual, lambda _: next(leaves))


def _settled_leaf(actual: Any, expected: Any, other: Any) -> Any:
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return actual
    if actual.shape != expected.shape or actual.dtype != expected.dtype or expected.layout is not torch.strided:
        return actual
    # torch 2.11 does not choose between unsigned numbers.
    bits = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(actual.dtype)
    ours, theirs = (actual, expected) if bits is None else (actual.view(bits), expected.view(bits))
    first, second = comparable(expected), comparable(other)
    has_nan = first.is_floating_point() or first.is_complex()
    # Floating-point elements that merely differ do not count: the order of additions may differ between runs.
    depends = second.isnan() & ~first.isnan() if has_nan else first != second
    return torch.where(depends, theirs, ours).view(actual.dtype)
