# SPDX-License-Identifier: Apache-2.0
"""One hook at work: ask each pass, run it, compare the configuration, write the record."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from . import _torch_compat
from ._compilation import current_compilation
from ._context import PassContext, enter_context, leave_context
from ._disable import DISABLE_VARIABLE, disabled_passes, is_disabled
from ._pass import MagiInductorPass
from ._reason import Reason
from ._records import PassRecord, logger, publish, trace
from .errors import PassDefinitionError, UndeclaredConfigMutationError


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph


SUBGRAPH = Reason(False, "a subgraph: configuration holds for the whole compilation, and its outermost graph decides")
UNSCOPED = Reason(False, "Inductor was entered past its compile functions, so a configuration change would never end")


@dataclass(frozen=True)
class _Outcome:
    ran: bool
    reason: str
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)


def run_parts(
    parts: Sequence[Any], graph: Graph, context: PassContext, collectors: tuple[list[PassRecord], ...]
) -> None:
    """Run the passes and foreign hooks *parts* on *graph*, in order; publish a record of each pass to *collectors*."""
    records: list[PassRecord] = []
    try:
        for part in parts:
            if isinstance(part, MagiInductorPass):
                records.append(_ask_and_record(part, graph, context, collectors))
            elif _torch_compat.is_inference_aware(part):
                part(graph, is_inference=context.is_inference)
            else:
                part(graph)
    finally:
        trace(records)


def _ask_and_record(
    part: MagiInductorPass, graph: Graph, context: PassContext, collectors: tuple[list[PassRecord], ...]
) -> PassRecord:
    start = perf_counter()
    record = PassRecord(
        type(part).__name__, context.graph, ran=False, reason="", compile_id=context.compile_id, hook=context.hook
    )
    token = enter_context(context)
    try:
        outcome = _ask(part, graph, context)
    except Exception as error:
        outcome = _Outcome(ran=False, reason=f"raised {type(error).__name__}: {error}")
        raise
    finally:
        leave_context(token)
        record = replace(
            record,
            ran=outcome.ran,
            reason=outcome.reason,
            config_changes=outcome.changes,
            seconds=perf_counter() - start,
        )
        publish(record, collectors)
    return record


def _ask(part: MagiInductorPass, graph: Graph, context: PassContext) -> _Outcome:
    reason = _verdict(part, graph, context)
    if not reason:
        return _Outcome(ran=False, reason=reason.text)
    before = _torch_compat.read_overrides()
    try:
        part(graph)
    except BaseException:
        _torch_compat.restore_overrides(before)
        raise
    changes = _torch_compat.config_changes(before, _torch_compat.read_overrides())
    _check_declared(part, changes, before)
    overruled = sorted(changes.keys() & context.user_keys)
    _torch_compat.restore_overrides(before, overruled)
    kept = {key: change for key, change in changes.items() if key not in context.user_keys}
    return _Outcome(ran=True, reason=reason.text + "".join(f"; your {key} stays" for key in overruled), changes=kept)


def _verdict(part: MagiInductorPass, graph: Graph, context: PassContext) -> Reason:
    if is_disabled(part, disabled_passes()):
        return Reason(False, f"switched off by {DISABLE_VARIABLE}")
    if part.inductor_config_keys_potentially_mutated_by_this_pass:
        if current_compilation() is None:
            logger.log(logging.WARNING, "%s did not run: %s", type(part).__name__, UNSCOPED)
            return UNSCOPED
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


def _check_declared(part: MagiInductorPass, changes: dict[str, tuple[Any, Any]], before: dict[str, Any]) -> None:
    declared = part.inductor_config_keys_potentially_mutated_by_this_pass
    undeclared = {key: change for key, change in changes.items() if key not in declared}
    if not undeclared:
        return
    _torch_compat.restore_overrides(before)
    shown = ", ".join(f"{key!r} ({old!r} -> {new!r})" for key, (old, new) in sorted(undeclared.items()))
    msg = (
        f"{type(part).__qualname__} changed Inductor configuration that it does not declare: {shown}. "
        "Add the keys to inductor_config_keys_potentially_mutated_by_this_pass, so that they are put back when the "
        f"compilation ends. ({type(part).__module__})"
    )
    raise UndeclaredConfigMutationError(msg)
