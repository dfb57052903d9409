# SPDX-License-Identifier: Apache-2.0
"""What an operator adds to AOTAutograd's cache key: everything that shapes the graph its body becomes.

torch keys on the sources of kernels that it finds, and misses the op's Python body, autotune configs, helpers and the
constants they read (`torch/_functorch/_aot_autograd/autograd_cache.py`). It asks each entry of its table for `.src`
while it computes a key. Our entry answers with a fingerprint that is computed at that moment, so the key also changes
with a constant that changes between two compilations in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import triton
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from triton.runtime.autotuner import Autotuner, Config, Heuristics
from triton.runtime.jit import JITFunction

from ._identity.code import CodeNames, digest, nested
from ._identity.library import root_of
from ._identity.members import is_a
from ._identity.walk import TORCH_ATOMS, Place, Walk, type_name
from ._kernel.bodies import as_overload, bodies_mentioned, body_of_inner_op
from ._kernel.kernels import Kernel, kernel_behind
from ._kernel.report import KernelReport
from ._torch_compat.kernels import interpreted_classes, kernel_classes, kernel_in_wrapper, settings_of
from ._torch_compat.operators import overload_of, schemas_of
from ._torch_compat.tracing import cache_bypass, leave_out_of_cache


class CacheKeyEntry:
    """An entry in the place where torch expects a JITFunction, of which it reads `.src`, `.__name__` and `.fn`."""

    def __init__(self, name: str, body: Callable[..., Any], found: KernelReport) -> None:
        self.__name__ = name
        self._roots = (body, *(kernel.kernel for kernel in found.kernels))
        self._covered: tuple[Any, ...] = ()
        self.state = "not asked yet"

    @property
    def src(self) -> str:
        """The fingerprint of the op's body and kernels.

        Raises:
            BypassAOTAutogradCache: something that the body reads has no stable form; torch compiles without its cache.
        """
        found = fingerprint(self._roots, f"body of {self.__name__}")
        if found.unstable:
            self.state = "bypassed: " + "; ".join(found.unstable)
            raise cache_bypass(f"{self.__name__}: {self.state}")
        self.state = "keyed"
        self._covered = found.kernels
        return f"{self.__name__} {found.digest}"

    def check(self, kernels: Iterable[Kernel]) -> None:
        """Keep the graph that is being traced out of the cache if it launches a kernel that the key does not cover.

        Another process would take the graph from there after an edit of the kernel. A kernel is covered if the walk met
        it, or the function whose body defines it.
        """
        if self.state != "keyed":
            return
        met = {id(value) for value in self._covered}
        for kernel in kernels:
            if id(kernel.outermost) not in met and id(kernel.function.__code__) not in met:
                where = f"{kernel.name} ({kernel.file}:{kernel.line})"
                self.state = f"not stored: no name in the code of the op leads to {where}, which it launches"
                leave_out_of_cache()

    @staticmethod
    def fn() -> None:
        """Refer to nothing: torch searches the globals of this function for further sources."""


@dataclass(frozen=True)
class Fingerprint:
    """A digest, the paths of values that have no stable form, and the kernels that were met.

    Beside kernels, `kernels` has the code of functions inside functions, which may be that of a kernel made later.
    """

    digest: str
    unstable: tuple[str, ...]
    kernels: tuple[Any, ...] = field(default=(), compare=False, repr=False)


def fingerprint(values: Iterable[Any], name: str) -> Fingerprint:
    """The fingerprint of functions, kernels or plain values.

    A value without a stable form, for example a socket, is listed in `unstable`, and then the digest is not a key.

    Args:
        values: where the walk starts; the distributions that they are from are read as their author's own.
        name: what paths of unstable values start with.
    """
    roots = list(values)
    walk = OpWalk(frozenset(map(root_of, roots)))
    found = walk.result((value, Place(name)) for value in roots)
    kernels = [value for value in walk.met() if is_a(value, kernel_classes())]
    inner = [code for value in walk.met() if is_a(value, FunctionType) for code in nested(value.__code__)[1:]]
    return Fingerprint(found, tuple(dict.fromkeys(walk.unstable_values)), (*kernels, *inner))


class OpWalk(Walk):
    """A walk from the body of an op, which knows kernels and the bodies of the ops that it calls."""

    atoms = (*TORCH_ATOMS, triton.language.dtype)
    follows_ours = False
    reads_whole_modules = False

    def __init__(self, own: frozenset[str], outer: tuple[int, ...] = ()) -> None:
        super().__init__(own, outer)
        self.unstable_values: list[str] = []

    def unstable(self, value: Any, place: Place, why: str) -> str:
        if not place.is_lenient:
            self.unstable_values.append(f"{place.text} {why}")
        return digest("unstable", type_name(type(value)))

    def unloaded(self, place: Place, names: list[str]) -> str:
        return self.unstable("", place, f"is not loaded yet: {', '.join(names)}")

    def title(self, function: FunctionType) -> str:
        return f"{function.__module__}.{function.__qualname__}"

    def mentioned(self, names: CodeNames, place: Place) -> Iterator[str]:
        for op, body in bodies_mentioned(names.mentioned):
            yield op
            yield self.form(body, place.of(f"body of {op}"))

    def special_form(self, value: Any, place: Place) -> str | None:
        if is_a(value, (OpOverload, OpOverloadPacket, CustomOpDef)):
            named = as_overload(value)
            body = None if named is None else body_of_inner_op(named.name())
            op = overload_of(value) if is_a(value, CustomOpDef) else value
            inner = "" if body is None else self.form(body, place.of(f"body of {op}"))
            return digest("op", str(op), *schemas_of(op), inner)
        if is_a(value, Config):
            return digest("config", self.form(value.all_kwargs(), place), self.form(value.pre_hook, place))
        if is_a(value, triton.language.constexpr):
            return digest("constexpr", self.form(value.value, place))
        wrapped = kernel_in_wrapper(value)
        return self._kernel(value, place) if wrapped is None else self.form(wrapped, place)

    def _kernel(self, value: Any, place: Place) -> str | None:
        """The form of a kernel, from its source, its settings and what its function refers to; None for any other."""
        if is_a(value, JITFunction):
            return digest("kernel", value.src, self.form(settings_of(value), place), self.form(value.fn, place))
        if is_a(value, interpreted_classes()):
            return digest("interpreted kernel", self.form(value.fn, place))
        if is_a(value, Heuristics):
            return digest("heuristics", self.form(dict(value.values), place), self.form(value.fn, place))
        if is_a(value, Autotuner):
            tuned = (value.configs, value.keys, value.reset_to_zero, value.restore_value)
            pruned = (value.perf_model, value.configs_top_k, value.early_config_prune)
            return digest("autotuner", *(self.form(part, place) for part in (tuned, pruned, value.fn)))
        launched = kernel_behind(value)
        return None if launched is None else digest("launcher", type(value).__qualname__, self.form(launched, place))
