# SPDX-License-Identifier: Apache-2.0
"""What an operator adds to AOTAutograd's cache key: everything that shapes the graph its body becomes.

torch keys on the sources of kernels that it finds, and misses the op's Python body, autotune configs, helpers and the
constants they read (`torch/_functorch/_aot_autograd/autograd_cache.py`). It asks each entry of its table for `.src`
while it computes a key. Our entry answers with a fingerprint that is computed at that moment, so the key also changes
with a constant that changes between two compilations in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magi_tritonwrap._torch_compat import cache_bypass

from .fingerprint import fingerprint


if TYPE_CHECKING:
    from collections.abc import Callable

    from magi_tritonwrap._kernel.report import KernelReport


class CacheKeyEntry:
    """An entry in the place where torch expects a JITFunction, of which it reads `.src`, `.__name__` and `.fn`."""

    def __init__(self, name: str, body: Callable[..., Any], found: KernelReport) -> None:
        self.__name__ = name
        self._outside = [str(launch) for launch in found.unresolved if not launch.in_key]
        self._roots = (body, *(kernel.kernel for kernel in found.kernels))
        self.state = "not asked yet"

    @property
    def src(self) -> str:
        """The fingerprint of the op's body and kernels.

        Raises:
            BypassAOTAutogradCache: something that the body reads has no stable form; torch compiles without its cache.
        """
        found = fingerprint(self._roots, f"body of {self.__name__}")
        missing = [*found.unstable, *self._outside]
        if missing:
            self.state = "bypassed: " + "; ".join(missing)
            msg = f"{self.__name__}: {self.state}"
            raise cache_bypass(msg)
        self.state = "keyed"
        return f"{self.__name__} {found.digest}"

    @property
    def fn(self) -> Callable[..., None]:
        """A function without globals, because torch searches its globals for further sources."""
        return _nothing


def _nothing() -> None:
    """Do nothing, and refer to nothing."""
