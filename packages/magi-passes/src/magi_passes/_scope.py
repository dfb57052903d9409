# SPDX-License-Identifier: Apache-2.0
"""The life of one compilation: configuration is saved, passes run, configuration is put back.

Two functions of Inductor are wrapped, once, on the first use of a pipeline (`_torch_compat.install` says why two).
While no pipeline is in the options and no compilation of ours is under way, both just call the original.

A compilation that a pass starts begins from the configuration that the outer one began with, without the outer
pipeline: neither its cache key nor its code depends on what the pass has changed so far.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import _torch_compat
from ._compilation import Compilation, current_compilation, under_way
from ._hook import Binding, PipelineHook, as_pipeline_hook, parts_of
from ._pass import MagiInductorPass
from ._records import PassRecord, active_collectors, publish
from .errors import PassesWouldBeDroppedError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.fx import GraphModule


FROM_CACHE = "not asked: a cache had the compiled graph"


def _matches_of_current() -> dict[Any, Any] | None:
    compilation = current_compilation()
    return None if compilation is None else compilation.matches


def install() -> None:
    """Wrap Inductor's two functions. Called on the first use of a pipeline; later calls do nothing."""
    _torch_compat.install(around_compile_fx, around_inner_compile)


def around_compile_fx(compile_fx: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call Inductor's *compile_fx*, with every pipeline among its options bound to this call."""
    with _torch_compat.compilation_lock(), outside_of_current():
        patches = _torch_compat.config_patches_of(args, kwargs)
        bound = _bound_hooks(patches)
        if not bound:
            return compile_fx(*args, **kwargs)
        args, kwargs = _torch_compat.with_config_patches(args, kwargs, {**patches, **bound})
        result = compile_fx(*args, **kwargs)
        for hook in bound.values():
            _record_cache_hit(hook, "cached", hook.binding.asked if hook.binding else [])
        return result


def around_inner_compile(
    inner: Callable[..., Any], gm: GraphModule, example_inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call Inductor's *inner* compilation of one graph, in a configuration that is put back afterwards."""
    with _torch_compat.compilation_lock(), outside_of_current():
        hooks = _installed_hooks()
        if not hooks:
            return inner(gm, example_inputs, **kwargs)
        _refuse_to_lose_passes()
        _torch_compat.install_tilings(_matches_of_current)
        has_calls = any(node.op not in ("placeholder", "output") for node in gm.graph.nodes)
        compilation = _begin(gm, example_inputs, kwargs)
        try:
            with under_way(compilation):
                result = inner(gm, example_inputs, **kwargs)
        finally:
            _torch_compat.restore_overrides(compilation.overrides)
        for hook in hooks if has_calls else ():
            _record_cache_hit(hook, compilation.graph, compilation.asked)
        return result


def _installed_hooks() -> list[PipelineHook]:
    values = ((name, _torch_compat.get_config(name)) for name in _torch_compat.HOOKS)
    return [hook for name, value in values if (hook := as_pipeline_hook(name, value)) is not None]


def _bound_hooks(patches: Mapping[str, Any]) -> dict[str, PipelineHook]:
    """The hooks with a pipeline in them that this call of compile_fx will see, each with what the call adds to it.

    Options hide what is installed globally, so a global hook of the user or of another library is merged in here.
    One that an enclosing `compile_fx` put there is not: its options are replaced by ours, as options always are.
    """
    bound = {}
    user_keys = frozenset(key.replace("-", "_") for key in patches) - frozenset(_torch_compat.HOOKS)
    for name in _torch_compat.HOOKS:
        installed = _torch_compat.get_config(name)
        hook = as_pipeline_hook(name, patches.get(name, installed))
        if hook is None or hook.binding is not None:
            continue
        is_enclosing = isinstance(installed, PipelineHook) and installed.binding is not None
        if name in patches and not is_enclosing and parts_of(installed) != hook.parts:
            hook = hook.merged_after(installed)
        bound[name] = replace(hook, user_keys=hook.user_keys | user_keys, binding=Binding(active_collectors()))
    return bound


def _begin(gm: GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Compilation:
    is_backward, is_inference = bool(kwargs.get("is_backward")), bool(kwargs.get("is_inference"))
    kind = "backward" if is_backward else "inference" if is_inference else "forward"
    graph_id = kwargs.get("graph_id")
    return Compilation(
        gm=gm,
        graph=kind if graph_id is None else f"{graph_id}_{kind}",
        is_backward=is_backward,
        is_inference=is_inference,
        example_inputs=tuple(example_inputs),
        overrides=_torch_compat.read_overrides(),
        config=MappingProxyType(_torch_compat.config_values()),
        compile_id=_torch_compat.current_compile_id(),
    )


def _refuse_to_lose_passes() -> None:
    mode = _torch_compat.out_of_process_mode()
    if mode is not None:
        msg = (
            f"TORCHINDUCTOR_FX_COMPILE_MODE={mode} compiles from a copy of the configuration that leaves custom passes "
            "out, so the passes of this pipeline would silently not run. Unset the variable, or compile without the "
            "pipeline's options."
        )
        raise PassesWouldBeDroppedError(msg)


def _record_cache_hit(hook: PipelineHook, graph: str, asked: Sequence[str]) -> None:
    if asked or hook.name not in _torch_compat.POST_GRAD_HOOKS:
        return
    for part in hook.passes:
        record = PassRecord(type(part).__name__, graph, ran=False, reason=FROM_CACHE, hook=hook.name)
        publish(replace(record, compile_id=_torch_compat.current_compile_id()), hook.collectors)
    if hook.binding:
        hook.binding.asked.append(graph)


@contextlib.contextmanager
def outside_of_current() -> Iterator[None]:
    """Leave the compilation under way, if there is one, for a compilation that one of its passes starts."""
    outer = current_compilation()
    if outer is None:
        yield
        return
    inside = _torch_compat.read_overrides()
    try:
        _torch_compat.restore_overrides(outer.overrides)
        for name in _torch_compat.HOOKS:
            _torch_compat.set_config(name, _without_passes(name, _torch_compat.get_config(name)))
        with under_way(None), _torch_compat.nested_compilation():
            yield
    finally:
        _torch_compat.restore_overrides(inside)


def _without_passes(name: str, value: object) -> object:
    """*value* of a hook option without the passes of this package: they belong to the outer compilation."""
    if as_pipeline_hook(name, value) is None:
        return value
    foreign = tuple(part for part in parts_of(value) if not isinstance(part, MagiInductorPass))
    if len(foreign) > 1:
        return PipelineHook(name, foreign)
    return foreign[0] if foreign else None
