# SPDX-License-Identifier: Apache-2.0
"""Where torch differs from itself: strict expectations, so that a fix upstream is noticed.

Each entry names an overload, the checks that fail on it, and why. An entry of which no check fails any more fails the
run. All were seen on torch 2.13.0 on a CPU, and show with ATen alone: tests/aten/test_divergences.py calls no generated
code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """One known divergence of torch; `crashes` where it ends the process."""

    overload: str
    checks: tuple[str, ...]
    reason: str
    crashes: bool = False


_AS_DENSE = "torch writes a strided out as if its elements were adjacent, so that half of them stay unwritten"
_REPLACED = "torch gives a strided out new strides, so that the memory it was a view of is not what is written"
_UNTOUCHED = "torch leaves out untouched where a single dimension is transformed"
_UNREDUCED = "torch writes the first unreduced loss, or nothing, into a 0-d out of a reduced loss"
_ORDER = "torch draws other random numbers for a strided out"

_STRIDED = {
    _AS_DENSE: (
        "adaptive_avg_pool3d_backward.grad_input",
        "adaptive_max_pool3d",
        "adaptive_max_pool3d_backward",
        "avg_pool3d",
        "avg_pool3d_backward",
        "fft_fftfreq",
        "fractional_max_pool2d",
        "fractional_max_pool2d_backward",
        "fractional_max_pool3d",
        "fractional_max_pool3d_backward",
        "gelu",
        "narrow_copy",
        "slow_conv_transpose2d",
        "slow_conv_transpose3d",
        "upsample_bicubic2d_backward",
    ),
    _REPLACED: (
        "adaptive_avg_pool2d",
        "cholesky_inverse",
        "geqrf",
        "linear",
        "log_sigmoid_forward",
        "max_pool3d_with_indices",
        "max_pool3d_with_indices_backward",
        "max_unpool2d",
        "ormqr",
        "reflection_pad2d_backward",
        "reflection_pad3d",
        "reflection_pad3d_backward",
        "replication_pad2d",
        "replication_pad2d_backward",
        "replication_pad3d",
        "replication_pad3d_backward",
        "thnn_conv2d",
    ),
    _ORDER: ("randn.generator",),
}

DIVERGENCES: tuple[Divergence, ...] = (
    *(Divergence(name, ("out strided",), reason) for reason, names in _STRIDED.items() for name in names),
    Divergence("binary_cross_entropy", ("out", "out empty", "out strided"), _UNREDUCED),
    Divergence("binary_cross_entropy_backward", ("out empty",), "torch leaves an empty out of a 0-d gradient empty"),
    Divergence("fft_ihfft2", ("out", "out empty", "out strided"), _UNTOUCHED),
    Divergence("fft_ihfftn", ("out", "out empty", "out strided"), _UNTOUCHED),
    Divergence(
        "native_batch_norm",
        ("out", "out empty", "out strided"),
        "torch leaves elements of out unwritten where the input is transposed",
    ),
    Divergence("native_batch_norm_backward", ("reference",), "torch divides by zero on an empty input", crashes=True),
    Divergence("rrelu_with_noise", ("out empty",), "torch writes past an empty out", crashes=True),
)
