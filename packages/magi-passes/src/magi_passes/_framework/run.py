# SPDX-License-Identifier: Apache-2.0
"""Run one pass: ask it, run it, check the graph and the configuration afterwards, and write the record."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch.fx import Graph

from magi_passes import _torch_compat
from magi_passes._graph.structure import flaw_of
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
from .context import PassContext, context_of, in_context
from .declared import DeclaredPass, check_keys_exist
from .disable import DISABLE_VARIABLE, disabled_passes, is_disabled
from .reason import Reason
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
    before, was_broken = _torch_compat.read_overrides(), flaw_of(graph) is not None
    try:
        with observed(type(part).__name__, graph, collectors_of_current()):
            part(graph)
        changes = _torch_compat.config_changes(before, _torch_compat.read_overrides())
        _check_declared(part, changes)
        if not was_broken:
            _check_structure(part, graph, context)
    except BaseException:
        _torch_compat.restore_overrides(before)
        raise
    overruled = sorted(changes.keys() & context.user_keys)
    _torch_compat.restore_overrides(before, overruled)
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
