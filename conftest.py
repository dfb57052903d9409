# SPDX-License-Identifier: Apache-2.0
"""What holds for every suite of the workspace."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import torch
from _compile_once import kept_libraries, put_on_path


_FOLDER = pytest.StashKey[Path]()
_NUMBERS = itertools.count()


class _Undeclared(MetaPathFinder):
    """Hides the modules in ``MAGI_TESTS_ALONE``, which `nox -s unit` sets to what the package does not declare."""

    names = frozenset(filter(None, os.environ.get("MAGI_TESTS_ALONE", "").split(",")))

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname.partition(".")[0] in self.names:
            msg = f"No module named {fullname!r}: the package whose tests run does not declare it"
            raise ModuleNotFoundError(msg, name=fullname)


def pytest_configure(config: pytest.Config) -> None:
    """Compile each text once, and strictly. Worker processes inherit the environment of the one that started them."""
    sys.meta_path.insert(0, _Undeclared())
    os.environ["MAGI_COMPILE_STRICT"] = "1"
    # pytest listens to loggers that do not propagate, and torch writes its trace, a tenth of a compilation, as soon as
    # somebody listens.
    logging.getLogger("torch.__trace").propagate = True
    if not hasattr(config, "workerinput"):
        config.stash[_FOLDER] = Path(tempfile.mkdtemp(prefix="compiled-once-"))
        put_on_path(config.stash[_FOLDER], kept_libraries(config, otherwise=config.stash[_FOLDER]))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no compiler behind."""
    if _FOLDER in config.stash:
        shutil.rmtree(config.stash[_FOLDER])


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A comparison within rounding passes or fails by what it compares, not by the run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A pass is not asked about a graph that a cache has, so a run must not find what another one left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """No test sees what another compiled."""
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    # Not the fixture of pytest: what a test patches with it is undone before other fixtures end.
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith("MAGI_COMPILE_"):
                patch.delenv(name)
        patch.setenv("MAGI_COMPILE_STRICT", "1")
        yield


@pytest.fixture
def ns() -> str:
    """A namespace of operators that no other test uses.

    Inductor's key of a graph has the names of operators, and not what their fakes return, so it would find the code of
    another operator of the same name in its cache on the disk.
    """
    return f"magi_test_{next(_NUMBERS)}"


@pytest.fixture
def unmeasured_guards() -> Iterator[None]:
    """Dynamo does not measure its guards, for which it empties the processor's cache."""
    from torch._dynamo import guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture
def quick_compilations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Inductor calls ATen where it would write a kernel, unless the test is marked ``kernels``, ``slow`` or ``gpu``.

    For a kernel g++ takes longer than the rest of a small compilation takes. Guards, splits, passes over graphs, caches
    and reports are the same without. With ``MAGI_TESTS_COMPILE_KERNELS=1`` every test has kernels, as in `nox -s full`.
    """
    from torch._inductor import config

    request.getfixturevalue("unmeasured_guards")
    marked = any(request.node.get_closest_marker(name) for name in ("kernels", "slow", "gpu"))
    needs_kernels = marked or os.environ.get("MAGI_TESTS_COMPILE_KERNELS") == "1"
    instead = {} if needs_kernels or not hasattr(config, "fallback_by_default") else {"fallback_by_default": True}
    with config.patch(instead):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none, so that a bare ``pytest`` passes anywhere."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False"))


def pytest_collection_finish() -> None:
    """Leave what imports made out of later collections: ``torch.compiler.reset``, after nearly every test, is one."""
    gc.collect()
    gc.freeze()
