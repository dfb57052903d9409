# SPDX-License-Identifier: Apache-2.0
"""What code for single sizes needs of torch: graphs with symbols, fakes, and the state of a compilation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from magi_backend._torch_compat.values import float_memo


def fakes_of_capture(example_inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a backend as AOTAutograd sees them: real tensors become fakes with the symbols of the capture."""
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import FakeTensor

    context = TracingContext.get()
    mode = context.fake_mode
    assert mode is not None, "Dynamo makes one before it calls a backend"

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        symbolic = context.tensor_to_context.get(value)
        source = symbolic.tensor_source if symbolic is not None else None
        return mode.from_tensor(value, symbolic_context=symbolic, source=source, trace=False)

    return [fake(value) for value in example_inputs]


def describe(values: Sequence[Any]) -> list[Any]:
    """*values* with each tensor as plain data, which may hold symbols and says which tensors share memory."""
    from torch._subclasses.meta_utils import MetaTensorDescriber

    describer = MetaTensorDescriber()
    return [describer.describe_tensor(value) if isinstance(value, torch.Tensor) else value for value in values]


def is_description(value: object) -> bool:
    """Whether *value* describes a tensor, or the memory of one."""
    from torch._subclasses.meta_utils import MetaStorageDesc, MetaTensorDesc

    return isinstance(value, MetaTensorDesc | MetaStorageDesc)


def _source(placeholder: Node) -> Any:
    node: Any = placeholder
    return node._dynamo_source


class FakeWorld:
    """A fake mode with separate symbols, in which tensors are made from descriptions."""

    def __init__(self) -> None:
        from torch._functorch import config
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.shape_env = ShapeEnv()
        # As Dynamo makes the mode for a backend.
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            self.mode = FakeTensorMode(shape_env=self.shape_env)

    def open_int(self, captured: Any, placeholder: Node) -> Any:
        """A new symbol for the *captured* int, which stays an input."""
        return self._open_number(int(captured.node.hint), _source(placeholder))

    def _open_number(self, hint: Any, source: Any) -> Any:
        """A symbol about which nothing is assumed."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        symbol = self.shape_env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        make = self.shape_env.create_symintnode if isinstance(hint, int) else self.shape_env.create_symfloatnode
        return make(symbol, hint=hint, source=source)

    def remember_number(self, tensor: torch.Tensor, captured: torch.Tensor, placeholder: Node) -> None:
        """Make ``.item()`` of a float argument return an input, as it did for the *captured* fake."""
        memo = float_memo(captured)
        if memo is not None:
            source = _source(placeholder)
            made: Any = tensor
            made.item_memo = self._open_number(float(memo.node.hint), getattr(source, "base", source))

    def assumptions(self) -> list[str]:
        """The guards that a compilation has added for the open numbers."""
        return [str(guard.expr) for guard in self.shape_env.guards]


class FakeMaker:
    """Makes the tensors of one :func:`describe` in *world*. Tensors that shared memory share it again."""

    def __init__(self, world: FakeWorld) -> None:
        from torch._subclasses.meta_utils import MetaConverter

        self._mode = world.mode
        self._converter: Any = MetaConverter()
        self._alive: list[Any] = []

    def __call__(self, description: Any) -> torch.Tensor:
        """The fake tensor of a *description* without symbols."""
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils._mode_utils import no_dispatch

        def make(meta: Callable[[], torch.Tensor], device: Any) -> torch.Tensor:
            with no_dispatch():
                return FakeTensor(self._mode, meta(), device)

        made = self._converter.meta_tensor(description, None, make, None, None)
        if made is NotImplemented:
            msg = f"torch makes no fake tensor for {description.type or description.layout}"
            raise NotImplementedError(msg)
        if description.is_parameter:
            made._is_param = True
        self._alive.append(made)  # the converter holds weak references to what shares memory
        return made  # type: ignore[no-any-return]


class CaptureContext:
    """What compilations of the same graph need of the context of a capture, and the guards that it was given."""

    def __init__(self, gm: GraphModule) -> None:
        from torch._guards import TracingContext

        self._context = TracingContext.get()
        self._compile_id = gm.meta.get("dynamo_compile_id")
        self._guards: tuple[Any, ...] = ()

    def finish(self) -> None:
        """Read the guards that the compilation for any size has left to Dynamo. The context is not kept."""
        self._annotation = getattr(self._context, "cudagraph_annotation", None)
        self._guards = tuple(self._context.guards_context.aotautograd_guards)
        del self._context

    @contextlib.contextmanager
    def compiling(self, world: FakeWorld) -> Iterator[None]:
        """A context for another compilation, in which only *world* gets guards.

        Raises:
            RuntimeError: The compilation needs a guard, on inputs that share memory, that the capture does not have.
        """
        from torch._guards import CompileContext, TracingContext, compile_context, tracing

        context = TracingContext(world.mode)
        if self._annotation is not None:
            context.cudagraph_annotation = self._annotation
        with compile_context(CompileContext(self._compile_id)), tracing(context):
            yield
        new = [guard for guard in context.guards_context.aotautograd_guards if guard not in self._guards]
        if new:
            msg = f"its code would need a guard that the captured graph does not have: {new[0]}"
            raise RuntimeError(msg)


def is_parameter(placeholder: Node) -> bool:
    """Whether an input is a parameter or a buffer of a module."""
    return "_dynamo_static_input_type" in placeholder.meta.get("tensor_dict", {})


def is_size_of_input(placeholder: Node) -> bool:
    """Whether an int input is a size, a stride or the offset of a tensor input."""
    return type(getattr(placeholder, "_dynamo_source", None)).__name__ == "TensorPropertySource"


def is_left_open(placeholder: Node) -> bool:
    """Whether an int input is a ``DynamicInt``, which torch never makes a constant; object handles are such ints."""
    return type(getattr(placeholder, "_dynamo_source", None)).__name__ == "DynamicScalarSource"


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a number, or in the sizes, strides and offset of a tensor and of what it holds."""
    from torch.fx.experimental.symbolic_shapes import free_symbols as symbols_of
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor):
        return set()
    tensor: Any = value
    symbols = set(symbols_of(tensor))
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            symbols |= free_symbols(getattr(tensor, name))
    return symbols


def number_symbols(placeholder: Node) -> set[Any]:
    """The symbol of a float argument, which Dynamo passes as a tensor and reads with ``.item()``."""
    memo = float_memo(placeholder.meta.get("example_value"))
    return set() if memo is None else set(memo.node.expr.free_symbols)


def is_ragged(size: Any) -> bool:
    """Whether a size is the ragged one of a nested tensor."""
    return bool(size.node.is_nested_int())


def as_int(number: Any, values: Mapping[Any, int]) -> int | None:
    """The value of a symbolic size if symbols have *values*; None if it has other symbols."""
    if number.node.is_nested_int():
        return None
    expression = number.node.expr
    known = expression.free_symbols <= values.keys()
    return int(expression.xreplace(values)) if known else None


def expression(number: Any) -> Any:
    """The expression of a symbolic number, simplified by what is known of its symbols now."""
    return number.node.expr


def broken_guard(numbers: Sequence[Any], values: Mapping[Any, int]) -> str:
    """The first guard of the capture on the symbols of *numbers* that *values* violate; empty if there is none."""
    shape_env = next((number.node.shape_env for number in numbers), None)
    if shape_env is None:
        return ""
    for symbol, value in values.items():
        allowed = shape_env.var_to_range.get(symbol)
        if allowed is not None and not allowed.lower <= value <= allowed.upper:
            return f"{allowed.lower} <= {symbol} <= {allowed.upper}"
    for guard in shape_env.guards:
        expression = guard.expr
        if expression.free_symbols <= values.keys() and not bool(expression.xreplace(values)):
            return str(expression)
    return ""


def boxed(compiled: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """*compiled*, taking a list of its arguments.

    AOTAutograd's result takes a list itself; a function of single arguments is around it (``forward`` in
    ``aot_module_simplified``), which puts them into one after the parameters of the graph.
    """
    outer: Any = compiled
    while outer is not None and getattr(outer, "__qualname__", "") != "aot_module_simplified.<locals>.forward":
        outer = getattr(outer, "__wrapped__", None)
    inner = getattr(outer, "__wrapped__", None)
    if inner is None:
        return lambda inputs: compiled(*inputs)
    cells = inspect.getclosurevars(outer).nonlocals
    if cells.get("compiled_fn") is inner and cells.get("params_buffers_flat") == []:
        return cast("Callable[[list[Any]], Any]", inner)
    return lambda inputs: compiled(*inputs)


def autocast_devices() -> tuple[str, ...]:
    """The kinds of device that autocast knows in this build."""
    return tuple(torch._C._autocast_supported_devices())


def config_values() -> tuple[dict[str, Any], ...]:
    """The configuration of Inductor and of AOTAutograd on this thread."""
    return tuple(module.get_config_copy() for module in _config_modules())


@contextlib.contextmanager
def configured(values: tuple[dict[str, Any], ...]) -> Iterator[None]:
    """A context in which both configurations have *values*.

    From torch 2.12 on, threads have separate configurations.
    """
    with contextlib.ExitStack() as stack:
        for module, wanted, now in zip(_config_modules(), values, config_values(), strict=True):
            changed = {key: value for key, value in wanted.items() if now.get(key) != value}
            if changed:
                stack.enter_context(module.patch(changed))
        yield


def _config_modules() -> tuple[Any, ...]:
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return inductor, functorch


def dispatch_keys_kept() -> contextlib.AbstractContextManager[Any]:
    """A context at whose end dispatch keys are restored, as Dynamo does around its compilations."""
    return torch._C._PreserveDispatchKeyGuard()


@contextlib.contextmanager
def no_function_modes() -> Iterator[None]:
    """A context without the modes that see calls of torch's functions."""
    from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

    with contextlib.ExitStack() as stack:
        for _ in _get_current_function_mode_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield


def is_compiling() -> bool:
    """Whether this thread compiles, or any thread traces, for which torch has a single flag."""
    from torch._guards import TracingContext
    from torch.fx import _symbolic_trace

    return TracingContext.try_get() is not None or _symbolic_trace._is_fx_tracing_flag


def is_dispatch_observed() -> bool:
    """Whether a dispatch mode or a transform of ``torch.func`` is active."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return bool(_get_current_dispatch_mode_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def compile_lock() -> Any:
    """The lock that Dynamo holds while it compiles."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


top_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""A function that returns the innermost hooks for saved tensors, or None. With its argument, also while tracing."""


@dataclass(frozen=True)
class Region:
    """A region under ``torch.utils.checkpoint``.

    Attributes:
        frame: An object that its forward and its recomputations share; None if this torch does not have it.
        recomputes: Whether this is a recomputation.
        hook: An object of the forward or of one recomputation.
    """

    frame: Any
    recomputes: bool
    hook: Any


def checkpoint_region(hooks: Any) -> Region | None:
    """The region that saved-tensor *hooks* belong to; None if they are not those of ``torch.utils.checkpoint``.

    Its hooks are closures: that of the forward over ``frame``, that of a recomputation over ``target_frame_ref``.
    """
    hook = hooks[0]
    inner: Any = inspect.unwrap(hook)
    if getattr(inner, "__module__", "") != "torch.utils.checkpoint":
        return None
    code = getattr(inner, "__code__", None)
    cells = dict(zip(code.co_freevars, inner.__closure__ or (), strict=True)) if code is not None else {}
    if "frame" in cells:
        return Region(cells["frame"].cell_contents, recomputes=False, hook=hook)
    if "target_frame_ref" in cells:
        return Region(cells["target_frame_ref"].cell_contents(), recomputes=True, hook=hook)
    return Region(None, recomputes=False, hook=hook)
