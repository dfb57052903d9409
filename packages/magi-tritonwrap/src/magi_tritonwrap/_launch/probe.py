# SPDX-License-Identifier: Apache-2.0
"""Find out whether a body can be traced, before the trace that counts has changed anything.

A body that reads the data of a tensor, or launches through something that is not a Triton kernel, fails halfway. By
then, the launches before that point have already replaced their tensors in the trace. So the body runs on separate
fakes first; if that fails, the op stays opaque in this graph, and its report says why.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from magi_tritonwrap._kernel.kernels import as_kernel
from magi_tritonwrap._torch_compat.tracing import (
    decides_by_data,
    fake_mode_of,
    proxy_tracing_disabled,
    unwrap_functional,
)
from magi_tritonwrap.errors import TritonWrapError

from .hook import Run, in_library_folder, listening
from .normalise import resolve, unsupported


class _Checker:
    """A listener that resolves launches, so that those which no graph can carry raise an error, and drops them."""

    def on_launch(self, kernel: Any, _run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> None:
        described = as_kernel(kernel)
        if kwargs.get("warmup"):
            why = "is compiled by .warmup() in the op's body, and a graph has no compiled kernel to look at. "
            fix = "Launch the kernel itself, and choose its grid from torch.cuda.get_device_properties()"
            raise unsupported(described, why + fix)
        if not described.is_interpreted:
            resolve(kernel, args, kwargs)


def why_untraceable(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The reason why *fn* cannot be traced with these functional tensors; empty when it can.

    Raises:
        TritonWrapError: a launch is one that no graph can carry, which is an error rather than a reason.
    """
    inner = tree_map_only(torch.Tensor, unwrap_functional, (args, kwargs))
    fake_mode = fake_mode_of(inner)
    if fake_mode is None:
        return ""
    with ExitStack() as stack:
        stack.enter_context(proxy_tracing_disabled())
        stack.enter_context(fake_mode)
        if fake_mode.shape_env is not None:
            stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(listening(_Checker()))
        fresh_args, fresh_kwargs = tree_map_only(torch.Tensor, _same_layout, inner)
        try:
            fn(*fresh_args, **fresh_kwargs)
        except TritonWrapError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the body raises is the reason, and is reported
            return told(error)
    return ""


def _same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout that may be written without changing the one that is being traced."""
    if tensor.layout != torch.strided:
        return torch.empty_like(tensor)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def told(error: Exception) -> str:
    """The message of an error of a body in one line, with the place in the author's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not in_library_folder(frame.filename)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    # torch's message names a symbol, which differs between traces.
    first_line = "it branches on data of a tensor" if decides_by_data(error) else str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}{place}"
