# SPDX-License-Identifier: Apache-2.0
"""What a walk through code notes about a call: the kernel, what is unknown about it, and why no graph can carry it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from magi_tritonwrap._kernel.kernels import Kernel, can_pass, cannot_pass
from magi_tritonwrap._kernel.report import KernelReport, UnresolvedLaunch
from magi_tritonwrap._torch_compat.operators import has_decomposition_rule

from .values import Scope, Unknown


LAUNCH_METHODS = ("run", "warmup")


@dataclass
class Found:
    """A kernel met on the walk, and the launches of it so far."""

    kernel: Any
    name: str
    how: str
    file: str
    line: int
    launches: list[tuple[str, int]] = field(default_factory=list)
    wrapped: set[tuple[str, int]] = field(default_factory=set)
    bare: set[tuple[str, int]] = field(default_factory=set)


def why_unsupported(kernel: Kernel, call: ast.Call) -> str:
    """Why a graph cannot carry a launch, as far as the call itself shows; empty if it can."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "warmup":
        return (
            "is compiled by .warmup() in the op's body, and a graph has no compiled kernel to look at. "
            "Launch the kernel itself, and choose its grid from torch.cuda.get_device_properties()."
        )
    unknown = [keyword.arg for keyword in call.keywords if keyword.arg and not can_pass(kernel, keyword.arg)]
    if unknown:
        return cannot_pass(unknown)
    return ""


def why_whole(op: str, report: KernelReport) -> str:
    """Why the launches of a `custom_op` cannot be seen through where another op calls it; empty if they can."""
    if has_decomposition_rule(op):
        return "its library has a rule of its own for it in compiled graphs"
    if not report.kernels:
        return f"which kernels it launches is known only at run time: {report.unresolved[0].reason}"
    return str(report.unsupported[0]) if report.unsupported else ""


def open_call(call: ast.Call, scope: Scope, value: Unknown) -> UnresolvedLaunch:
    return UnresolvedLaunch(
        ast.unparse(call.func),
        value.reason,
        scope.file,
        call.lineno,
        in_key=value.unread,
        is_launch=_is_written_as_launch(call),
    )


def looks_like_launch(call: ast.Call) -> bool:
    """Whether a call is written as `something[grid](...)` or `something.run(..., grid=...)`."""
    if isinstance(call.func, ast.Subscript):
        return True
    named = isinstance(call.func, ast.Attribute) and call.func.attr in LAUNCH_METHODS
    return named and any(keyword.arg == "grid" for keyword in call.keywords)


def _is_written_as_launch(call: ast.Call) -> bool:
    """Whether the index in a call of `something[index]` is a grid, rather than the key of a table."""
    if not looks_like_launch(call) or not isinstance(call.func, ast.Subscript):
        return looks_like_launch(call)
    index = call.func.slice
    return isinstance(index, ast.Tuple | ast.Lambda) or (isinstance(index, ast.Name) and "grid" in index.id)
