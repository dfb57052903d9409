# SPDX-License-Identifier: Apache-2.0
"""Passes run on a graph: one after another, and as the one pass that Inductor has at a hook."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from magi_passes import _torch_compat
from magi_passes._graph.predicates import flaw_of
from magi_passes._identity.code import digest
from magi_passes.errors import (
    BrokenGraphError,
    MagiPassesError,
    PassArgumentTypeError,
    PassDefinitionError,
    PassFailedError,
    UndeclaredConfigMutationError,
    UnscopedConfigError,
)

from .compilation import collectors_of_current, current_compilation, start_of_current
from .context import PassContext, Reason, context_of, in_context
from .declared import DISABLE_VARIABLE, DeclaredPass, check_keys_exist, disabled_passes, is_disabled
from .records import PassRecord, observed, publish, trace


SUBGRAPH = Reason(False, "a subgraph: configuration holds for the whole compilation, so the outermost graph decides")


@dataclass(frozen=True)
class _Outcome:
    ran: bool
    reason: str
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)


def run_directly(part: DeclaredPass, graph: object) -> None:
    """Run *part* on *graph* for a caller that is not a pipeline, as a pipeline would.

    The pass is asked and recorded, and its changes of the configuration end with the compilation in progress or with
    the open scope.

    Raises:
        PassArgumentTypeError: *graph* is not a graph.
        UnscopedConfigError: The pass declares keys, and neither a compilation nor a scope would put them back.
        UnknownConfigKeyError: It declares a key that the running torch does not have.
    """
    if not isinstance(graph, Graph):
        advice = "Pass its .graph." if hasattr(graph, "graph") else "Pass the graph of a GraphModule."
        msg = f"{type(part).__qualname__} takes a torch.fx.Graph, not {type(graph).__qualname__}. {advice}"
        raise PassArgumentTypeError(msg)
    keys = part.inductor_config_keys_potentially_mutated_by_this_pass
    check_keys_exist(type(part))
    trace([run_pass(part, graph, context_of(graph, "", keys))])


def run_pass(part: DeclaredPass, graph: Graph, context: PassContext) -> PassRecord:
    """Ask *part* about *graph*, run it if it applies, and publish the record.

    Raises:
        PassFailedError: The pass raised an error, which is the cause.
        BrokenGraphError: It left a graph that cannot be compiled.
        UndeclaredConfigMutationError: It changed an Inductor key that it does not declare.
        UnscopedConfigError: Nothing would restore the keys that it declares.
    """
    start = perf_counter()
    outcome = _Outcome(ran=False, reason="")
    try:
        with in_context(context):
            outcome = _ask(part, graph, context)
    except BaseException as error:
        outcome = _Outcome(ran=False, reason=f"raised {type(error).__name__}: {error}")
        if isinstance(error, MagiPassesError) or not isinstance(error, Exception):
            raise
        msg = f"{type(part).__qualname__} failed on {context.graph}: {type(error).__name__}: {error}"
        raise PassFailedError(msg) from error
    finally:
        record = PassRecord(
            type(part).__name__,
            context.graph,
            ran=outcome.ran,
            reason=outcome.reason,
            config_changes=outcome.changes,
            seconds=perf_counter() - start,
            compile_id=context.compile_id,
            hook=context.hook,
        )
        publish(record, collectors_of_current())
    return record


def _ask(part: DeclaredPass, graph: Graph, context: PassContext) -> _Outcome:
    reason = _verdict(part, graph, context)
    if not reason:
        return _Outcome(ran=False, reason=reason.text)
    before, was_broken = _torch_compat.config.read_overrides(), flaw_of(graph) is not None
    try:
        with observed(type(part).__name__, graph, collectors_of_current()):
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
    compilation = current_compilation()
    if compilation is not None:
        compilation.changed.update(kept)
    return _Outcome(ran=True, reason=reason.text + "".join(f"; your {key} stays" for key in overruled), changes=kept)


def _verdict(part: DeclaredPass, graph: Graph, context: PassContext) -> Reason:
    if is_disabled(part, disabled_passes()):
        return Reason(False, f"switched off by {DISABLE_VARIABLE}")
    if part.inductor_config_keys_potentially_mutated_by_this_pass:
        _check_scoped(part)
        if context.is_subgraph:
            return SUBGRAPH
    verdict: Any = part.is_applicable(graph, context)
    if isinstance(verdict, Reason):
        return verdict
    if isinstance(verdict, bool):
        return Reason(verdict, "applicable" if verdict else "not applicable")
    msg = (
        f"{type(part).__qualname__}.is_applicable returned {verdict!r}; "
        "return a bool, or Reason(applies, text) to say why."
    )
    raise PassDefinitionError(msg)


def _check_scoped(part: DeclaredPass) -> None:
    if start_of_current() is not None:
        return
    name, keys = type(part).__qualname__, part.inductor_config_keys_potentially_mutated_by_this_pass
    msg = (
        f"{name} may change Inductor's configuration ({', '.join(keys)}), and was called where nothing would put it "
        "back: outside of a compilation by Inductor, or in one that began before the first pass was made. Compile with "
        f"PassPipeline([{name}(...)]).inductor_options(), or call the pass inside `with PassPipeline([...]).scope():`."
    )
    raise UnscopedConfigError(msg)


def _check_declared(part: DeclaredPass, changes: dict[str, tuple[Any, Any]]) -> None:
    declared = part.inductor_config_keys_potentially_mutated_by_this_pass
    undeclared = {key: change for key, change in changes.items() if key not in declared}
    if not undeclared:
        return
    shown = ", ".join(f"{key!r} ({old!r} -> {new!r})" for key, (old, new) in sorted(undeclared.items()))
    msg = (
        f"{type(part).__qualname__} changed Inductor configuration that it does not declare: {shown}. "
        "Add the keys to inductor_config_keys_potentially_mutated_by_this_pass, so that they are put back when the "
        f"compilation ends. ({type(part).__module__})"
    )
    raise UndeclaredConfigMutationError(msg)


def _check_structure(part: DeclaredPass, graph: Graph, context: PassContext) -> None:
    flaw = flaw_of(graph)
    if flaw is not None:
        msg = (
            f"{type(part).__qualname__} left {context.graph} broken: {flaw}. The graph was whole before this pass; "
            f"replace the uses of a node before erasing it, and keep the output. ({type(part).__module__})"
        )
        raise BrokenGraphError(msg)


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
    def passes(self) -> tuple[DeclaredPass, ...]:
        """The parts that are passes of this package."""
        return tuple(part for part in self.parts if isinstance(part, DeclaredPass))

    @property
    def declared_keys(self) -> frozenset[str]:
        """Every Inductor key that one of the passes may change."""
        return frozenset(key for p in self.passes for key in p.inductor_config_keys_potentially_mutated_by_this_pass)

    def __call__(self, graph: Graph) -> None:
        """Run the parts on *graph* in order, in the current compilation or scope, and record each pass.

        An error that leaves it has the part that raised it in the attribute ``failed_pass``.
        """
        context = context_of(graph, self.name, self.declared_keys, self.user_keys)
        compilation = current_compilation()
        if compilation is not None:
            compilation.asked.append(self.name)
        records: list[PassRecord] = []
        try:
            for part in self.parts:
                if isinstance(part, DeclaredPass):
                    records.append(run_pass(part, graph, context))
                else:
                    with observed(_name_of(part), graph, collectors_of_current()):
                        _call(part, graph, context)
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
        uuids = [_uuid_of(part) for part in self.parts]
        if not all(uuids):
            return None
        kept_keys = sorted(self.user_keys & self.declared_keys)
        # Every name counts, also those of passes that are not in the pipeline, because a chooser reads them too.
        return digest(self.name, *map(str, uuids), "|", *kept_keys, "|", *sorted(disabled_passes()))

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineHook:
        # Reading Inductor's whole configuration copies it deeply, hooks too; the copy must be recognised as this hook.
        return self


def parts_of(value: object) -> tuple[Any, ...]:
    """The hooks inside the value of a hook option: None, one hook, a list of them, or a pipeline's."""
    if value is None:
        return ()
    if isinstance(value, PipelineHook):
        return value.parts
    if isinstance(value, (list, tuple)):
        return tuple(part for item in value for part in parts_of(item))
    return (value,)


def _call(part: Any, graph: Graph, context: PassContext) -> None:
    if _torch_compat.compiling.is_inference_aware(part):
        part(graph, is_inference=context.is_inference)
    else:
        part(graph)


def _name_of(part: object) -> str:
    return str(getattr(part, "__name__", type(part).__name__))


def _uuid_of(part: object) -> object:
    return part.uuid() if isinstance(part, CustomGraphPass) else None


def as_pipeline_hook(name: str, *values: object) -> PipelineHook | None:
    """*values* of the hook option *name* as one pipeline hook; None when no pass of this package is among them.

    A pass that is in the option without a pipeline becomes a pipeline of one.
    """
    if len(values) == 1 and isinstance(values[0], PipelineHook):
        return values[0] if values[0].name == name else replace(values[0], name=name)
    parts = tuple(part for value in values for part in parts_of(value))
    if not any(isinstance(part, DeclaredPass) for part in parts):
        return None
    return PipelineHook(name, parts, frozenset().union(*map(_user_keys_of, values)))


def _user_keys_of(value: object) -> frozenset[str]:
    if isinstance(value, PipelineHook):
        return value.user_keys
    items = value if isinstance(value, (list, tuple)) else ()
    return frozenset().union(*map(_user_keys_of, items))
