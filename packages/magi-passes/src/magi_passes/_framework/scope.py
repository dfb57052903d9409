# SPDX-License-Identifier: Apache-2.0
"""The life of one compilation: configuration is saved, passes run, configuration is restored.

Two functions of Inductor are wrapped, once, when the first pass is made (`_torch_compat.compiling.install` says why
two). A compilation in which no pass of this package is asked takes the same way as without the wrappers.

A compilation that a pass starts begins with the configuration that the outer compilation began with, without the outer
pipeline. So neither its cache key nor its code depends on what the pass has changed so far.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from magi_passes import _torch_compat
from magi_passes.errors import PassesWouldBeDroppedError

from .compilation import (
    Call,
    GraphCompilation,
    collectors_of_current,
    current_call,
    current_compilation,
    in_call,
    put_back_afterwards,
    under_way,
)
from .context import in_context
from .declared import DeclaredPass
from .records import PassRecord, active_collectors, publish
from .run import PipelineHook, as_pipeline_hook, parts_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.fx import GraphModule


FROM_CACHE = "not asked: a cache had the compiled graph"


def install() -> None:
    """Wrap two functions of Inductor. It is called whenever a pass is made, and does nothing after the first call."""
    _torch_compat.compiling.install(around_compile_fx, around_inner_compile)


def around_compile_fx(compile_fx: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call Inductor's *compile_fx* with each pipeline merged with the hooks in the same option.

    What is known of the call is bound to the function that compiles one graph, because a backward graph is compiled
    long after `compile_fx` returned, perhaps by another thread.
    """
    with _torch_compat.compiling.compilation_lock(), outside_of_current():
        patches = _torch_compat.compiling.config_patches_of(args, kwargs)
        hooks = _merged_hooks(patches)
        call = Call(tuple(hooks.values()), active_collectors())
        if not call.hooks and (not call.collectors or current_call() is not None):
            return compile_fx(*args, **kwargs)

        def around(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(inner_compile)
            def in_this_call(*inner_args: Any, **inner_kwargs: Any) -> Any:
                with in_call(call):
                    return inner_compile(*inner_args, **inner_kwargs)

            return in_this_call

        args, kwargs = _torch_compat.compiling.with_config_patches(args, kwargs, {**patches, **hooks})
        args, kwargs = _torch_compat.compiling.with_inner_compile(args, kwargs, around)
        with in_call(call):
            result = compile_fx(*args, **kwargs)
            for hook in () if call.graphs else hooks.values():
                _record_cache_hit(hook, "cached")
        return result


def around_inner_compile(
    inner: Callable[..., Any], gm: GraphModule, example_inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call Inductor's *inner* compilation of one graph, with a configuration that is restored afterwards."""
    with _torch_compat.compiling.compilation_lock(), outside_of_current():
        hooks, call = _installed_hooks(), current_call()
        compilation = _begin(gm, example_inputs, kwargs)
        if call is not None:
            call.graphs.append(compilation.graph)
        if hooks:
            _refuse_to_lose_passes()
        before = compilation.start if hooks else None
        try:
            with under_way(compilation):
                result = inner(gm, example_inputs, **kwargs)
        finally:
            if before is not None:
                _torch_compat.config.restore_overrides(before.overrides)
            elif compilation.has_passes:
                # What another manager of passes changes is not restored here.
                _torch_compat.config.restore_overrides(compilation.start.overrides, compilation.changed)
        has_calls = any(node.op not in ("placeholder", "output") for node in gm.graph.nodes)
        for hook in hooks if has_calls and not compilation.asked else ():
            _record_cache_hit(hook, compilation.graph)
        return result


@contextlib.contextmanager
def configuration_kept() -> Iterator[None]:
    """A context in which passes may be called without a compilation; the configuration is restored at its end."""
    with _torch_compat.compiling.compilation_lock(), outside_of_current(), put_back_afterwards():
        yield


def _installed_hooks() -> list[PipelineHook]:
    values = ((name, _torch_compat.config.get_config(name)) for name in _torch_compat.config.HOOKS)
    return [hook for name, value in values if (hook := as_pipeline_hook(name, value)) is not None]


def _merged_hooks(patches: Mapping[str, Any]) -> dict[str, PipelineHook]:
    """The hooks with a pass of this package that a call of compile_fx with the options *patches* will see.

    Options hide what is installed globally, so both are merged. The hooks of an enclosing call of `compile_fx` are not
    merged, because the options of the inner call replace them.
    """
    merged = {}
    user_keys = frozenset(key.replace("-", "_") for key in patches) - frozenset(_torch_compat.config.HOOKS)
    call = current_call()
    for name in _torch_compat.config.HOOKS:
        installed = _torch_compat.config.get_config(name)
        if call is not None and any(installed is hook for hook in call.hooks):
            installed = None
        wanted = patches.get(name, installed)
        if wanted is None:
            continue
        is_same = parts_of(wanted) == parts_of(installed)
        hook = as_pipeline_hook(name, wanted) if is_same else as_pipeline_hook(name, installed, wanted)
        if hook is not None:
            merged[name] = replace(hook, user_keys=hook.user_keys | user_keys)
    return merged


def _begin(gm: GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> GraphCompilation:
    is_backward, is_inference = bool(kwargs.get("is_backward")), bool(kwargs.get("is_inference"))
    kind = "backward" if is_backward else "inference" if is_inference else "forward"
    graph_id = kwargs.get("graph_id")
    return GraphCompilation(
        gm=gm,
        graph=kind if graph_id is None else f"{graph_id}_{kind}",
        is_backward=is_backward,
        is_inference=is_inference,
        example_inputs=tuple(example_inputs),
        compile_id=_torch_compat.compiling.current_compile_id(),
    )


def _refuse_to_lose_passes() -> None:
    mode = _torch_compat.compiling.out_of_process_mode()
    if mode is not None:
        msg = (
            f"TORCHINDUCTOR_FX_COMPILE_MODE={mode} compiles from a copy of the configuration that leaves custom passes "
            "out, so the passes of this pipeline would silently not run. Unset the variable, or compile without the "
            "pipeline's options."
        )
        raise PassesWouldBeDroppedError(msg)


def _record_cache_hit(hook: PipelineHook, graph: str) -> None:
    if hook.name in _torch_compat.config.POST_GRAD_HOOKS:
        compile_id = _torch_compat.compiling.current_compile_id()
        for part in hook.passes:
            name = type(part).__name__
            record = PassRecord(name, graph, ran=False, reason=FROM_CACHE, hook=hook.name, compile_id=compile_id)
            publish(record, collectors_of_current())


@contextlib.contextmanager
def outside_of_current() -> Iterator[None]:
    """A context for a nested compilation, in which there is no current compilation and no current pass."""
    outer = current_compilation()
    with in_context(None):
        if outer is None:
            yield
        elif not outer.has_passes:
            with under_way(None), in_call(None):
                yield
        else:
            with _configuration_of(outer), under_way(None), in_call(None), _torch_compat.compiling.nested_compilation():
                yield


@contextlib.contextmanager
def _configuration_of(outer: GraphCompilation) -> Iterator[None]:
    """A context with the configuration that *outer* started from, without its passes."""
    inside = _torch_compat.config.read_overrides()
    try:
        _torch_compat.config.restore_overrides(outer.start.overrides)
        for name in _torch_compat.config.HOOKS:
            _torch_compat.config.set_config(name, _without_passes(name, _torch_compat.config.get_config(name)))
        yield
    finally:
        _torch_compat.config.restore_overrides(inside)


def _without_passes(name: str, value: object) -> object:
    """*value* of a hook option without the passes of this package, which belong to the outer compilation."""
    if as_pipeline_hook(name, value) is None:
        return value
    foreign = tuple(part for part in parts_of(value) if not isinstance(part, DeclaredPass))
    if len(foreign) > 1:
        return PipelineHook(name, foreign)
    return foreign[0] if foreign else None
