# SPDX-License-Identifier: Apache-2.0
"""What is known to differ, and what is not run: by name, with a reason.

The expectations are strict, so that a fix upstream is noticed: an entry of which no check fails any more makes the run
fail. All were seen on torch 2.13.0 on a CPU, with ATen alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """One known divergence of torch: an overload, the checks that fail on it, and why; `crashes` ends the process."""

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
    _AS_DENSE: """
        adaptive_avg_pool3d_backward.grad_input adaptive_max_pool3d adaptive_max_pool3d_backward avg_pool3d
        avg_pool3d_backward fft_fftfreq fractional_max_pool2d fractional_max_pool2d_backward
        fractional_max_pool3d fractional_max_pool3d_backward gelu narrow_copy slow_conv_transpose2d
        slow_conv_transpose3d upsample_bicubic2d_backward
    """,
    _REPLACED: """
        adaptive_avg_pool2d cholesky_inverse geqrf linear log_sigmoid_forward max_pool3d_with_indices
        max_pool3d_with_indices_backward max_unpool2d ormqr reflection_pad2d_backward reflection_pad3d
        reflection_pad3d_backward replication_pad2d replication_pad2d_backward replication_pad3d
        replication_pad3d_backward thnn_conv2d
    """,
    _ORDER: "randn.generator",
}
"""By reason, the overloads that fail with a strided out."""

DIVERGENCES: tuple[Divergence, ...] = (
    *(Divergence(name, ("out strided",), reason) for reason, names in _STRIDED.items() for name in names.split()),
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


_NO_FAKE = "torch has no fake for it"
_NO_SYMBOLS = "torch's fake of it takes no symbolic shapes"
_DATA_SHAPED = "the shape of its result depends on data, which torch does not trace into out"
_SPARSE = "opcheck takes no sparse tensors"
_STRICTER = "torch's fake of it refuses inputs that the operator takes"
_MODE = "AOTAutograd cannot pass a keyword called mode"

_LIBRARY = {
    _NO_FAKE: """
        adaptive_avg_pool3d_backward.grad_input binomial fractional_max_pool3d_backward geqrf glu_backward_jvp
        glu_jvp histogram.bins_tensor slow_conv3d slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d
        slow_conv_transpose3d thnn_conv2d
    """,
    _NO_SYMBOLS: """
        hardshrink_backward linalg_cond.p_str slow_conv_transpose2d softshrink_backward
    """,
    _DATA_SHAPED: """
        bincount linalg_lstsq masked_select nonzero repeat_interleave.Tensor unique_consecutive unique_dim
        unique_dim_consecutive where
    """,
    _SPARSE: """
        ccol_indices_copy col_indices_copy crow_indices_copy native_norm native_norm.ScalarOpt_dim_dtype
        row_indices_copy values_copy
    """,
    _STRICTER: "normal.out randint_like.Tensor_generator",
    _MODE: "hash_tensor",
    "torch writes its running statistics although the schema says it does not": "native_batch_norm",
}

LIBRARY_DIVERGENCES = {label: reason for reason, labels in _LIBRARY.items() for label in labels.split()}
"""By variant: why `opcheck` cannot pass on its library operators, whose fake is ATen's, for any kernel."""


CUDA_ONLY = "torch has the kernel for CUDA only"
OVERRIDEABLE = "torch has no kernel: a backend must bring one"
NOT_SERVED = "the kernel does not serve these inputs; ATen did"
REFUSED = "ATen refuses these inputs"

UNREACHED = "torch has the kernel for other devices only, or for nested tensors"

UNREGISTERED = "torch registers no kernel for the sparse tensors that it is meant for"

EXCLUDED = {
    "addmm.dtype": CUDA_ONLY,
    "baddbmm.dtype": CUDA_ONLY,
    "bmm.dtype": CUDA_ONLY,
    "conv_depthwise3d": CUDA_ONLY,
    "convolution_backward_overrideable": OVERRIDEABLE,
    "convolution_overrideable": OVERRIDEABLE,
    "indices_copy": UNREGISTERED,
    "linear_backward": UNREACHED,
    "matmul_backward": UNREACHED,
    "max_pool2d_backward": UNREACHED,
    "mm.dtype": CUDA_ONLY,
}
"""By variant, why no input can reach it on a CPU."""
