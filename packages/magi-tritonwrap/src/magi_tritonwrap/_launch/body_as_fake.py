# SPDX-License-Identifier: Apache-2.0
"""A body on fake tensors: as the op's own fake, and to see whether it launches anything.

Launches are dropped, so that the body allocates its outputs and computes nothing. Where the body reads the data of a
tensor (`.item()`, `.tolist()`, `if mask.any()`, the size of `x.nonzero()`), the fake answers with a made-up number, and
runs the body again with another number: if the outputs are the same, they do not depend on the data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from magi_tritonwrap._torch_compat.operators import is_collective
from magi_tritonwrap._torch_compat.tracing import (
    ITEM_OPERATORS,
    cannot_be_fake,
    concrete_number,
    fake_tensors,
    taking_real_tensors,
)
from magi_tritonwrap.errors import NoFakeError

from .capture import CapturedLaunch, capture_launches
from .fake_runs import FakeRun
from .hook import launch_site
from .recording import told


P = ParamSpec("P")
R = TypeVar("R")

_FIRST = (1, True)
# First a number that is large and not a multiple of a block size, so that sizes that depend on it differ; then others,
# for a body that refuses some data.
_OTHERS = ((257, False), (257, True), (3, False), (3, True))
_MOST_ANSWERS = 100_000  # a loop that waits for a certain value would never end
_READS = (
    *ITEM_OPERATORS,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.allclose.default,
)


def _picked(number: int, x: torch.Tensor, indices: Any) -> torch.Tensor:
    """`x[indices]` where each mask picks *number* entries."""
    picks: list[Any] = []
    for index in indices:
        picks += [index.new_empty(number, dtype=torch.int64)] * index.dim() if _is_mask(index) else [index]
    result: torch.Tensor = torch.ops.aten.index.Tensor(x, picks)
    return result


def _repeated(number: int, x: torch.Tensor, _repeats: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    size = [number] if dim is None else [number if at == dim % x.dim() else one for at, one in enumerate(x.shape)]
    return x.new_empty(size)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


# Operators whose number of output entries depends on data, with a function that makes the output for a given number.
_SIZED_BY_DATA: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.nonzero.default: lambda n, x: x.new_empty((n, x.dim()), dtype=torch.int64),
    torch.ops.aten.index.Tensor: _picked,
    torch.ops.aten.masked_select.default: lambda n, x, _mask: x.new_empty(n),
    torch.ops.aten.repeat_interleave.self_Tensor: _repeated,
    torch.ops.aten.repeat_interleave.Tensor: lambda n, repeats: repeats.new_empty(n, dtype=torch.int64),
}


@dataclass(frozen=True)
class LaunchProbe:
    """What a body did on fake tensors.

    Attributes:
        launches: the launches that it reached, in order.
        stopped_by: why it did not run to its end; empty if it did.
        error: the exception that stopped it.
    """

    launches: tuple[CapturedLaunch, ...]
    stopped_by: str
    error: Exception | None = None


def fake_from_body(fn: Callable[P, R]) -> Callable[P, R]:
    """Return a fake for an op: *fn* with its launches dropped.

    A body that reads data of its tensors is run twice, with different made-up numbers for the data. The fake works if
    both runs give outputs of the same shapes, strides, dtypes and devices.

    Raises:
        NoFakeError: raised by the fake if the outputs depend on data, if the body asks for something that fake
            tensors do not have, such as an address, or if it keeps a Tensor that it makes.

    Example:
        >>> import torch
        >>> def total(x): return x.new_zeros(()) if x.sum().item() else x.new_ones(())
        >>> fake_from_body(total)(torch.ones(3, device="meta")).shape
        torch.Size([])
    """

    @functools.wraps(fn)
    def fake(*args: P.args, **kwargs: P.kwargs) -> R:
        first, asked = _run(fn, args, kwargs, _FIRST)
        if not asked:
            return first
        second = _with_other_data(fn, args, kwargs)
        if _described(first) != _described(second):
            raise NoFakeError(_no_fake(fn, f"reads data of its tensors ({asked}), and its outputs depend on them"))
        return first

    return fake


def probe_launches(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LaunchProbe:
    """Run *fn* once, with its launches dropped, on fake tensors like those in *args*, to see whether it launches.

    The tensors are fakes of a separate mode, with numbers for sizes, so that a trace in progress is not affected. The
    run ends where the body reads data or communicates with other ranks.

    Raises:
        NoFakeError: the body has kept a Tensor that it made, and so has one without data now.
    """
    with ExitStack() as stack:
        stack.enter_context(disable_proxy_modes_tracing())
        stack.enter_context(fake_tensors())
        fresh_args, fresh_kwargs = tree_map(_concrete, (args, kwargs))
        log = stack.enter_context(capture_launches(drop=True))
        run = stack.enter_context(FakeRun(fn, (fresh_args, fresh_kwargs)))
        stack.enter_context(_Refusing())  # type: ignore[no-untyped-call]
        try:
            fn(*fresh_args, **fresh_kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the body raises is the reason, and is reported
            stopped_by = told(error)
            run.forget(error=error)
            return LaunchProbe(tuple(log.launches), stopped_by, error)
        run.forget()
    return LaunchProbe(tuple(log.launches), "")


class _Refused(Exception):  # noqa: N818 - it never leaves this module
    """A body asked for something that a run on fake tensors must not have."""


class _Refusing(TorchDispatchMode):
    """A mode that ends a run at the first operator that reads data or communicates with other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise _Refused("it reads data of a tensor")
        if is_collective(func):
            raise _Refused(f"it communicates with other ranks ({func})")
        return func(*args, **(kwargs or {}))


def _asks_for_data(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return any(_is_mask(index) for index in args[1])
    return func in _READS or (func in _SIZED_BY_DATA and kwargs.get("output_size") is None)


class _Answering(TorchDispatchMode):
    """A mode that gives one made-up number, and one truth value, for all data of tensors."""

    def __init__(self, number: int, truth: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number, self._truth = number, truth
        self._answers = 0
        self.asked = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _asks_for_data(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        self._answers += 1
        if self._answers > _MOST_ANSWERS:
            raise _Refused("it reads data in a loop that does not end")
        self.asked = self.asked or ":".join(map(str, launch_site()))
        if func in _SIZED_BY_DATA:
            return _SIZED_BY_DATA[func](self._number, *args, **(kwargs or {}))
        dtype = args[0].dtype if func in ITEM_OPERATORS else torch.bool
        if dtype is torch.bool:
            return self._truth
        return float(self._number) if dtype.is_floating_point else self._number


def _run(fn: Callable[P, R], args: Any, kwargs: Any, data: tuple[int, bool]) -> tuple[R, str]:
    given = (args, kwargs)
    with (
        taking_real_tensors(given),
        capture_launches(drop=True),
        FakeRun(fn, given) as run,
        _Answering(*data) as answers,
    ):
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            if not (answers.asked or isinstance(error, _Refused) or cannot_be_fake(error)):
                raise
            why = told(error)
            run.forget(error=error)
            raise NoFakeError(_no_fake(fn, f"does not run on fake tensors: {why}")) from error
        run.forget(result)
        return result, answers.asked


def _with_other_data(fn: Callable[P, R], args: Any, kwargs: Any) -> R:
    """What *fn* returns for other made-up data, of which it may refuse some, such as an index that is out of range."""
    refused: list[NoFakeError] = []
    for data in _OTHERS:
        try:
            return _run(fn, args, kwargs, data)[0]
        except NoFakeError as error:
            refused.append(error)
    raise refused[0]


def _no_fake(fn: Callable[..., Any], why: str) -> str:
    name = getattr(fn, "__qualname__", type(fn).__name__)
    return f"The body '{name}' {why}. State the outputs: infer_output_meta_fn=, or register_fake of a CustomOpDef."


def _described(result: object) -> object:
    leaves, structure = tree_flatten(result)
    described = [
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    return str(structure), described


def _concrete(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return concrete_number(value)
    size = [concrete_number(one) for one in value.size()]
    if value.layout != torch.strided:
        return torch.empty(size, dtype=value.dtype, device=value.device)
    stride = [concrete_number(one) for one in value.stride()]
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
