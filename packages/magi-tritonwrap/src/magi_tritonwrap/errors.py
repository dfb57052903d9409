# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings, one class for each mistake. Every message says what is wrong, where, why, and the fix."""

from __future__ import annotations


class TritonWrapError(Exception):
    """Base class of every error that this package raises."""


class UnsupportedKernelError(TritonWrapError, TypeError):
    """A kernel is decorated in a way that no compiled graph can reproduce.

    Raised at decoration for kernels that functions name, and at the first compilation for the others.
    """


class UnsupportedLaunchError(TritonWrapError, ValueError):
    """A launch passes something that a compiled graph cannot carry, for example an unknown launch option."""


class NoFakeError(TritonWrapError, RuntimeError):
    """A body cannot be used as its op's fake: its outputs depend on data, it asks for addresses or keeps Tensors."""


class CpuTensorError(TritonWrapError, RuntimeError):
    """An op that launches Triton kernels got CPU tensors, and has no body for them."""


class UndeclaredWriteError(TritonWrapError, RuntimeError):
    """The body of an op launches a kernel that writes into a Tensor which the op's schema does not say is written."""


class NotAnOpError(TritonWrapError, TypeError):
    """`make_see_through` was given something that is not a registered operator, or a function that is not its body."""


class UnknownOpError(TritonWrapError, KeyError):
    """`see_through_report` was called for an operator that was never given to `make_see_through`."""

    def __str__(self) -> str:
        return str(self.args[0])


class OpaqueFallbackWarning(UserWarning):
    """An operator stays opaque to the compiler for this graph; its report says the same."""
