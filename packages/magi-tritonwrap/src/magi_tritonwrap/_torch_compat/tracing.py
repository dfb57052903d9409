# SPDX-License-Identifier: Apache-2.0
"""Traces: fake and functional tensors, and the modes that are active."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode  # of the Tensors in a value
from torch._library import triton as torch_triton
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import is_fake as is_fake_tensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.utils._pytree import tree_leaves


ITEM_OPERATORS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
"""The operators of `Tensor.item()`: inside a registered fake, torch passes the first to a mode, elsewhere the
second."""

SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
TELL_FAKE = (FakeTensor, is_fake_tensor)
"""With these a body asks whether a tensor is fake. Of a functional tensor, which holds one, the second says yes."""
_NOT_FAKE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    GuardOnDataDependentSymNode,
)
# The second is what `torch.tensor([x.data_ptr()])` says.
_NOT_FAKE_TEXTS = (
    "data pointer",
    "FakeAddress",
    ".numpy() is not supported",
    "passed to FakeTensor.__format__",
    "meta tensor",
)


def wrap_triton_disabled() -> AbstractContextManager[None]:
    """Make `wrap_triton(kernel)[grid]` launch the bare kernel, in this thread (torch 2.6 on, private throughout)."""
    return torch_triton.set_wrap_triton_enabled(False)


def functional_storage(value: object) -> object:
    """A value that is the same for Tensors of AOTAutograd's functional trace that share memory.

    None for any other Tensor.
    """
    return value.elem.untyped_storage()._cdata if isinstance(value, FunctionalTensor) else None


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The Tensor of which this one is a view, which lives as long."""
    return tensor._base


def storage_of(tensor: torch.Tensor) -> int:
    """The same number for Tensors that share memory; `functional_storage` is that for those of a functional trace."""
    return int(tensor.untyped_storage()._cdata)


def number_is_lost(error: Exception) -> bool:
    """Whether a trace met a symbolic number that it cannot compute from its arguments (torch 2.10 to 2.15)."""
    return "is not tracked with proxy" in str(error)


def writes_traced(tensor: Any) -> int:
    """The number of writes into a Tensor of AOTAutograd's functional trace, or into one that shares its memory."""
    return int(torch._functionalize_mutation_counter(tensor.elem))


def tracing_is_active(values: Iterable[object]) -> bool:
    """Whether a launch with these arguments belongs in a graph rather than on a device.

    True under the fake, proxy and functional modes of torch, and for their tensors. A user's own mode (a FLOP counter,
    a logger) does not count: torch has no rule for the higher-order op under it, and it expects an eager launch.
    """
    keys = torch._C._TorchDispatchModeKey
    if any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FUNCTIONAL, keys.PROXY, keys.FAKE)):
        return True
    return any(map(is_fake, values))


def is_fake(value: object) -> bool:
    """Whether *value* is a tensor of a trace, without data."""
    return isinstance(value, FakeTensor | FunctionalTensor)


def on_functional_tensors(fn: Callable[..., Any]) -> Callable[..., Any]:
    """*fn* on functional tensors in place of the fake ones that it is given, as AOTAutograd traces it."""

    def functional(*given: Any) -> Any:
        with FunctionalTensorMode():
            return fn(*(FunctionalTensor.to_functional(x) if isinstance(x, torch.Tensor) else x for x in given))

    return functional


def unwrap_functional(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a FunctionalTensor, with pending writes applied."""
    return tensor.from_functional() if isinstance(tensor, FunctionalTensor) else tensor


def fake_tensors() -> FakeTensorMode:
    """A mode in which factories make fake tensors, which may be used together with real ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def taking_real_tensors(given: object) -> Iterator[None]:
    """Let the fake Tensors in *given* be used with real ones, such as a table of a module, in a trace too."""
    mode: Any = detect_fake_mode(given) or fake_tensors()
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def uses_real_tensor(error: Exception) -> bool:
    """Whether *error* says that code of a trace used a Tensor that the trace was not given (torch 2.10 to 2.15)."""
    return isinstance(error, AssertionError) and "Please convert all Tensors to FakeTensors first" in str(error)


def expression_of(value: Any) -> Any:
    """The expression of a symbolic number, the same for numbers of one compilation that are always equal.

    Any other value as it is.
    """
    return value.node.expr if isinstance(value, SYMBOLIC_NUMBERS) else value


def unbacked_symbols(values: Iterable[object]) -> frozenset[Any]:
    """The symbols in Tensors and numbers that stand for numbers known only from data."""
    known = (value for value in tree_leaves(list(values)) if isinstance(value, (torch.Tensor, *SYMBOLIC_NUMBERS)))
    return frozenset(symbol for value in known for symbol in free_unbacked_symbols(value))


def kept_for_this_compilation() -> dict[Any, Any]:
    """A table that lasts for the compilation that is going on; a new one at each call if Dynamo began none."""
    context = TracingContext.try_get()
    found: dict[Any, Any] = {} if context is None else context.__dict__.setdefault("_magi_tritonwrap", {})
    return found


def concrete_number(value: Any) -> Any:
    """A symbolic number as a plain one: its hint, or 8 where nothing is known; any other value as it is."""
    if not isinstance(value, SYMBOLIC_NUMBERS):
        return value
    return value.node.hint if value.node.has_hint() else 8


def decides_by_data(error: Exception) -> bool:
    """Whether *error* says that code on fake tensors needed a number that depends on data."""
    return isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode)


def cannot_be_fake(error: Exception) -> bool:
    """Whether an error of code on fake tensors says that fake tensors do not have what was asked for.

    The classes are private (torch 2.10 to 2.15); for an address and a NumPy array, torch raises a RuntimeError.
    """
    if isinstance(error, _NOT_FAKE):
        return True
    return isinstance(error, RuntimeError | TypeError) and any(text in str(error) for text in _NOT_FAKE_TEXTS)


def keeping_graphs(graphs: list[torch.fx.GraphModule]) -> Any:
    """A backend of `torch.compile` that runs AOTAutograd, and appends each graph that Inductor would be given.

    Inputs that are fake come from another mode than the one that Dynamo made for AOTAutograd. From torch 2.11 on
    AOTAutograd takes them over into it; 2.10 refuses them (`detect_fake_mode` in `torch/_guards.py`).
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compile_graph = aot_autograd(fw_compiler=keep)

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        mode = TracingContext.get().fake_mode
        assert mode is not None, "Dynamo makes one before it calls a backend"
        compile_graph(graph, [mode.from_tensor(x) if isinstance(x, FakeTensor) else x for x in inputs])
        # The graph is not run: it may read data, or write into inputs on a device that this build of torch lacks.
        (returned,) = graph.graph.find_nodes(op="output")
        outputs = [one.meta["example_value"] if isinstance(one, torch.fx.Node) else one for one in returned.args[0]]
        return lambda *_: outputs

    return backend


def decomposition_is_disabled() -> bool:
    """Whether torch.export asked that Triton ops are not decomposed (the flag is private; seen on torch 2.13)."""
    return not getattr(functorch_config, "decompose_custom_triton_ops", True)


def has_unrecognized_type(types: Sequence[type]) -> bool:
    """Whether a tensor subclass is among *types* that must be desugared first, as in torch's own `triton_op`."""
    known = (torch.Tensor, FunctionalTensor)
    return any(not issubclass(tensor_type, FakeTensor) and tensor_type not in known for tensor_type in types)


def cache_bypass(reason: str) -> Exception:
    """The exception that makes AOTAutograd compile without its cache, and log *reason*."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    return BypassAOTAutogradCache(reason)


def leave_out_of_cache() -> None:
    """Make AOTAutograd store nothing of what it is tracing now.

    It stores what it compiled if the `AOTConfig` of the compilation names a cache key, which it looked up before it
    traces. No function takes that back, so the config is found on the stack (torch 2.10 to 2.15; frozen from 2.13 on).
    A compilation whose result is itself the artifact, as for `aot_compile`, needs its entry and keeps it.
    """
    from torch._functorch._aot_autograd.schemas import AOTConfig

    frame: FrameType | None = None if functorch_config.bundled_autograd_cache else sys._getframe()
    while frame is not None:
        held = [frame.f_locals.get(name) for name in ("aot_config", "aot_state")]
        for value in (held[0], getattr(held[1], "aot_config", None)):
            if isinstance(value, AOTConfig):
                object.__setattr__(value, "cache_info", None)
        frame = frame.f_back
