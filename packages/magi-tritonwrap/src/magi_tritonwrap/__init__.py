# SPDX-License-Identifier: Apache-2.0
"""Plain Triton launches inside a PyTorch op, visible to Inductor without `wrap_triton` in user code."""

from __future__ import annotations

from ._find import find_kernels
from ._kernel.kernels import register_launcher
from ._kernel.report import FoundKernel, InnerOp, KernelReport, OpReport, SideEffect, UnresolvedLaunch
from ._launch.body_as_fake import LaunchProbe, fake_from_body, probe_launches
from ._launch.capture import CapturedLaunch, LaunchLog, capture_launches, launch_directly, wrap_kernels
from ._launch.on_cpu import translate_cpu_errors
from ._op import triton_op
from ._see_through import make_see_through, see_through_report, unsupported_launches
from .errors import (
    CpuTensorError,
    LostSettingWarning,
    NoFakeError,
    NotAnOpError,
    OpaqueFallbackWarning,
    TritonWrapError,
    UndeclaredWriteError,
    UnknownOpError,
    UnsupportedKernelError,
    UnsupportedLaunchError,
)


__all__ = [
    "CapturedLaunch",
    "CpuTensorError",
    "FoundKernel",
    "InnerOp",
    "KernelReport",
    "LaunchLog",
    "LaunchProbe",
    "LostSettingWarning",
    "NoFakeError",
    "NotAnOpError",
    "OpReport",
    "OpaqueFallbackWarning",
    "SideEffect",
    "TritonWrapError",
    "UndeclaredWriteError",
    "UnknownOpError",
    "UnresolvedLaunch",
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
