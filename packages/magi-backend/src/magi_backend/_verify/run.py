# SPDX-License-Identifier: Apache-2.0
"""One run of a function, with its gradients, and two runs compared. `explain` and `magi.check` both use this."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from magi_backend import _torch_compat

from .compare import Difference, compare, compare_trees, magnitude
from .copies import alone, copy_inputs, state_of
from .trees import leaves_of, with_leaves


@dataclass(frozen=True)
class Outcome:
    """What a function computed from copies of its inputs.

    Attributes:
        outputs: Its result.
        inputs: ``(args, kwargs)`` after the call, which may have written to them.
        written: The paths of the tensors in *inputs* that were written to, or added.
        gradients: For fixed cotangents, the gradient of each parameter by its name, and of each input that requires one
            by its path; None where the outputs do not depend on it.
        seconds: How long the call and its gradients took.
    """

    outputs: Any
    inputs: Any
    written: frozenset[str]
    gradients: Mapping[str, torch.Tensor | None]
    seconds: float


def run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    modules: Sequence[nn.Module] = (),
) -> Outcome:
    """Run *fn* on copies of its arguments and differentiate its outputs; buffers of *modules* are restored."""
    copies = copy_inputs((args, dict(kwargs or {})))
    before = _states(copies.values)
    wanted = {name: p for module in modules for name, p in module.named_parameters() if p.requires_grad}
    with _buffers_put_back(modules):
        start = time.perf_counter()
        outputs = fn(*copies.values[0], **copies.values[1])
        gradients = _gradients(outputs, {**wanted, **copies.wanted})
        _torch_compat.synchronize()
        seconds = time.perf_counter() - start
        outputs = with_leaves(outputs, _detached_copy)
    after = _states(copies.values)
    written = frozenset(path for path, state in after.items() if before.get(path) != state)
    inputs = with_leaves(copies.values, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    return Outcome(outputs, inputs, written, gradients, seconds)


def differences(
    actual: Outcome,
    expected: Outcome,
    *,
    kind: str = "argument",
    names: Mapping[str, str] | None = None,
    computed_in: Collection[torch.dtype] = (),
) -> tuple[Difference, ...]:
    """The difference of every output, written input and gradient of *actual* from that of *expected*.

    Args:
        actual: The compiled run.
        expected: The eager run.
        kind: The word for an input in the names of the differences.
        names: Names of inputs, by path, of those that have a name.
        computed_in: The dtypes of the tensors in the graph.
    """
    known = names or {}
    size = max((magnitude(g) for g in expected.gradients.values() if g is not None), default=1.0)
    written = {f"{kind} after the call{path}" for path in actual.written | expected.written}
    inputs = compare_trees(f"{kind} after the call", actual.inputs, expected.inputs, computed_in)
    gradients = ((key, actual.gradients.get(key), gradient) for key, gradient in expected.gradients.items())
    return (
        *compare_trees("output", actual.outputs, expected.outputs, computed_in),
        *(
            replace(difference, name=_written_title(difference.name, kind, known))
            for difference in inputs
            if difference.name in written or not difference.agrees
        ),
        *(
            compare(
                f"gradient of {_title(key, kind, known)}", ours, theirs, scale=min(1.0, size), computed_in=computed_in
            )
            for key, ours, theirs in gradients
            if ours is not None or theirs is not None
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
        and _strides(ours) != _strides(theirs)
    )


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter, without those of dimensions of size 1."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _written_title(name: str, kind: str, names: Mapping[str, str]) -> str:
    """*name*, which ends with the path of an input, with the name of that input if it has one."""
    known = names.get(name.removeprefix(f"{kind} after the call"))
    return f"{known} after the call" if known else name


def _title(key: str, kind: str, names: Mapping[str, str]) -> str:
    return names.get(key) or (f"{kind}{key}" if key.startswith("[") else key)


def _states(tree: Any) -> dict[str, tuple[int, object]]:
    """The tensor at each path, and what changes when it is written to."""
    return {path: (id(leaf), state_of(leaf)) for path, leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)}


@contextmanager
def _buffers_put_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    state = [copy.deepcopy(dict(module.named_buffers())) for module in modules]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, buffers in zip(modules, state, strict=True):
                for name, buffer in module.named_buffers():
                    buffer.copy_(buffers[name])


def _gradients(outputs: Any, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    roots = [leaf for _, leaf in leaves_of(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not roots or not wanted:
        return dict.fromkeys(wanted)
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(root.shape, generator=generator, dtype=root.dtype).to(root.device) for root in roots]
    found = torch.autograd.grad(roots, list(wanted.values()), cotangents, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _detached_copy(leaf: Any) -> Any:
    return alone(leaf) if isinstance(leaf, torch.Tensor) else leaf
