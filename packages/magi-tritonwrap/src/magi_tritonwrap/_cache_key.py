# SPDX-License-Identifier: Apache-2.0
"""What an operator adds to AOTAutograd's cache key: everything that shapes the graph its body becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Callable

    from ._report import KernelReport


class CacheKeyEntry:
    """Stands where torch expects a JITFunction, and answers `.src` with a fingerprint made at that moment."""

    def __init__(self, name: str, fn: Callable[..., Any], found: KernelReport) -> None:
        self.__name__ = name
        self._body = fn
        self._found = found
        self.state = "not asked yet"

    @property
    def src(self) -> str:
        """The fingerprint."""
        self.state = "keyed"
        kernels = [found.kernel for found in self._found.kernels]
        return repr([getattr(kernel, "src", kernel) for kernel in kernels]) + self._body.__code__.co_code.hex()

    @property
    def fn(self) -> Callable[..., None]:
        """A function without globals, for torch to look through."""
        return _nothing


def _nothing() -> None:
    """Refer to nothing."""
