# SPDX-License-Identifier: Apache-2.0
"""Let Triton's interpreter run kernels of libraries: what it lacks of the compiler, and what libraries build around it.

Import it with TRITON_INTERPRET=1, and call `prepare` before a library is imported.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from _library_case import with_one_config


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    return tl.exp(x)


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


def prepare() -> None:
    """Change Triton, and what is imported later of flag_gems."""
    with_one_config()
    _with_floats()
    # The interpreter calls no function of CUDA's library.
    libdevice.tanh, libdevice.exp, libdevice.rsqrt = tanh, exp, rsqrt
    sys.meta_path.insert(0, _PlainKernels())


def _with_floats() -> None:
    """Make float32 of a float, as the compiler does: kernels ask for its type."""
    original: Callable[..., Any] = interpreter._implicit_cvt

    def converted(given: Any) -> Any:
        if not isinstance(given, float):
            return original(given)
        return tl.tensor(interpreter.TensorHandle(np.array([given], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = converted


def _first_of(configs: Sequence[Any], key: Sequence[str], **_settings: Any) -> Any:
    return triton.autotune(configs[:1], key)


def _plain_launches(libentry: ModuleType) -> None:
    libentry.libentry = lambda: lambda kernel: kernel  # type: ignore[attr-defined]
    libentry.libtuner = _first_of  # type: ignore[attr-defined]


def _no_generated_kernels(pointwise: ModuleType) -> None:
    pointwise.pointwise_dynamic = lambda *_args, **_options: lambda _function: mock.Mock()  # type: ignore[attr-defined]


class _PlainKernels(importlib.abc.MetaPathFinder):
    """Lets flag_gems do without kernels of the compiler, which its launchers and generators look for."""

    changes: Mapping[str, Callable[[ModuleType], None]] = {
        "flag_gems.utils.libentry": _plain_launches,
        "flag_gems.utils.pointwise_dynamic": _no_generated_kernels,
    }

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.changes:
            return None
        found: Any = PathFinder.find_spec(fullname, path, target)
        execute = found.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self.changes[fullname](module)

        found.loader.exec_module = execute_and_change
        return found  # type: ignore[no-any-return]
