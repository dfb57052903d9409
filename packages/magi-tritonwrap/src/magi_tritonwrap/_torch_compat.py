# SPDX-License-Identifier: Apache-2.0
"""Private names of torch and Triton, one function per quirk, each with the versions it serves."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import BuiltinMethodType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode
from torch._higher_order_ops.triton_kernel_wrap import (
    TraceableTritonKernelWrapper,
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._library import triton as torch_triton
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch._library.custom_ops import CustomOpDef
    from torch._ops import OpOverload


_INTERPRETER = "triton.runtime.interpreter"

DISPATCH_MODE = FunctionalTensorMode
"""The mode under which AOTAutograd traces, and for which a decomposition is registered (torch 2.6 on)."""


def calling_frame() -> FrameType:
    """The frame that called the caller; `inspect.stack` reads source files, which a launch has no time for."""
    return sys._getframe(2)


def launch_classes() -> tuple[type[Any], ...]:
    """Classes whose `run` a launch ends in (Triton 3.2 on: `kernel[grid](...)` calls `self.run`)."""
    return (JITFunction, Autotuner, *interpreted_classes())


def kernel_classes() -> tuple[type[Any], ...]:
    """Everything that `triton.jit`, `triton.autotune` and `triton.heuristics` return."""
    return (JITFunction, Autotuner, Heuristics, *interpreted_classes())


def interpreted_classes() -> tuple[type[Any], ...]:
    """The class of kernels made under TRITON_INTERPRET=1; none where there can be no such kernel yet.

    Its module imports numpy, which Triton does not declare (3.6 to 3.9); without the interpreter nobody needs it.
    """
    if _INTERPRETER not in sys.modules and not triton.knobs.runtime.interpret:
        return ()
    return (importlib.import_module(_INTERPRETER).InterpretedFunction,)


def triton_wrappers() -> tuple[object, ...]:
    """The functions that put a kernel into a graph: `wrap_triton`, and the older name that some code imports."""
    return (torch.library.wrap_triton, torch_triton.capture_triton)


def autograd_function_of(apply: object) -> Any:
    """`MyFunction` for `MyFunction.apply`; None for anything else.

    A method of Python until torch 2.13, a builtin in 2.15 (`torch/autograd/function.py`).
    """
    if not isinstance(apply, MethodType | BuiltinMethodType) or apply.__name__ != "apply":
        return None
    owner = apply.__self__
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None


def kernel_in_wrapper(value: object) -> Any:
    """The kernel inside what `torch.library.wrap_triton` returned; None for anything else."""
    return value.kernel if isinstance(value, TraceableTritonKernelWrapper) else None


def kernel_of_launcher(value: object) -> Any:
    """The kernel behind a `kernel[grid]` that exists already; None for anything else.

    Triton returns a closure over the kernel, called `self` there (3.2 to 3.7 at least).
    """
    if isinstance(value, FunctionType) and value.__qualname__.startswith("KernelInterface.__getitem__"):
        return inspect.getclosurevars(value).nonlocals.get("self")
    return None


def wrap_triton_disabled() -> AbstractContextManager[None]:
    """Make `wrap_triton(kernel)[grid]` launch the bare kernel, in this thread (torch 2.6 on, private throughout)."""
    return torch_triton.set_wrap_triton_enabled(False)


def wrap_triton_enabled() -> AbstractContextManager[None]:
    """Make `wrap_triton(kernel)[grid]` go through the higher-order op, in this thread."""
    return torch_triton.set_wrap_triton_enabled(True)


def tracing_is_active(values: Iterable[object]) -> bool:
    """Whether a launch with these arguments belongs into a graph rather than onto a device.

    True under the fake, proxy and functional modes of torch, and for their tensors. A user's own mode (a FLOP counter,
    a logger) does not count: torch has no rule for the higher-order op under it, and eager numbers are what it expects.
    """
    keys = torch._C._TorchDispatchModeKey
    if any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FUNCTIONAL, keys.PROXY, keys.FAKE)):
        return True
    return any(isinstance(value, FakeTensor | FunctionalTensor) for value in values)


def unwrap_functional(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a FunctionalTensor, with pending writes applied."""
    return tensor.from_functional() if isinstance(tensor, FunctionalTensor) else tensor


def functional_values(values: Iterable[object]) -> list[torch.Tensor]:
    """What the functional tensors among *values* hold now; a traced write replaces it by another tensor."""
    return [torch._from_functional_tensor(value.elem) for value in values if isinstance(value, FunctionalTensor)]


def fake_mode_of(values: object) -> FakeTensorMode | None:
    """The mode that the fake tensors among *values* belong to; None when there are none."""
    mode: FakeTensorMode | None = detect_fake_mode(values)
    return mode


def fake_tensors() -> FakeTensorMode:
    """A mode in which factories make fake tensors, which meet real ones without an error."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def keeping_graphs(graphs: list[torch.fx.GraphModule]) -> Any:
    """A backend of `torch.compile` that runs AOTAutograd, and appends each graph that Inductor would be given.

    Inputs that are fake come from another mode than the one that Dynamo made for AOTAutograd. From torch 2.11 on
    AOTAutograd takes them over into it; 2.10 refuses them (`detect_fake_mode` in `torch/_guards.py`).
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._guards import TracingContext

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compile_graph = aot_autograd(fw_compiler=keep)

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        mode = TracingContext.get().fake_mode
        assert mode is not None, "Dynamo makes one before it calls a backend"
        return compile_graph(graph, [mode.from_tensor(x) if isinstance(x, FakeTensor) else x for x in inputs])

    return backend


def is_launch(target: object) -> bool:
    """Whether the target of a graph node is a Triton launch, functional or mutating."""
    return target in (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)


def launched_kernel(index: int) -> Any:
    """The kernel that the node of a launch has by number, because a graph cannot hold it."""
    return kernel_side_table.get_kernel(index)


def launch_constants(index: int) -> dict[str, Any]:
    """The arguments that the node of a launch has by number."""
    return dict(kernel_side_table.get_constant_args(index))


def proxy_tracing_disabled() -> AbstractContextManager[object]:
    """Run operators without recording them in the graph being traced."""
    return disable_proxy_modes_tracing()


def decomposition_is_disabled() -> bool:
    """Whether torch.export asked that Triton ops stay whole (the flag is private; seen on torch 2.13)."""
    return not getattr(functorch_config, "decompose_custom_triton_ops", True)


def has_unrecognized_type(types: Sequence[type]) -> bool:
    """Whether a tensor subclass is among *types* that must be desugared first, as in torch's own `triton_op`."""
    known = (torch.Tensor, FunctionalTensor)
    return any(not issubclass(tensor_type, FakeTensor) and tensor_type not in known for tensor_type in types)


def qualified_name(op: OpOverload) -> str:
    """`namespace::name` or `namespace::name.overload`; torch's tables of kernels and rules are keyed by it."""
    return str(op._name)


def _dispatcher_name(op: OpOverload) -> str:
    name: str = op.name()
    return name


def set_decomposition_rule(op: OpOverload, rule: Any) -> None:
    """Let *rule* answer for *op* under AOTAutograd's functional mode, in place of any rule that is there.

    `torch.library.register_torch_dispatch` refuses a second rule, and its registration cannot be taken back; the table
    it fills is the same since torch 2.6.
    """
    from torch._library.simple_registry import singleton

    name = qualified_name(op)
    if name in OPDEFS:
        OPDEFS[name].register_torch_dispatch(DISPATCH_MODE, rule)
        return
    singleton.find(name).torch_dispatch_rules._data[DISPATCH_MODE] = rule


def overload_of(definition: CustomOpDef) -> OpOverload:
    """The operator behind what `torch.library.custom_op` returns."""
    return definition._opoverload


def schemas_of(op: Any) -> list[str]:
    """The schemas of *op*, with the defaults that torch puts into generated code but not into its cache keys."""
    overloads = [getattr(op, name) for name in op.overloads()] if hasattr(op, "overloads") else [op]
    return [str(overload._schema) for overload in overloads]


def torch_triton_ops() -> tuple[str, ...]:
    """Names of the operators that AOTAutograd decomposes into Triton launches (torch 2.7 on)."""
    return tuple(torch_triton.triton_ops_to_kernels)


def body_of_torch_triton_op(name: str) -> Callable[..., Any] | None:
    """The body given to `torch.library.triton_op`, which registers it as the op's fake as well; None otherwise."""
    definition = OPDEFS.get(name)
    if definition is None or name not in torch_triton.triton_ops_to_kernels:
        return None
    body: Callable[..., Any] | None = definition._abstract_fn
    return body


def cache_bypass(reason: str) -> Exception:
    """The exception that makes AOTAutograd compile without its cache, and log *reason*."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    return BypassAOTAutogradCache(reason)


def set_cache_key_entries(op: OpOverload, entries: list[object]) -> None:
    """Put *entries* into the table of kernels that AOTAutograd's cache key reads, for graphs that call *op*.

    torch asks of an entry what it asks of a JITFunction: `.src`, `.__name__` and `.fn` (torch 2.7 on).
    """
    torch_triton.triton_ops_to_kernels[qualified_name(op)] = entries


def unsupported_autotune_arguments_are_ignored() -> bool:
    """Whether the user asked Inductor to overlook autotune settings that it cannot honour (torch 2.6 on)."""
    from torch._inductor import config

    return bool(config.unsafe_ignore_unsupported_triton_autotune_args)


def has_kernel_for_device(op: OpOverload, device_type: str) -> bool:
    """Whether a body was registered for this device type itself, not through a composite key (private, all)."""
    key = torch._C._dispatch_key_for_device(device_type)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(_dispatcher_name(op), key))


def has_composite_kernel(op: OpOverload) -> bool:
    """Whether one body was registered for every device type."""
    keys = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(_dispatcher_name(op), key) for key in keys)


def registration_of(op: OpOverload) -> dict[str, object]:
    """Something that changes whenever a device type gets another body, by device type.

    The dispatcher keeps no Python function, but its dump has a line for each registration, replaced ones included. A
    `torch.library.custom_op` keeps its bodies in a table of its own.
    """
    lines: dict[str, list[str]] = {}
    for line in torch._C._dispatch_dump(_dispatcher_name(op)).splitlines():
        key, separator, registration = line.partition(":")
        if separator:
            lines.setdefault(key.removesuffix(" (inactive)").lower(), []).append(registration)
    definition = OPDEFS.get(qualified_name(op))
    bodies = {} if definition is None else definition._backend_fns
    return {key: (tuple(found), bodies.get(key)) for key, found in lines.items()}


def new_kernel(like: Any, function: FunctionType, source: str) -> Any:
    """A JITFunction with the settings of *like*, of another function and source.

    Triton keeps `repr=` in a private attribute and a table of kernels by name, which the new one must not enter; a
    source is set by `_unsafe_update_src` (3.4 on) or by assignment.
    """
    from triton.runtime import jit

    table: dict[str, Any] = getattr(jit, "_triton_jit_function_registry", {})
    before = dict(table)
    parameters = inspect.signature(function).parameters
    settings = {
        setting: [name for name in _names(getattr(like, setting), like) if name in parameters]
        for setting in ("do_not_specialize", "do_not_specialize_on_alignment")
    }
    kernel = type(like)(
        function,
        version=like.version,
        debug=like.debug,
        noinline=like.noinline,
        repr=getattr(like, "_repr", None),
        launch_metadata=like.launch_metadata,
        **settings,
    )
    table.clear()
    table.update(before)
    if hasattr(kernel, "_unsafe_update_src"):
        kernel._unsafe_update_src(source)
    else:
        kernel.src = source
    return kernel


def _names(parameters: Iterable[int | str], kernel: Any) -> list[str]:
    """Parameters given by position or by name, by name."""
    return [kernel.arg_names[one] if isinstance(one, int) else one for one in parameters]
