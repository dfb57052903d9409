# SPDX-License-Identifier: Apache-2.0
"""How far outputs lie from those of eager code in float32."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional


MOST_OF_RELATIVE, MOST_OF_LARGEST = 2.0, 4.0
"""An arm may lie so many times as far from float32 as eager code in its own type does."""

SPARE_RELATIVE, SPARE_LARGEST = 1e-3, 1e-2
"""And so much farther, where eager code is in float32 itself; the largest, of the largest value."""


@dataclass(frozen=True)
class Difference:
    """The worst of all outputs, in each of three measures.

    Attributes:
        cosine: The cosine of the angle between an output and its reference.
        relative: The norm of the difference over the norm of the reference.
        largest: The largest difference of two elements, over the largest element of the reference.
        output: The place of the output that `relative` is of.
    """

    cosine: float
    relative: float
    largest: float
    output: int = 0

    def too_far(self, eager: Difference) -> bool:
        """Whether an arm at this distance is wrong, where eager code in the same type is at *eager*'s."""
        near = (
            self.relative <= MOST_OF_RELATIVE * eager.relative + SPARE_RELATIVE
            and self.largest <= MOST_OF_LARGEST * eager.largest + SPARE_LARGEST
        )
        return not near  # also where one is not a number


class WrongResultError(AssertionError):
    """An arm computes something else than eager code."""


def tensors_of(outputs: Any) -> list[Tensor]:
    """The Tensors that a call returned."""
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def difference(outputs: Any, reference: Any) -> Difference:
    """The worst output of *outputs*, each against its own of *reference*.

    Raises:
        WrongResultError: Another number of outputs, or one of another shape.
    """
    ours, theirs = tensors_of(outputs), tensors_of(reference)
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        msg = f"outputs of shapes {[tuple(x.shape) for x in ours]}, eager's are {[tuple(x.shape) for x in theirs]}"
        raise WrongResultError(msg)
    each = [_difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    relative = [d.relative for d in each]
    worst = relative.index(max(relative))
    return Difference(min(d.cosine for d in each), relative[worst], max(d.largest for d in each), worst)


def _difference(output: Tensor, reference: Tensor) -> Difference:
    if not bool(output.isfinite().all()):
        return Difference(float("nan"), float("inf"), float("inf"))
    ours, theirs = output.float().flatten(), reference.float().flatten()
    apart = ours - theirs
    norm, largest = float(theirs.norm()) or 1.0, float(theirs.abs().max()) or 1.0
    cosine = functional.cosine_similarity(ours, theirs, dim=0)
    return Difference(float(cosine), float(apart.norm()) / norm, float(apart.abs().max()) / largest)


def judged(ours: Difference, eager: Difference, where: str) -> dict[str, dict[str, float]]:
    """Both differences for a row.

    Raises:
        WrongResultError: *ours* is too far.
    """
    if ours.too_far(eager):
        msg = f"{where}: {ours} from float32, where eager code is at {eager}"
        raise WrongResultError(msg)
    return {"difference": asdict(ours), "eager_difference": asdict(eager)}
