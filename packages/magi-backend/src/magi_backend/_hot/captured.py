# SPDX-License-Identifier: Apache-2.0
"""A graph as it was captured, the state in which it was compiled, and the code of one size made from it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from magi_backend._torch_compat.nodes import graph_copy
from magi_backend._verify.run import replayed_random_numbers

from . import _torch_compat
from .dispatch import GraphInputs, StaysSymbolicError, read_inputs, solved, why_symbolic


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Autocast:
    """Autocast of one kind of device."""

    device: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class CompileState:
    """The state of the thread and of the process that a compilation reads.

    Attributes:
        inference: Inference mode.
        grad: Grad mode.
        autocast: Autocast of each kind of device that has it.
        autocast_cache: Whether autocast keeps converted weights.
        deterministic: Whether deterministic algorithms are required.
        warn_only: Whether an operator without one only warns.
        dtype: The default dtype.
        configs: The configuration of Inductor and of AOTAutograd.
    """

    inference: bool
    grad: bool
    autocast: tuple[Autocast, ...]
    autocast_cache: bool
    deterministic: bool
    warn_only: bool
    dtype: torch.dtype
    configs: tuple[dict[str, Any], ...]


def compile_state() -> CompileState:
    """The current state."""
    return CompileState(
        inference=torch.is_inference_mode_enabled(),
        grad=torch.is_grad_enabled(),
        autocast=tuple(
            Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _torch_compat.autocast_devices()
        ),
        autocast_cache=torch.is_autocast_cache_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        dtype=torch.get_default_dtype(),
        configs=_torch_compat.config_values(),
    )


@contextlib.contextmanager
def restored(state: CompileState) -> Iterator[None]:
    """A context to compile in *state*. At its end the state of the process is restored, random numbers included."""
    before, numbers = compile_state(), random.getstate()
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, numbers)
        stack.callback(_set_process, before)
        stack.enter_context(_torch_compat.dispatch_keys_kept())
        # A default device is such a mode; its effect is already in the captured graph.
        stack.enter_context(_torch_compat.no_function_modes())
        stack.enter_context(replayed_random_numbers())
        stack.enter_context(torch.inference_mode(state.inference))
        stack.enter_context(torch.set_grad_enabled(state.grad))
        for autocast, now in zip(state.autocast, before.autocast, strict=True):
            if autocast != now or state.autocast_cache != before.autocast_cache:
                stack.enter_context(
                    torch.autocast(autocast.device, autocast.dtype, autocast.enabled, state.autocast_cache)
                )
        _set_process(state)
        stack.enter_context(_torch_compat.configured(state.configs))
        yield


def _set_process(state: CompileState) -> None:
    torch.use_deterministic_algorithms(state.deterministic, warn_only=state.warn_only)
    torch.set_default_dtype(state.dtype)


def is_stream_captured() -> bool:
    """Whether the current CUDA stream is being captured into a graph, which a compilation would break."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def why_not_now(*, same_on_all_ranks: bool) -> str:
    """Why this call must not compile.

    Empty if it may. *same_on_all_ranks* says whether every rank compiles in this call.
    """
    if is_stream_captured():
        return "a CUDA stream is being captured"
    if _torch_compat.is_compiling():
        return "the call is part of another compilation"
    if _torch_compat.is_dispatch_observed():
        return "the call runs under a dispatch mode or a function transform"
    if not same_on_all_ranks and (count := ranks()) > 1:
        return (
            f"a rank of {count} that compiles alone makes the others wait; magi.compile_sizes compiles on all of them"
        )
    return ""


def ranks() -> int:
    """How many processes work together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def put_numbers(gm: GraphModule, values: Mapping[Any, int], world: _torch_compat.FakeWorld) -> None:
    """Replace the sizes in *gm* by numbers: its inputs that are sizes, and what it computes from them.

    Each other node, also in the graphs inside it, gets the example value that it has at this size, which passes before
    AOTAutograd and the splitting at boundary operators read.
    """
    nodes = [
        node
        for module in gm.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if "example_value" in node.meta
    ]
    twins = Twins(values, world)
    twins.describe([node.meta["example_value"] for node in nodes])
    for node in nodes:
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt) and node.graph is gm.graph and _torch_compat.as_int(value, values) is None:
            continue  # an int that stays an input
        node.meta["example_value"] = number = twins.of(value)
        if isinstance(value, torch.SymInt) and node.graph is gm.graph:
            _replace(node, number)
    gm.recompile()


def _replace(node: Node, number: int) -> None:
    for user in list(node.users):
        user.args = map_arg(user.args, lambda n: number if n is node else n)
        user.kwargs = map_arg(user.kwargs, lambda n: number if n is node else n)
    node.graph.erase_node(node)


class Twins:
    """The fake tensors of one size: a twin for each captured tensor. Twins share memory as the captured tensors do.

    Args:
        values: The number of each symbol.
        world: The fake mode of the new tensors.
    """

    def __init__(self, values: Mapping[Any, int], world: _torch_compat.FakeWorld) -> None:
        self._values = values
        self._make = _torch_compat.FakeMaker(world)
        self._descriptions: dict[int, Any] = {}
        self._made: dict[int, torch.Tensor] = {}

    def describe(self, trees: Sequence[Any]) -> None:
        """Describe the tensors in *trees*, so that :meth:`of` knows them."""
        tensors = [leaf for tree in trees for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        for tensor, description in zip(tensors, _torch_compat.describe(tensors), strict=True):
            self._descriptions.setdefault(id(tensor), description)

    def of(self, tree: Any) -> Any:
        """*tree* with tensors replaced by their twins, and sizes by their numbers."""
        return pytree.tree_map(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._made:
                self._made[id(leaf)] = self.of_description(self._descriptions[id(leaf)])
            return self._made[id(leaf)]
        return self._number(leaf) if isinstance(leaf, torch.SymInt) else leaf

    def of_description(self, description: Any) -> torch.Tensor:
        """The tensor that *description* describes with symbols."""
        made = self._make(self._static(_alone_where_needed(description, self._values)))
        left = _torch_compat.free_symbols(made)
        if left:
            msg = f"a {type(made).__name__} keeps the symbols {', '.join(sorted(map(str, left)))}"
            raise StaysSymbolicError(msg)
        return made

    def _number(self, number: Any) -> int:
        value = _torch_compat.as_int(number, self._values)
        if value is None:
            msg = f"the size {number} does not follow from the sizes of the inputs"
            raise StaysSymbolicError(msg)
        return value

    def _static(self, value: Any) -> Any:
        """*value*, a description or a part of one, without symbols."""
        if isinstance(value, torch.SymInt):
            return self._number(value)
        if isinstance(value, torch.Size):
            return torch.Size([self._static(item) for item in value])
        if isinstance(value, tuple | list):
            items = [self._static(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self._static(item) for key, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._static_fields(value)
        return value

    def _static_fields(self, value: Any) -> Any:
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        if _torch_compat.is_description(value):
            # The mode and the hints belong to the capture; a gradient is not an input of the graph.
            old |= {name: None for name in ("fake_mode", "grad") if name in old}
            old |= {"dynamo_dynamic_indices": []} if "dynamo_dynamic_indices" in old else {}
            old |= {"dynamo_hint_overrides": {}} if "dynamo_hint_overrides" in old else {}
        new = {name: self._static(item) for name, item in old.items()}
        if all(new[name] is getattr(value, name) for name in new):
            return value
        twin = copy.copy(value)
        for name, item in new.items():
            try:
                setattr(twin, name, item)  # by its own method if it has one: a DTensor's spec resets its hash there
            except dataclasses.FrozenInstanceError:
                object.__setattr__(twin, name, item)
        return twin


def _alone_where_needed(description: Any, values: Mapping[Any, int]) -> Any:
    """*description* without its base, if the sizes of the base do not follow from the inputs.

    Dynamo gives the base of an input symbols that no input binds. Memory that inputs share stays shared; its size
    beyond what the inputs use does not matter.
    """
    changes: dict[str, Any] = {}
    if description.base is not None and _unknown(description.base, values):
        changes |= {"base": None, "is_view": False, "creation_meta": None}
    storage = description.storage
    if storage is not None and _is_unknown(storage.size, values):
        changes["storage"] = dataclasses.replace(storage, size=0)
    return dataclasses.replace(description, **changes) if changes else description


def _unknown(description: Any, values: Mapping[Any, int]) -> bool:
    numbers = [*description.size, *(description.stride or ()), description.storage_offset]
    if description.storage is not None:
        numbers.append(description.storage.size)
    return any(_is_unknown(number, values) for number in numbers) or (
        description.base is not None and _unknown(description.base, values)
    )


def _is_unknown(number: Any, values: Mapping[Any, int]) -> bool:
    return isinstance(number, torch.SymInt) and _torch_compat.as_int(number, values) is None


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

    from .dispatch import Key

    Compile = Callable[[GraphModule, Sequence[Any], str], Callable[..., Any]]


@dataclass(frozen=True)
class Captured:
    """A captured graph as it was before its first compilation, which may change the graph.

    Attributes:
        gm: A copy of the graph.
        inputs: What its inputs are.
        fakes: The captured inputs: fake tensors, numbers and symbols.
        descriptions: The same with a description of each tensor, made before the graph ran on it.
        context: The context that Dynamo compiled it in.
        state: The state that it was compiled in.
        reason: Why no code can be made for single sizes, or empty.
    """

    gm: GraphModule
    inputs: GraphInputs
    fakes: tuple[Any, ...]
    descriptions: tuple[Any, ...]
    context: _torch_compat.CaptureContext
    state: CompileState
    reason: str

    def values(self, key: Key) -> dict[Any, int]:
        """The number of each symbol if the size inputs have the values *key*."""
        values: dict[Any, int] = {}
        for size, number in zip(self.inputs.sizes, key, strict=True):
            expression = _torch_compat.expression(self.fakes[size.place])
            if expression.is_Symbol:
                values[expression] = number
            elif len(expression.free_symbols) == 1:
                values |= {s: n for s, n in solved(expression, number).items() if s not in values}
        return values

    def title(self, key: Key) -> str:
        """The sizes in *key* with their names, for the report."""
        return ", ".join(f"{size.symbol}={number}" for size, number in zip(self.inputs.sizes, key, strict=True))

    def compiled(self, key: Key, compile_static: Compile) -> Callable[[list[Any]], Any]:
        """Code for the sizes *key*: a function of a list of the other inputs.

        Raises:
            StaysSymbolicError: A size in the graph does not follow from *key*, or the code would need a guard.
            Exception: Whatever a compiler raises.
        """
        values, world = self.values(key), _torch_compat.FakeWorld()
        gm = graph_copy(self.gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        places = {size.place for size in self.inputs.sizes}
        with restored(self.state), self.context.compiling(world):
            twins = Twins(values, world)
            inputs = [
                self._input(place, node, twins, world) for place, node in enumerate(placeholders) if place not in places
            ]
            put_numbers(gm, values, world)
            compiled = compile_static(gm, inputs, self.title(key))
        if assumed := world.assumptions():
            msg = f"its code would need a guard that the captured graph does not have: {assumed[0]}"
            raise StaysSymbolicError(msg)
        return _torch_compat.boxed(compiled)

    def _input(self, place: int, node: Any, twins: Twins, world: _torch_compat.FakeWorld) -> Any:
        value, captured = self.descriptions[place], self.fakes[place]
        if isinstance(value, torch.SymInt):
            return world.open_int(value, node)
        if not _torch_compat.is_description(value):
            return value
        twin = twins.of_description(value)
        world.remember_number(twin, captured, node)
        return twin


def capture(gm: GraphModule, example_inputs: Sequence[Any]) -> Captured | None:
    """A copy of *gm*, a graph that is not compiled yet; None if none of its inputs is a size."""
    inputs = read_inputs(gm, example_inputs)
    if not inputs.sizes:
        return None
    reason = why_symbolic(gm, example_inputs, inputs)
    fakes: tuple[Any, ...] = tuple(example_inputs)
    descriptions: tuple[Any, ...] = ()
    if not reason:
        try:
            fakes = tuple(_torch_compat.fakes_of_capture(example_inputs))
            descriptions = tuple(_torch_compat.describe(fakes))
        except (NotImplementedError, RuntimeError) as error:
            reason = f"an input cannot be described: {error}"
    return Captured(
        gm=graph_copy(gm),
        inputs=inputs,
        fakes=fakes,
        descriptions=descriptions,
        context=_torch_compat.CaptureContext(gm),
        state=compile_state(),
        reason=reason,
    )
