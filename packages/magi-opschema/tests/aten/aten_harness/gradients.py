# SPDX-License-Identifier: Apache-2.0
"""The gradients of a kernel with a backward, compared with those of ATen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from magi_opschema.aten._dispatch.slots import use_slot
from torch import Tensor

from .compare import close, flat
from .samples import Sample, seed


if TYPE_CHECKING:
    from collections.abc import Callable

    from .subject import Subject


Gradients = list[Tensor | None]


def expected_gradients(subject: Subject, sample: Sample) -> Gradients | None:
    """ATen's gradients of the inputs; None if ATen has none, or refuses the inputs."""
    try:
        return _gradients(sample, lambda graded: subject.leading(*graded.args, **graded.kwargs))
    except (RuntimeError, NotImplementedError):
        return None


def differing_gradient(subject: Subject, sample: Sample, expected: Gradients, *, scale: float) -> str | None:
    """How the gradients through the surface, in the slot of *subject*, differ from *expected*; None if they do not."""

    def call(graded: Sample) -> Any:
        with use_slot(subject.base, subject.slot):
            return subject.surface_call(graded)(*graded.args)

    for position, (mine, theirs) in enumerate(zip(_gradients(sample, call), expected, strict=True)):
        if theirs is None or mine is None:
            reason = None if mine is theirs else f"{'no' if mine is None else 'a'} gradient, unlike ATen"
        else:
            reason = close(mine, theirs, strides=False, scale=scale)
        if reason is not None:
            return f"gradient of tensor {position}: {reason.removeprefix('result 0: ')}"
    return None


def _gradients(sample: Sample, function: Callable[[Sample], Any]) -> Gradients:
    graded = sample.map_tensors(_leaf)
    seed(graded)
    with torch.enable_grad():
        results = [result for result in flat(function(graded)) if isinstance(result, Tensor) and result.requires_grad]
    leaves = [t for t in graded.tensors() if t.requires_grad]
    if not results:
        msg = "nothing to differentiate"
        raise RuntimeError(msg)
    # Not ones, because then a backward that transposes or permutes them wrongly would pass.
    torch.manual_seed(1)
    return list(torch.autograd.grad(results, leaves, [torch.randn_like(r) for r in results], allow_unused=True))


def _leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.dtype.is_floating_point or t.dtype.is_complex)
