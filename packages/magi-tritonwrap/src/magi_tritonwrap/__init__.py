# SPDX-License-Identifier: Apache-2.0
"""Plain Triton launches inside a PyTorch op, visible to Inductor without `wrap_triton` in user code."""

from torch.library import wrap_triton as wrap_triton  # for code that comes from MagiCompiler

from ._find import find_kernels
from ._kernel.kernels import register_launcher
from ._kernel.report import InnerOp, KernelReport, OpReport
from ._launch.body_as_fake import fake_from_body, probe_launches
from ._launch.capture import capture_launches, launch_directly, wrap_kernels
from ._launch.checks import translate_cpu_errors
from ._see_through import make_see_through, see_through_report, triton_op, unsupported_launches
from .errors import (
    CpuTensorError,
    NoFakeError,
    OpaqueFallbackWarning,
    TritonWrapError,
    UnsupportedKernelError,
    UnsupportedLaunchError,
)


__all__ = [
    "CpuTensorError",
    "InnerOp",
    "KernelReport",
    "NoFakeError",
    "OpReport",
    "OpaqueFallbackWarning",
    "TritonWrapError",
    "UnsupportedKernelError",
    "UnsupportedLaunchError",
    "capture_launches",
    "fake_from_body",
    "find_kernels",
    "launch_directly",
    "make_see_through",
    "probe_launches",
    "register_launcher",
    "see_through_report",
    "translate_cpu_errors",
    "triton_op",
    "unsupported_launches",
    "wrap_kernels",
]
