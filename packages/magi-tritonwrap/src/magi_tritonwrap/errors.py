# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, one class a mistake; every message says what, where, why and the fix."""

from __future__ import annotations


class TritonWrapError(Exception):
    """Root of every error that this package raises."""


class UnsupportedKernelError(TritonWrapError, TypeError):
    """A kernel is decorated in a way that no compiled graph can reproduce.

    Raised at decoration for kernels that `find_kernels` resolves, and at the first compilation for the others.
    """


class UnsupportedLaunchError(TritonWrapError, ValueError):
    """A launch passes something that a compiled graph cannot carry, for example an unknown launch option."""


class NoFakeError(TritonWrapError, RuntimeError):
    """A body that was to be its op's own fake cannot be: its outputs depend on data, or it asks for addresses."""


class CpuTensorError(TritonWrapError, RuntimeError):
    """An op that launches Triton kernels got CPU tensors, and has no body for them."""


class UndeclaredWriteError(TritonWrapError, RuntimeError):
    """The body of an op launches a kernel that writes into a Tensor which the op's schema does not say is written."""


class NotAnOpError(TritonWrapError, TypeError):
    """`make_see_through` was given something that is not a registered operator."""


class UnknownOpError(TritonWrapError, KeyError):
    """`see_through_report` was asked about an operator that `make_see_through` never saw."""

    def __str__(self) -> str:
        return str(self.args[0])


class OpaqueFallbackWarning(UserWarning):
    """An operator stays opaque to the compiler for this graph; its report says the same."""


class LostSettingWarning(UserWarning):
    """A launch setting that eager launches honour and Inductor leaves out; results are the same, speed may not be."""
