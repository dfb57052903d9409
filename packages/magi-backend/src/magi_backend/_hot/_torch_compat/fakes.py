# SPDX-License-Identifier: Apache-2.0
"""Fake tensors of a capture as data, and new ones made from such data in a separate fake mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from magi_backend._torch_compat import float_memo


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
