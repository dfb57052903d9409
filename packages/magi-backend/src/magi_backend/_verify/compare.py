# SPDX-License-Identifier: Apache-2.0
"""Values taken apart by place, and how far compiled results may be from eager ones.

Values are containers, pytree nodes, and every dataclass. Pytrees are not enough: for them, an unregistered dataclass is
one opaque leaf, and the tensors in it would be neither copied nor compared.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Node:
    """A value that holds others, and the function that builds one of the same kind from other parts."""

    kind: object
    """Equal for two values of one class with parts of the same names and the same constants."""
    parts: tuple[tuple[str, Any], ...]
    """The values inside, each with the text of the step to it: ``.weight``, ``[0]``, ``['mask']``."""
    build: Callable[[list[Any]], Any]


def node_of(value: Any) -> Node | None:
    """*value* taken apart by one level; None for a leaf."""
    if isinstance(value, torch.Tensor):
        return None
    parts, spec = _one_level(value)
    if not spec.is_leaf():
        return Node(spec, parts, lambda built: pytree.tree_unflatten(built, spec))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        fields = tuple((f".{name}", getattr(value, name)) for name in names)

        def build(built: list[Any]) -> Any:
            twin = copy.copy(value)  # no __init__ or __post_init__ runs, and attributes that are not fields are kept
            for name, part in zip(names, built, strict=True):
                object.__setattr__(twin, name, part)
            return twin

        return Node((type(value), names), fields, build)
    return None


def _one_level(value: Any) -> tuple[tuple[tuple[str, Any], ...], pytree.TreeSpec]:
    def is_part(part: Any) -> bool:
        return part is not value

    try:
        keyed, spec = pytree.tree_flatten_with_path(value, is_leaf=is_part)
    except ValueError:  # a node whose class was registered without names for its children
        children, spec = pytree.tree_flatten(value, is_leaf=is_part)
        return tuple((f"[{index}]", child) for index, child in enumerate(children)), spec
    return tuple((pytree.keystr(path), child) for path, child in keyed), spec


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of *value*, each with its path, which begins with *path*."""
    node = node_of(value)
    if node is None:
        yield path, value
        return
    for step, part in node.parts:
        yield from leaves_of(part, path + step)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the leaves of *value*, each with its path, which begins with *path*."""
    return ((place, leaf) for place, leaf in leaves_of(value, path) if isinstance(leaf, torch.Tensor))


def with_leaves(value: Any, replacement: Callable[[Any], Any]) -> Any:
    """*value* built again with another value for each of its leaves, in the order of `leaves_of`."""
    node = node_of(value)
    if node is None:
        return replacement(value)
    return node.build([with_leaves(part, replacement) for _, part in node.parts])


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
    ours, theirs = node_of(actual), node_of(expected)
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


def _shown(node: Node | None, value: object) -> str:
    return type(value).__qualname__ if node is None else str(node.kind)


def magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value in *tensor*; 0 for an empty one."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


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
