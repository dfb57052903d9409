# SPDX-License-Identifier: Apache-2.0
"""Whether code may be compiled during a call, and the state in which the captured graph was compiled."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from magi_backend._verify.random import replayed_random_numbers

from . import _torch_compat


if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Autocast:
    """Autocast of one kind of device."""

    device: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class CompileState:
    """The state of the thread and of the process that a compilation reads.

    Attributes:
        inference: Inference mode.
        grad: Grad mode.
        autocast: Autocast of each kind of device that has it.
        autocast_cache: Whether autocast keeps converted weights.
        deterministic: Whether deterministic algorithms are required.
        warn_only: Whether an operator without one only warns.
        dtype: The default dtype.
        configs: The configuration of Inductor and of AOTAutograd.
    """

    inference: bool
    grad: bool
    autocast: tuple[Autocast, ...]
    autocast_cache: bool
    deterministic: bool
    warn_only: bool
    dtype: torch.dtype
    configs: tuple[dict[str, Any], ...]


def compile_state() -> CompileState:
    """The current state."""
    return CompileState(
        inference=torch.is_inference_mode_enabled(),
        grad=torch.is_grad_enabled(),
        autocast=tuple(
            Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _torch_compat.autocast_devices()
        ),
        autocast_cache=torch.is_autocast_cache_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        dtype=torch.get_default_dtype(),
        configs=_torch_compat.config_values(),
    )


@contextlib.contextmanager
def restored(state: CompileState) -> Iterator[None]:
    """A context to compile in *state*. At its end the state of the process is restored, random numbers included."""
    before, numbers = compile_state(), random.getstate()
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, numbers)
        stack.callback(_set_process, before)
        stack.enter_context(_torch_compat.dispatch_keys_kept())
        # A default device is such a mode; its effect is already in the captured graph.
        stack.enter_context(_torch_compat.no_function_modes())
        stack.enter_context(replayed_random_numbers())
        stack.enter_context(torch.inference_mode(state.inference))
        stack.enter_context(torch.set_grad_enabled(state.grad))
        for autocast, now in zip(state.autocast, before.autocast, strict=True):
            if autocast != now or state.autocast_cache != before.autocast_cache:
                stack.enter_context(
                    torch.autocast(autocast.device, autocast.dtype, autocast.enabled, state.autocast_cache)
                )
        _set_process(state)
        stack.enter_context(_torch_compat.configured(state.configs))
        yield


def _set_process(state: CompileState) -> None:
    torch.use_deterministic_algorithms(state.deterministic, warn_only=state.warn_only)
    torch.set_default_dtype(state.dtype)


def is_stream_captured() -> bool:
    """Whether the current CUDA stream is being captured into a graph, which a compilation would break."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def why_not_now(*, same_on_all_ranks: bool) -> str:
    """Why this call must not compile.

    Empty if it may. *same_on_all_ranks* says whether every rank compiles in this call.
    """
    if is_stream_captured():
        return "a CUDA stream is being captured"
    if _torch_compat.is_compiling():
        return "the call is part of another compilation"
    if _torch_compat.is_dispatch_observed():
        return "the call runs under a dispatch mode or a function transform"
    if not same_on_all_ranks and (count := ranks()) > 1:
        return (
            f"a rank of {count} that compiles alone makes the others wait; magi.compile_sizes compiles on all of them"
        )
    return ""


def ranks() -> int:
    """How many processes work together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
