# SPDX-License-Identifier: Apache-2.0
"""Run a function compiled and eager, side by side, and report what the compiler did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from magi_backend import _torch_compat
from magi_backend._records.collect import Collector, collecting
from magi_backend._records.records import describe_input
from magi_backend._settings.options import read_request
from magi_backend._verify.random import replayed_random_numbers
from magi_backend._verify.run import Outcome, differences, run
from magi_backend._verify.trees import leaves_of
from magi_backend.errors import OptionError, TargetTypeError

from .calls import CallRecord
from .report import Report


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def explain(
    fn: Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Callable[..., Report]:
    """Explain what ``torch.compile(fn, backend="magi")`` does with *fn*.

    Args:
        fn: A module or function; or the result of ``torch.compile(..., backend="magi")`` or ``magi_compile``, which is
            then run as it is, so that it stays compiled for the calls after.
        options: As for ``torch.compile``; with *mode*, *dynamic* and *fullgraph* only for an *fn* not compiled yet.
        mode: As for ``torch.compile``.
        dynamic: As for ``torch.compile``.
        fullgraph: As for ``torch.compile``.

    Returns:
        A function of the arguments of *fn*. Each call runs them eager and compiled, with the same random numbers and
        on copies of the tensors, so that neither the arguments nor the buffers of a module change; the first
        compilation passes by all caches, so that every pass is asked. In grad mode it differentiates the outputs too
        and compares the gradients of parameters and inputs. It returns the report of all calls so far.

    Raises:
        OptionError: *options* for a function that is compiled already, an unknown option or a wrong value. A call
            raises any error that the backend raises.
        TargetTypeError: *fn* cannot be called.

    Example:
        >>> report = explain(lambda x: (x.sin() + 1).sum())(torch.ones(8))
        >>> report.agrees
        True
    """
    _refuse_what_cannot_be_called(fn)
    _check_options(options, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
    eager, compiled = _eager_and_compiled(fn, options, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
    collector = Collector(fresh=True)
    calls: list[CallRecord] = []
    modules = _modules(eager)

    def explained(*args: Any, **kwargs: Any) -> Report:
        with replayed_random_numbers() as rewind:

            def replay(target: Callable[..., Any]) -> Outcome:
                rewind()
                return run(target, args, kwargs, modules)

            reference = replay(eager)
            before, breaks = len(collector), _torch_compat.graph_breaks()
            with collecting(collector):
                first = replay(compiled)
            after = _torch_compat.graph_breaks()
            new_breaks = tuple(reason for reason, count in after.items() if count > breaks.get(reason, 0))
            next_seconds = min(replay(compiled).seconds for _ in range(2))
            eager_seconds = min(reference.seconds, replay(eager).seconds)
        calls.append(
            CallRecord(
                inputs=tuple(
                    describe_input(leaf) for _, leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)
                ),
                first_seconds=first.seconds,
                next_seconds=next_seconds,
                eager_seconds=eager_seconds,
                compilations=len(collector) - before,
                graph_breaks=new_breaks,
                differences=differences(first, reference),
            )
        )
        return Report(_name(eager), _torch_compat.torch_text(), tuple(calls), collector.compilations())

    return explained


def _refuse_what_cannot_be_called(fn: object) -> None:
    if not callable(fn) or isinstance(fn, type):
        msg = f"explain takes a module or a function, and got {fn!r} (a {type(fn).__name__})."
        raise TargetTypeError(msg)


def _check_options(options: Mapping[str, Any] | None, *, mode: str | None, dynamic: object, fullgraph: object) -> None:
    """Refuse what ``torch.compile`` would refuse at the first call, or would take for something else."""
    if mode is not None and options:
        msg = f'explain: mode={mode!r} beside options. Give one of them; options={{"magi.mode": {mode!r}}} does both.'
        raise OptionError(msg)
    read_request(mode=mode, options=options)
    for name, value, kinds in (("dynamic", dynamic, "True, False or None"), ("fullgraph", fullgraph, "True or False")):
        if not isinstance(value, bool) and not (value is None and "None" in kinds):
            msg = f"explain: {name}={value!r} is a {type(value).__name__}; it takes {kinds}."
            raise OptionError(msg)


def _eager_and_compiled(
    fn: Callable[..., Any],
    options: Mapping[str, Any] | None,
    **keywords: Any,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    original = _torch_compat.uncompiled(fn)
    if original is None:
        return fn, torch.compile(fn, backend="magi", options=dict(options) if options else None, **keywords)
    given = [name for name, value in {"options": options, **keywords}.items() if value]
    if given:
        msg = (
            f"explain: {_name(original)} is compiled already, so {', '.join(given)} would have no effect. "
            "Give them to torch.compile, or explain the function itself."
        )
        raise OptionError(msg)
    return original, fn


def _modules(fn: object) -> tuple[nn.Module, ...]:
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return (owner,) if isinstance(owner, nn.Module) else ()


def _name(fn: object) -> str:
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        return type(owner).__qualname__
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))
