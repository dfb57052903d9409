# SPDX-License-Identifier: Apache-2.0
"""Inputs from torch's own test database: its samples passed to ATen, and the calls that ATen saw when they ran."""

from __future__ import annotations

import functools as ft
import itertools as it
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from magi_opschema.aten._torch_compat import arguments, find_overload
from magi_opschema.aten.errors import MissingExtraError
from torch.utils._python_dispatch import TorchDispatchMode

from .samples import Sample
from .torch_names import op_database, resolve_overload


if TYPE_CHECKING:
    from collections.abc import Iterator


SAMPLES_PER_OP_INFO = 40
LARGEST = 20_000
"""The number of elements above which a sample is too slow to be useful."""


@ft.cache
def op_infos() -> dict[str, list[Any]]:
    """The database's entries by every ATen base that they may stand for.

    Raises:
        MissingExtraError: numpy or expecttest, which it needs, is missing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entries = op_database()
        except ImportError as error:
            msg = f"torch's test database cannot be imported ({error}): pip install 'magi-opschema[aten]'."
            raise MissingExtraError(msg) from error
    found: dict[str, list[Any]] = defaultdict(list)
    for info in entries:
        aliases = [alias.name for alias in info.aliases]
        names = {name.replace(".", "_") for name in (info.name, *aliases)} | {info.aten_name}
        names |= {name.removeprefix("nn_functional_") for name in names}
        for name in names:
            found[name].append(info)
    return dict(found)


def direct_samples(base: str, dtype: torch.dtype) -> Iterator[tuple[str, Sample]]:
    """Samples of entries named like *base* that ATen's own overload resolution accepts, each with its overload."""
    for info in op_infos().get(base, ()):
        if dtype not in info.dtypes:
            continue
        for sample in _samples(info, dtype):
            args = (sample.input, *sample.args)
            overload = resolve_overload(base, args, sample.kwargs)
            if overload is not None and not _takes_tensor_as_number(base, overload, args):
                yield overload, Sample(args, dict(sample.kwargs), "op_db", dtype).map_tensors(torch.Tensor.detach)


def _takes_tensor_as_number(base: str, overload: str, args: tuple[Any, ...]) -> bool:
    """Whether a tensor is passed for a number of the schema: ATen reads its value, a caller means another form."""
    schema = arguments(find_overload(base, overload))  # type: ignore[arg-type]  # it was just resolved
    return any(isinstance(v, torch.Tensor) and "Tensor" not in str(a.type) for a, v in zip(schema, args, strict=False))


@ft.cache
def captured_samples() -> dict[str, list[Sample]]:
    """The calls of every ATen overload while the whole database ran, forward and backward."""
    capture = _Capture()
    seen: set[int] = set()
    for infos in op_infos().values():
        for info in infos:
            if id(info) in seen or torch.float32 not in info.dtypes:
                continue
            seen.add(id(info))
            _run_captured(info, capture)
    return capture.calls


class _Capture(TorchDispatchMode):
    _KEPT = 4

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is untyped
        self.calls: dict[str, list[Sample]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("aten.") and len(self.calls[name]) < self._KEPT:
            sample = Sample(tuple(args), dict(kwargs), "captured", torch.float32)
            if sum(t.numel() for t in sample.tensors()) <= LARGEST:
                self.calls[name].append(sample.fresh())
        return func(*args, **kwargs)


def _run_captured(info: Any, capture: _Capture) -> None:
    differentiable = info.supports_autograd
    for sample in it.islice(_samples(info, torch.float32, requires_grad=differentiable), 8):
        # The database has samples that raise by design, or that run on other devices only; these are skipped.
        try:
            with capture, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = info(sample.input, *sample.args, **sample.kwargs)
                outputs = [t for t in _tensors(result) if t.requires_grad]
                if outputs and differentiable:
                    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, IndexError, AssertionError):
            continue


def _samples(info: Any, dtype: torch.dtype, *, requires_grad: bool = False) -> Iterator[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = info.sample_inputs("cpu", dtype, requires_grad=requires_grad)
        for sample in it.islice(found, SAMPLES_PER_OP_INFO):
            tensors = _tensors([sample.input, *sample.args, *sample.kwargs.values()])
            if sum(t.numel() for t in tensors) <= LARGEST:
                yield sample


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []
