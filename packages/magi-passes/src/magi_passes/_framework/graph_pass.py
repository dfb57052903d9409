# SPDX-License-Identifier: Apache-2.0
"""The base class of every pass, and how passes run: asked, checked and recorded, within one of Inductor's compilations.

Two functions of Inductor are wrapped, once, when the first pass is made (`_torch_compat.compiling.install` says why
two). A compilation in which no pass of this package is asked takes the same way as without the wrappers.

A compilation that a pass starts begins with the configuration that the outer compilation began with, without the outer
pipeline. So neither its cache key nor its code depends on what the pass has changed so far.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, ClassVar, Self

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from magi_passes import _torch_compat
from magi_passes._graph.nodes import flaw_of
from magi_passes._identity.code import digest
from magi_passes.errors import (
    BrokenGraphError,
    MagiPassesError,
    PassArgumentError,
    PassArgumentTypeError,
    PassDefinitionError,
    PassesWouldBeDroppedError,
    PassFailedError,
    PassIdentityError,
    UndeclaredConfigMutationError,
    UnscopedConfigError,
)

from .compilation import (
    Call,
    Collector,
    GraphCompilation,
    PassContext,
    PassRecord,
    Reason,
    context_of,
    current,
    observed,
    publish,
    trace,
    within,
)
from .declared import (
    DISABLE_VARIABLE,
    check_class_keywords,
    check_declarations,
    check_fields,
    check_is_frozen,
    check_keys_exist,
    check_keywords,
    classes_of_passes,
    disabled_passes,
    is_disabled,
    uuid_of,
)


SWITCHED_OFF = f"switched off by {DISABLE_VARIABLE}"
FROM_CACHE = "not asked: a cache had the compiled graph"
SUBGRAPH = Reason(False, "a subgraph: configuration holds for the whole compilation, so the outermost graph decides")


class MagiInductorPass(CustomGraphPass):
    """A graph pass that declares which configuration it may change. Subclasses are frozen dataclasses.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from magi_passes import MagiInductorPass, PassContext, Reason
        >>> @dataclass(frozen=True)
        ... class Unroll(MagiInductorPass):
        ...     inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)
        ...     tiles: int = 2
        ...
        ...     def is_applicable(self, graph, context):
        ...         return Reason(len(graph.nodes) > 10, f"{len(graph.nodes)} nodes")
        ...
        ...     def __call__(self, graph):
        ...         torch._inductor.config.triton.max_tiles = self.tiles
        >>> Unroll(tiles=2).uuid() == Unroll(tiles=3).uuid()
        False

    Assigning a declared key inside `__call__` is all there is to it: the old value comes back when the compilation
    ends, no other compilation sees the change, and the user's own setting wins.

    That also holds where another library's pass manager calls the pass, and where the pass stands in one of
    Inductor's hooks by itself. A call asks `is_applicable` first, and writes a record. Where nothing would put the
    configuration back, a pass that declares keys raises `UnscopedConfigError`; `PassPipeline.scope` is the way out.

    Attributes:
        inductor_config_keys_potentially_mutated_by_this_pass: The keys of `torch._inductor.config` that `__call__`
            may assign, nested ones with a dot. Any other change raises `UndeclaredConfigMutationError`.
        hook: The Inductor option that runs the pass. Configuration can be changed from the two post-grad hooks only:
            the others run before the code generation that reads it.
    """

    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = ()
    hook: ClassVar[str] = "post_grad_custom_post_pass"

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004
        """Make the pass. The first one wraps Inductor's functions, to know when a compilation begins and ends."""
        check_keywords(cls, kwargs)
        install()
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        try:
            super().__init_subclass__(**kwargs)
        except TypeError:
            check_class_keywords(cls, kwargs)
            raise
        check_declarations(cls)
        classes_of_passes.add(cls)
        if "__call__" in vars(cls):
            setattr(cls, "__call__", _safe_by_itself(vars(cls)["__call__"]))  # noqa: B010 - mypy refuses to assign it

    def is_applicable(self, graph: Graph, context: PassContext) -> bool | Reason:  # noqa: ARG002
        """Whether to run on *graph*. A `Reason` also says why in the record. It must not change anything."""
        return True

    @abstractmethod
    def __call__(self, graph: Graph) -> None:
        """Rewrite *graph* in place, or assign declared configuration keys.

        It is not called if a cache has the result.
        """

    def uuid(self) -> str:
        """What identifies this pass in Inductor's cache keys.

        It is a digest of the code of the class and its bases, the fields, all code that they reach with the values that
        it reads, and the torch release. Nothing has to be listed: functions are found by the names in the code, through
        other modules too, up to torch, Triton and the standard library. Code that is found only at run time, by a
        computed name or an entry point, must be in a field or an attribute of the class.

        It is computed once, and again after any of this was replaced. A pass that depends on the rank of its process
        appends it:

            def uuid(self): return f"{super().uuid()}-rank{torch.distributed.get_rank()}"

        Raises:
            PassDefinitionError: The class is not a frozen dataclass.
            PassIdentityError: A field can change, or code of yours reads a value without a stable form. It has this
                pass in the attribute ``failed_pass``.
            UnknownPassNameError: MAGI_PASSES_DISABLE names a pass that does not exist.
        """
        check_is_frozen(type(self))
        disabled = disabled_passes()
        # Every name counts, also those of other passes, because a pass that chooses among passes reads them too.
        without = f"-without-{digest('disabled', *sorted(disabled))}" if disabled else ""
        try:
            return uuid_of(self) + without
        except PassIdentityError as error:
            vars(error)["failed_pass"] = self
            raise


class CheckedPass(MagiInductorPass):
    """A pass of this package: its fields are checked when it is made."""

    def __post_init__(self) -> None:
        check_fields(self)


def _safe_by_itself(body: Callable[..., None]) -> Callable[..., None]:
    """A function that runs *body* with the checks and the record of a pipeline if the caller is not the framework."""

    @functools.wraps(body)
    def __call__(self: MagiInductorPass, graph: object, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if current().context is not None:
            body(self, graph, *args, **kwargs)
            return
        if not isinstance(graph, Graph):
            advice = "Pass its .graph." if hasattr(graph, "graph") else "Pass the graph of a GraphModule."
            msg = f"{type(self).__qualname__} takes a torch.fx.Graph, not {type(graph).__qualname__}. {advice}"
            raise PassArgumentTypeError(msg)
        check_keys_exist(type(self))
        keys = self.inductor_config_keys_potentially_mutated_by_this_pass
        trace([run_pass(self, graph, context_of(graph, "", keys))])

    return __call__


def run_pass(part: MagiInductorPass, graph: Graph, context: PassContext) -> PassRecord:
    """Ask *part* about *graph*, run it if it applies, and publish the record, also if it raises."""
    start, name = perf_counter(), type(part).__name__
    record = PassRecord(name, context.graph, ran=False, reason="", compile_id=context.compile_id, hook=context.hook)
    try:
        with within(context=context):
            reason = _verdict(part, graph, context)
            record = _run(part, graph, context, record, reason) if reason else replace(record, reason=reason.text)
    except BaseException as error:
        record = replace(record, reason=f"raised {type(error).__name__}: {error}")
        if isinstance(error, MagiPassesError) or not isinstance(error, Exception):
            raise
        msg = f"{type(part).__qualname__} failed on {context.graph}: {type(error).__name__}: {error}"
        # Torch raises another error with this traceback and no cause, so it has to end at the line of the pass.
        raise PassFailedError(msg).with_traceback(error.__traceback__) from error
    finally:
        record = replace(record, seconds=perf_counter() - start)
        publish(record)
    return record


def _verdict(part: MagiInductorPass, graph: Graph, context: PassContext) -> Reason:
    """Whether *part* is to run on *graph*, and why."""
    if is_disabled(part):
        return Reason(False, SWITCHED_OFF)
    name, keys = type(part).__qualname__, part.inductor_config_keys_potentially_mutated_by_this_pass
    if keys and current().start is None:
        raise UnscopedConfigError(
            f"{name} may change Inductor's configuration ({', '.join(keys)}), and was called where nothing would put "
            "it back: outside of a compilation by Inductor, or in one that began before the first pass was made. "
            f"Compile with PassPipeline([{name}(...)]).inductor_options(), or call the pass inside `with "
            "PassPipeline([...]).scope():`."
        )
    if keys and context.is_subgraph:
        return SUBGRAPH
    verdict: Any = part.is_applicable(graph, context)
    if isinstance(verdict, Reason):
        return verdict
    if isinstance(verdict, bool):
        return Reason(verdict, "applicable" if verdict else "not applicable")
    msg = f"{name}.is_applicable returned {verdict!r}; return a bool, or Reason(applies, text) to say why."
    raise PassDefinitionError(msg)


def _run(part: MagiInductorPass, graph: Graph, context: PassContext, record: PassRecord, reason: Reason) -> PassRecord:
    """*record* after *part* ran on *graph*, without changes that a setting of the user overrules."""
    before, was_broken = _torch_compat.config.read_overrides(), flaw_of(graph) is not None
    try:
        with observed(record.pass_name, graph):
            part(graph)
        changes = _torch_compat.config.config_changes(before, _torch_compat.config.read_overrides())
        _check_declared(part, changes)
        if not was_broken:
            _check_structure(part, graph, context)
    except BaseException:
        _torch_compat.config.restore_overrides(before)
        raise
    overruled = sorted(changes.keys() & context.user_keys)
    _torch_compat.config.restore_overrides(before, overruled)
    kept = {key: change for key, change in changes.items() if key not in context.user_keys}
    compilation = current().compilation
    if compilation is not None:
        compilation.changed.update(kept)
    text = reason.text + "".join(f"; your {key} stays" for key in overruled)
    return replace(record, ran=True, reason=text, config_changes=kept)


def _check_declared(part: MagiInductorPass, changes: Mapping[str, tuple[Any, Any]]) -> None:
    declared = part.inductor_config_keys_potentially_mutated_by_this_pass
    undeclared = {key: change for key, change in changes.items() if key not in declared}
    if undeclared:
        shown = ", ".join(f"{key!r} ({old!r} -> {new!r})" for key, (old, new) in sorted(undeclared.items()))
        raise UndeclaredConfigMutationError(
            f"{type(part).__qualname__} changed Inductor configuration that it does not declare: {shown}. "
            "Add the keys to inductor_config_keys_potentially_mutated_by_this_pass, so that they are put back when the "
            f"compilation ends. ({type(part).__module__})"
        )


def _check_structure(part: MagiInductorPass, graph: Graph, context: PassContext) -> None:
    flaw = flaw_of(graph)
    if flaw is not None:
        raise BrokenGraphError(
            f"{type(part).__qualname__} left {context.graph} broken: {flaw}. The graph was whole before this pass; "
            f"replace the uses of a node before erasing it, and keep the output. ({type(part).__module__})"
        )


@dataclass(frozen=True)
class PipelineHook(CustomGraphPass):
    """The value of one hook option. It is a single object, because a hook of torch before 2.13 holds one pass.

    Attributes:
        name: The Inductor option that holds this object; empty when another library's manager holds it.
        parts: Passes of this package, and any other hook, in the order in which they run.
        user_keys: Inductor keys that the user set in the options, whatever their value.
    """

    name: str
    parts: tuple[Any, ...]
    user_keys: frozenset[str] = frozenset()

    @property
    def passes(self) -> tuple[MagiInductorPass, ...]:
        """The parts that are passes of this package."""
        return tuple(part for part in self.parts if isinstance(part, MagiInductorPass))

    def __post_init__(self) -> None:
        name = self.name or next((part.hook for part in self.passes), "")
        for part in self.passes:
            if part.hook.partition("_custom_")[0] != name.partition("_custom_")[0]:
                cls = type(part)
                raise PassArgumentError(
                    f"{cls.__qualname__} is run at {name}, and its hook is {part.hook}, where graphs are of another "
                    "form. Put it there, as PassPipeline([...]).inductor_options() does. If it is for the graphs here, "
                    f"set hook = {name!r} in its class. ({cls.__module__})"
                )

    @property
    def declared_keys(self) -> frozenset[str]:
        """Every Inductor key that one of the passes may change."""
        return frozenset(key for p in self.passes for key in p.inductor_config_keys_potentially_mutated_by_this_pass)

    def __call__(self, graph: Graph) -> None:
        """Run the parts on *graph* in order, in the current compilation or scope, and record each pass.

        An error that leaves it has the part that raised it in the attribute ``failed_pass``.
        """
        context = context_of(graph, self.name, self.declared_keys, self.user_keys)
        compilation = current().compilation
        if compilation is not None:
            compilation.asked.append(self.name)
        records: list[PassRecord] = []
        try:
            for part in self.parts:
                if isinstance(part, MagiInductorPass):
                    records.append(run_pass(part, graph, context))
                    continue
                aware = (
                    {"is_inference": context.is_inference} if _torch_compat.compiling.is_inference_aware(part) else {}
                )
                with observed(str(getattr(part, "__name__", type(part).__name__)), graph):
                    part(graph, **aware)
        except Exception as error:
            vars(error)["failed_pass"] = part
            raise
        finally:
            trace(records)

    def uuid(self) -> str | None:
        """One uuid for all parts; None, which turns Inductor's caches off, if a hook of the user has none.

        The user's keys count if a pass declares them: setting ``triton.max_tiles`` to its default changes what the pass
        may do, and no other part of the cache key shows it. The names that the environment disables count for the same
        reason.
        """
        uuids: list[Any] = [part.uuid() if isinstance(part, CustomGraphPass) else None for part in self.parts]
        if not all(uuids):
            return None
        kept_keys = sorted(self.user_keys & self.declared_keys)
        # Every name counts, also those of passes that are not in the pipeline, because a chooser reads them too.
        return digest(self.name, *map(str, uuids), "|", *kept_keys, "|", *sorted(disabled_passes()))

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineHook:
        # Reading Inductor's whole configuration copies it deeply, hooks too; the copy must be recognised as this hook.
        return self


def install() -> None:
    """Wrap two functions of Inductor, unless they are: another library may have put its own in their place since."""
    _torch_compat.compiling.install(around_compile_fx, around_inner_compile)


def parts_of(value: object) -> tuple[Any, ...]:
    """The hooks inside the value of a hook option: None, one hook, a list of them, or a pipeline's."""
    if value is None:
        return ()
    if isinstance(value, PipelineHook):
        return value.parts
    if isinstance(value, (list, tuple)):
        return tuple(part for item in value for part in parts_of(item))
    return (value,)


def as_pipeline_hook(name: str, *values: object) -> PipelineHook | None:
    """*values* of the hook option *name* as one pipeline hook; None when no pass of this package is among them.

    A pass that is in the option without a pipeline becomes a pipeline of one.
    """
    if len(values) == 1 and isinstance(values[0], PipelineHook):
        return values[0] if values[0].name == name else replace(values[0], name=name)
    parts = tuple(part for value in values for part in parts_of(value))
    if not any(isinstance(part, MagiInductorPass) for part in parts):
        return None
    return PipelineHook(name, parts, _user_keys_of(values))


def _user_keys_of(value: object) -> frozenset[str]:
    """The keys of the user in all pipelines' hooks in *value*."""
    if isinstance(value, PipelineHook):
        return value.user_keys
    items = value if isinstance(value, (list, tuple)) else ()
    return frozenset().union(*map(_user_keys_of, items))


def around_compile_fx(compile_fx: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call Inductor's *compile_fx* with each pipeline merged with the hooks in the same option.

    What is known of the call is bound to the function that compiles one graph, because a backward graph is compiled
    long after `compile_fx` returned, perhaps by another thread.
    """
    with outside_of_current():
        patches = kwargs.get("config_patches") or {}
        hooks = _merged_hooks(patches)
        outside, own = current(), Collector([])
        if not hooks and (not outside.collectors or outside.call is not None):
            return compile_fx(*args, **kwargs)
        call = Call(tuple(hooks.values()), (*outside.collectors, own))
        inner_compile = kwargs.get("inner_compile") or _torch_compat.compiling.inner_compile()

        @functools.wraps(inner_compile)
        def in_this_call(*inner_args: Any, **inner_kwargs: Any) -> Any:
            with within(call=call), _passes_named(own.records):
                return inner_compile(*inner_args, **inner_kwargs)

        with within(call=call), _passes_named(own.records), _torch_compat.compiling.more_symbolic_results():
            changed = {"inner_compile": in_this_call, "config_patches": {**patches, **hooks}}
            result = compile_fx(*args, **{**kwargs, **changed})
            for hook in () if call.graphs else hooks.values():
                _record_cache_hit(hook, "cached")
        return result


@contextlib.contextmanager
def _passes_named(records: list[PassRecord]) -> Iterator[None]:
    """A context from which an error leaves with a note of the passes that had run, perhaps on the graph that failed."""
    try:
        yield
    except Exception as error:
        if ran := "; ".join(str(record) for record in records if record.ran):
            note = f"Passes had changed what was compiled: {ran}."
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def around_inner_compile(
    inner: Callable[..., Any], gm: GraphModule, example_inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call Inductor's *inner* compilation of one graph, with a configuration that is restored afterwards."""
    if current().scoped and current().call is None:
        warnings.warn(
            "A graph is compiled in a scope of a PassPipeline by a compile_fx that was imported by name before the "
            "first pass was made. A backward that is compiled later gets no pass, and one in config_patches takes the "
            "place of those of the scope. Look it up at the call: torch._inductor.compile_fx.compile_fx(...).",
            stacklevel=2,
        )
    with outside_of_current():
        values = ((name, _torch_compat.config.get_config(name)) for name in _torch_compat.config.HOOKS)
        hooks = [hook for name, value in values if (hook := as_pipeline_hook(name, value)) is not None]
        compilation, call = _begun(gm, example_inputs, kwargs), current().call
        if call is not None:
            call.graphs.append(compilation.known.graph)
        if hooks:
            _refuse_to_lose_passes()
        before = compilation.start if hooks else None
        try:
            with within(compilation=compilation), _torch_compat.compiling.more_symbolic_results():
                result = inner(gm, example_inputs, **kwargs)
        finally:
            if before is not None:
                _torch_compat.config.restore_overrides(before)
            elif compilation.has_passes:
                # What another manager of passes changes is not restored here.
                _torch_compat.config.restore_overrides(compilation.start, compilation.changed)
        has_calls = any(node.op not in ("placeholder", "output") for node in gm.graph.nodes)
        for hook in hooks if has_calls and not compilation.asked else ():
            _record_cache_hit(hook, compilation.known.graph)
        return result


def _merged_hooks(patches: Mapping[str, Any]) -> dict[str, PipelineHook]:
    """The hooks with a pass of this package that a call of compile_fx with the options *patches* will see.

    Options hide what is installed globally, so both are merged. The hooks of an enclosing call of `compile_fx` are not
    merged, because the options of the inner call replace them.
    """
    merged = {}
    user_keys = frozenset(key.replace("-", "_") for key in patches) - frozenset(_torch_compat.config.HOOKS)
    call = current().call
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


def _begun(gm: GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> GraphCompilation:
    """The compilation of *gm* that Inductor begins with the keyword arguments *kwargs*."""
    is_backward, is_inference = bool(kwargs.get("is_backward")), bool(kwargs.get("is_inference"))
    kind = "backward" if is_backward else "inference" if is_inference else "forward"
    graph_id = kwargs.get("graph_id")
    known = PassContext(
        graph=kind if graph_id is None else f"{graph_id}_{kind}",
        is_backward=is_backward,
        is_inference=is_inference,
        example_inputs=tuple(example_inputs),
        compile_id=_torch_compat.compiling.current_compile_id(),
        config={},
    )
    return GraphCompilation(gm, known)


def _refuse_to_lose_passes() -> None:
    mode = _torch_compat.compiling.out_of_process_mode()
    if mode is not None:
        raise PassesWouldBeDroppedError(
            f"TORCHINDUCTOR_FX_COMPILE_MODE={mode} compiles from a copy of the configuration that leaves custom passes "
            "out, so the passes of this pipeline would silently not run. Unset the variable, or compile without the "
            "pipeline's options."
        )


def _record_cache_hit(hook: PipelineHook, graph: str) -> None:
    if hook.name in _torch_compat.config.POST_GRAD_HOOKS:
        compile_id = _torch_compat.compiling.current_compile_id()
        for part in hook.passes:
            name, reason = type(part).__name__, SWITCHED_OFF if is_disabled(part) else FROM_CACHE
            publish(PassRecord(name, graph, ran=False, reason=reason, hook=hook.name, compile_id=compile_id))


@contextlib.contextmanager
def outside_of_current() -> Iterator[None]:
    """A context for a nested compilation: no pass, compilation or call is current, if passes take part in the outer.

    Within an outer compilation with passes, the configuration is the one that it started from, without its passes.
    Other threads that share the configuration wait.
    """
    outer = current().compilation
    with _torch_compat.compiling.compilation_lock(), contextlib.ExitStack() as stack:
        stack.enter_context(within(context=None))
        if outer is not None:
            if outer.has_passes:
                stack.callback(_torch_compat.config.restore_overrides, _torch_compat.config.read_overrides())
                _torch_compat.config.restore_overrides(outer.start)
                for name in _torch_compat.config.HOOKS:
                    _torch_compat.config.set_config(name, _without_passes(name, _torch_compat.config.get_config(name)))
                stack.enter_context(_torch_compat.compiling.nested_compilation())
            stack.enter_context(within(compilation=None, call=None, scoped=False))
        yield


def _without_passes(name: str, value: object) -> object:
    """*value* of a hook option without the passes of this package, which belong to the outer compilation."""
    if as_pipeline_hook(name, value) is None:
        return value
    foreign = tuple(part for part in parts_of(value) if not isinstance(part, MagiInductorPass))
    if len(foreign) > 1:
        return PipelineHook(name, foreign)
    return foreign[0] if foreign else None
