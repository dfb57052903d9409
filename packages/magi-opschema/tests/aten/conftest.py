# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from magi_opschema import aten
from magi_opschema.aten._dispatch.kernels import cells, out_names, schema_parameters
from magi_opschema.aten._generate.schema import base_and_overload, parameter_name


@pytest.fixture(scope="session", autouse=True)
def _surface_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder per test run, so that no test reads what another version of the generator wrote."""
    variable = "MAGI_OPSCHEMA_CACHE_DIR"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, os.environ.get(variable) or str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def slot() -> Iterator[Callable[..., None]]:
    """Register kernels for one test: `slot("softmax", 1, fn)`; all of them are taken away afterwards."""
    with contextlib.ExitStack() as cleanup:
        taken: set[tuple[str, int]] = set()

        def register(base: str, number: int, fn: Callable[..., object], **options: object) -> None:
            aten.register_slot(base, number, fn, **options)  # type: ignore[call-overload]
            name, _ = base_and_overload(base)
            if (name, number) not in taken:
                taken.add((name, number))
                cleanup.callback(aten.unregister_slot, name, number)

        yield register


@pytest.fixture(scope="session")
def delegate() -> Callable[..., Callable[..., Any]]:
    return _delegate


def _delegate(
    base: str, leading: str, change: Callable[..., Any] | None = None, *, takes_out: bool = False
) -> Callable[..., Any]:
    """A kernel with the exact signature of one variant, which hands every call to ATen.

    With *change*, it calls `change(reference, args, kwargs)` instead.
    """
    cell = cells[base]
    pair = next(pair for pair in cell.pairs if pair.leading == leading)
    overload = cell.overloads[leading]
    in_schema = {parameter_name(argument.name): argument.name for argument in overload._schema.arguments}

    def reference(*args: Any, **kwargs: Any) -> Any:
        if pair.functional is None:
            kwargs |= {name: args[0].new_empty(0) for name in out_names(cell, pair)}
        return _own(overload(*args, **kwargs), args)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        kwargs = {in_schema[name]: value for name, value in kwargs.items()}
        return reference(*args, **kwargs) if change is None else change(overload, args, kwargs)

    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in schema_parameters(cell, pair)]
    if takes_out:
        parameters.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None))
    kernel.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return kernel


def _own(result: Any, args: tuple[Any, ...]) -> Any:
    """The result, copied where it shares memory with an argument: ATen may (`conj_physical`), a kernel must not."""
    if isinstance(result, (list, tuple)):
        return type(result)(_own(part, args) for part in result)
    tensors = [t for t in (result, *args) if isinstance(t, torch.Tensor) and t.layout is torch.strided and t.numel()]
    places = [t.untyped_storage().data_ptr() for t in tensors]
    shared = bool(tensors) and tensors[0] is result and places[0] in places[1:]
    return result.clone() if shared else result
