# SPDX-License-Identifier: Apache-2.0
"""Every compiling test starts from empty caches, and has to leave the configuration as it found it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import _torch_compat
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


sys.path.insert(0, str(Path(__file__).parent))  # made_passes.py: --import-mode=importlib adds nothing


@pytest.fixture(autouse=True)
def _quick_guards(unmeasured_guards: None) -> None:
    """The passes are what takes effect in kernels, so these are compiled."""
    from made_passes import seen

    seen.clear()


@pytest.fixture
def inductor() -> Iterator[Any]:
    """Inductor's configuration, with Dynamo's and Inductor's caches empty; fails when the test leaks a key."""
    torch._dynamo.reset()
    counters.clear()
    before = _torch_compat.config.read_overrides()
    with fresh_cache():
        yield config
    leaked = _torch_compat.config.config_changes(before, _torch_compat.config.read_overrides())
    _torch_compat.config.restore_overrides(before)
    torch._dynamo.reset()
    assert leaked == {}


def _trace(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[int] = ()) -> torch.fx.GraphModule:
    """The ATen graph of ``fn(*args)``, with the *dynamic* dimensions of the first argument symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for position, arg in enumerate(args):
        kinds = [
            DimDynamic.DYNAMIC if position == 0 and dim in dynamic else DimDynamic.STATIC for dim in range(arg.dim())
        ]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fakes.append(mode.from_tensor(arg, source=ConstantSource(f"arg{position}"), symbolic_context=context))
    with enable_python_dispatcher():
        return make_fx(fn, tracing_mode="real")(*fakes)


def _pretend_cuda(gm: torch.fx.GraphModule, dtype: torch.dtype = torch.bfloat16) -> torch.fx.GraphModule:
    """*gm* with fake values that say they are on a GPU."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            element = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
            node.meta["val"] = FakeTensor(value.fake_mode, element, torch.device("cuda:0"))
    return gm


# Test modules cannot import helpers of one another, so helpers are fixtures.
@pytest.fixture(scope="session")
def trace() -> Callable[..., torch.fx.GraphModule]:
    return _trace


@pytest.fixture(scope="session")
def pretend_cuda() -> Callable[..., torch.fx.GraphModule]:
    return _pretend_cuda
