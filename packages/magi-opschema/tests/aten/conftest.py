# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _surface_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder per test run, so that no test reads what another version of the generator wrote."""
    variable = "MAGI_OPSCHEMA_CACHE_DIR"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ[variable]


@pytest.fixture
def slot() -> Iterator[Callable[..., None]]:
    """Register kernels for one test: `slot("softmax", 1, fn)`; all of them are taken away afterwards."""
    from magi_opschema import aten

    with contextlib.ExitStack() as cleanup:
        taken: set[tuple[str, int]] = set()

        def register(base: str, number: int, fn: Callable[..., object], **options: object) -> None:
            aten.register_slot(base, number, fn, **options)  # type: ignore[call-overload]
            name = base.partition(".")[0] if not base.startswith(("linalg.", "fft.", "special.")) else base
            if (name, number) not in taken:
                taken.add((name, number))
                cleanup.callback(aten.unregister_slot, name, number)

        yield register


@pytest.fixture
def surface() -> Path:
    """The folder of the default surface."""
    from magi_opschema.aten._load import default_folder

    return default_folder()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
