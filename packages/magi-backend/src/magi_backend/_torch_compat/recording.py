# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs as torch records them: its trees, what is recorded by them, and how one is taken out again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._ordered_set import OrderedSet

from .compiling import assigned, configs, owner_of, replace


Model = Callable[[list[Any]], Any]
"""A compiled function, of a list that it empties."""


class _Noted:
    """A model that notes whether a graph was captured of it. By this object its nodes are found among all."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.was_captured = False

    def __call__(self, inputs: list[Any]) -> Any:
        self.was_captured |= torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return self._model(inputs)


_keeps_cached: ContextVar[bool] = ContextVar("magi_keeps_cached", default=False)


class Recording:
    """*model* as a CUDA graph: the first call warms up, the second records, and those after it replay.

    If an input of a graph that is not copied has moved, or what must live on is another, torch records once more. So it
    does after ``reset_cudagraph_trees``, with which torch's own recordings end.
    """

    def __init__(self, model: Model, cudagraphify: Callable[[Model], Model], device: int) -> None:
        self._model = _Noted(model)
        self._cudagraphify = cudagraphify
        self._run = cudagraphify(self._model)
        self._device = device
        self._manager: Any = None

    def was_captured(self) -> bool:
        """Whether a graph was captured, or tried to be."""
        return self._model.was_captured

    def __call__(self, inputs: list[Any]) -> Any:
        """Run it."""
        if self._manager is not None and self._manager.graph is None:  # it was shut down
            self._run, self._manager = self._cudagraphify(self._model), None
        token = _keeps_cached.set(not self._model.was_captured)
        try:
            result = self._run(inputs)
        finally:
            _keeps_cached.reset(token)
        if self._manager is None:
            self._manager = _manager_of(self._device)
        return result

    def drop(self) -> bool:
        """Take it out of the trees, so that its memory can be used by others; False while its outputs are in use.

        What was recorded as following it goes too. This does for one function what ``CUDAGraphTreeManager.shutdown``
        does for all (2.10 to 2.15).
        """
        manager = _manager_of(self._device)
        if manager is None or manager.roots is None:  # torch has forgotten all
            return True
        ids = [number for number, function in manager.ids_to_funcs.items() if function.model is self._model]
        if _is_on_path(manager, ids):
            end = manager.try_end_curr_execution
            if manager.in_recording or manager.in_warmup:
                end = manager.try_end_curr_recording if manager.in_recording else manager.try_end_curr_warmup
                end = functools.partial(end, ids[0])
            end()  # only now, because it may take away what others have just returned
            if _is_on_path(manager, ids):
                return False
        _take_out(manager.roots, ids)
        by_function = ("ids_to_funcs", "ids_to_stack_traces", "id_to_mode", "id_to_compile_id")
        by_node = ("num_rerecord", "non_cudagraph_managed_mutation_hint")
        tables = [getattr(manager, name, {}) for name in by_function]
        tables += [table for name in by_node for table in getattr(manager, name, {}).values()]
        for number in ids:
            for table in tables:
                table.pop(number, None)
            for name in ("warmed_up_functions", "warned_functions", "warned_mutation"):
                getattr(manager, name).discard(number)
        return True


def _manager_of(device: int) -> Any:
    """The manager of the trees of *device*, if there is one; the thread must have them."""
    from torch._inductor.cudagraph_trees import get_manager

    return get_manager(device, create_if_none_exists=False)


def _is_on_path(manager: Any, ids: Sequence[Any]) -> bool:
    """Whether one of the functions *ids* has run in what the manager takes for the call that goes on."""
    path = () if manager.current_node is None else manager.current_node._path_from_root
    return any(node.wrapped_function.id in ids for node in path)


def _take_out(children: dict[Any, list[Any]], ids: Sequence[Any]) -> None:
    """Take the nodes of the functions *ids* out of the trees that begin with *children*."""
    gone = [node for number in ids for node in children.pop(number, ())]
    for nodes in children.values():
        for node in nodes:
            _take_out(node.children, ids)
    while gone:
        node = gone.pop()
        gone += [child for nodes in node.children.values() for child in nodes]
        node.remove_node_cached_tensors()
        node.graph = None


@dataclass(frozen=True)
class Recordable:
    """A compiled function that Inductor would record: all of a graph, or a piece of it between what no graph can hold.

    Attributes:
        model: The function.
        is_backward: Whether it is that of a backward.
        inputs: The names of its inputs.
        mutated: The positions of those that it writes to.
        record: Makes a recording of it, which the next calls fill.
        device: The index of its device.
    """

    model: Model
    is_backward: bool
    inputs: tuple[str, ...]
    mutated: tuple[int, ...]
    record: Callable[[], Recording]
    device: int


def without_graph(it: Recordable) -> Model:
    """*it*, to be called without a graph among calls with one.

    Inductor leaves it to the recording to copy inputs that are not aligned as its kernels assume.
    """
    from torch._inductor.utils import align_inputs_from_check_idxs

    aligned: Model | None = None

    def run(inputs: list[Any]) -> Any:
        nonlocal aligned
        if aligned is None:
            checked = [place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.is_cuda]
            aligned = align_inputs_from_check_idxs(it.model, checked, OrderedSet(it.mutated))
        return aligned(inputs)

    return telling_of_backward(run, it.device) if it.is_backward else run


def telling_of_backward(run: Model, device: int) -> Model:
    """*run*, a backward that the manager does not run, and waits for if it ran the forward."""

    def backward(inputs: list[Any]) -> Any:
        if is_usable() and (manager := _manager_of(device)) is not None:
            manager.set_to_running_backward()
        return run(inputs)

    return backward


def is_usable() -> bool:
    """Whether this thread has torch's trees: the one that imported them, and autograd's (2.10 to 2.15)."""
    name = "tree_manager_containers"
    return hasattr(know_thread(), name) or torch._C._is_key_in_tls(name)


@functools.cache
def know_thread() -> Any:
    """Torch's trees, which belong to the thread that imports them first: another thread may compile first."""
    from torch._inductor.cudagraph_trees import local

    return local


_wrap: ContextVar[Callable[[Recordable], Model] | None] = ContextVar("magi_recordable", default=None)


def wrapping_recordable(wrap: Callable[[Recordable], Model]) -> contextlib.AbstractContextManager[Any]:
    """A context in which compiled graphs become *wrap* of what Inductor would record, in place of that."""
    replace(*owner_of("torch._inductor.compile_fx:cudagraphify"), None, _wrapped)
    replace(torch.cuda, "empty_cache", None, _emptied)
    replace(*owner_of("torch._inductor.output_code:maybe_handle_backward_generation"), None, _unrecorded)
    return assigned(_wrap, wrap)


def _wrapped(
    cudagraphify: Callable[..., Model], model: Model, static_input_idxs: Sequence[int] = (), **kwargs: Any
) -> Model:
    """What ``post_compile`` calls for each compiled graph or partition (2.10 to 2.15)."""
    wrap = _wrap.get()
    if wrap is None or not configs()[0].triton.cudagraph_trees:
        return cudagraphify(model, static_input_idxs, **kwargs)
    device: int = kwargs["device_index"]
    # Read now: a recording is made when another compilation may go on.
    by_torch = functools.partial(cudagraphify, static_input_idxs=static_input_idxs, **kwargs)
    names = tuple(placeholder.name for placeholder in kwargs.get("placeholders", ()))
    return wrap(
        Recordable(
            model=model,
            is_backward=kwargs["is_backward"],
            inputs=names,
            mutated=tuple(kwargs.get("mutated_input_idxs", ())),
            record=functools.partial(Recording, model, by_torch, device),
            device=device,
        )
    )


def _emptied(empty_cache: Callable[[], None]) -> None:
    """A capture gives back what torch keeps for the next calls, so that the graph finds memory; its warm-up has."""
    if not _keeps_cached.get():
        empty_cache()


def _unrecorded(by_manager: Callable[..., None], compiled: Any, forward_device: Any) -> None:
    """For a backward that cannot be recorded, torch asks for the manager, which the forward has made there.

    Here there may be none until a size is recorded, and never on the thread that compiles beside the calls.
    """
    device = getattr(forward_device, "value", None)
    if _wrap.get() is None:
        by_manager(compiled, forward_device)
    elif compiled.fx_kwargs["is_backward"] and device is not None:
        compiled.current_callable = telling_of_backward(compiled.current_callable, device)


def why_unrecorded(compiled: Any) -> str:
    """Why Inductor lets no CUDA graph be recorded of a *compiled* graph; empty if it does, or if none was asked for."""
    info = getattr(compiled, "cudagraph_info", None)
    first = str(getattr(compiled, "disabled_cudagraphs_reason", None) or "")
    reasons = dict.fromkeys([first, *(str(reason) for reason in getattr(info, "cudagraph_fail_reasons", ()))])
    if any(reasons) and "cuda" not in compiled.device_types:
        return "it has no CUDA device"  # torch calls a CPU several devices
    return "; ".join(reason.removeprefix("skipping cudagraphs due to ").strip() for reason in reasons if reason)
