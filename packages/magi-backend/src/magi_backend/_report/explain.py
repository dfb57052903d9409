# SPDX-License-Identifier: Apache-2.0
"""Run a function compiled and eager, side by side, and report what the compiler did."""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from magi_backend import _torch_compat
from magi_backend._records.collect import Collector, collecting
from magi_backend._records.hidden import graph_break
from magi_backend._settings.options import read_request
from magi_backend._verify.compare import leaves_of
from magi_backend._verify.run import Outcome, differences, other_layouts, replayed_random_numbers, run
from magi_backend.errors import OptionError, TargetError, TargetTypeError
from magi_backend.records import describe_input

from .report import Report
from .sections import CallRecord


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from magi_backend._verify.compare import Difference
    from magi_backend._verify.run import Replay


class OwnBackend:
    """*backend* with a separate identity, so that Dynamo does not use code that another backend compiled.

    Code that was compiled with another backend stays in Dynamo's cache, and calls with that backend still use it.
    """

    __name__ = "magi"

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.compiler_fn = backend

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        """Compile *gm*, as the backend does."""
        return self.compiler_fn(gm, example_inputs)


class CompiledAgain:
    """*original*, compiled as *how* says, from a code object that is new to Dynamo.

    Dynamo keeps compiled code with the code object of the function, and stops compiling one for which it keeps too
    much. So this compiles a copy of the function, or of the ``forward`` of a module.
    """

    def __init__(self, original: Callable[..., Any], how: _torch_compat.values.CompiledBy) -> None:
        self._forward = _own_forward(original)
        with self._with_own_forward():
            self._compiled = how.make(_own(original), OwnBackend(how.backend))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function."""
        with self._with_own_forward(), _torch_compat.values.many_recompilations():
            return self._compiled(*args, **kwargs)

    @contextlib.contextmanager
    def _with_own_forward(self) -> Iterator[None]:
        if self._forward is None:
            yield
            return
        attributes = vars(self._forward.__self__)
        attributes["forward"] = self._forward
        try:
            yield
        finally:
            del attributes["forward"]


def module_of(fn: object) -> nn.Module | None:
    """The module that *fn* is, or whose method it is."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _own_forward(original: object) -> types.MethodType | None:
    module = module_of(original)
    if module is None or "forward" in vars(module) or not isinstance(module.forward, types.MethodType):
        return None
    return types.MethodType(_copied(module.forward.__func__), module)


def _own(original: Any) -> Any:
    if isinstance(original, types.FunctionType):
        return _copied(original)
    if isinstance(original, types.MethodType) and not isinstance(original.__self__, nn.Module):
        return types.MethodType(_copied(original.__func__), original.__self__)
    return original


def _copied(fn: Any) -> Any:
    """*fn* with a copied code object if it is a function; anything else as it is."""
    if not isinstance(fn, types.FunctionType):
        return fn
    twin = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__kwdefaults__ = fn.__kwdefaults__
    twin.__qualname__, twin.__module__, twin.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
    twin.__annotations__ = fn.__annotations__
    vars(twin).update(vars(fn))
    return twin


SAME_RANDOM = (
    "It draws random numbers. They are eager's here (fallback_random), to be compared; by default they are not."
)
OTHER_RANDOM = (
    "It draws random numbers, and by default not those of eager, so its results cannot be compared. What was compared "
    "is the same function, compiled to draw eager's (fallback_random)."
)


def explain(
    fn: Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    repeats: int = 2,
) -> Callable[..., Report]:
    """Explain what ``torch.compile(fn, backend="magi")`` does with *fn*.

    Args:
        fn: A module or function; or the result of ``torch.compile(..., backend="magi")`` or ``magi_compile``, which is
            then run as it is, so that it stays compiled for later calls.
        options: As for ``torch.compile``; with *mode*, *dynamic* and *fullgraph* only for an *fn* not compiled yet.
        mode: As for ``torch.compile``.
        dynamic: As for ``torch.compile``.
        fullgraph: As for ``torch.compile``.
        repeats: How often each call runs compiled after the first time, to measure later calls. Eager runs one time
            less, but at least once. With 0, calls are only compared.

    Returns:
        A function of the arguments of *fn*. Each call runs them eager and compiled, with the same random numbers and
        on copies of the tensors, so that neither the arguments nor the buffers of a module change; the first
        compilation bypasses all caches, so that every pass is asked. In grad mode it differentiates the outputs too
        and compares the gradients of parameters and inputs. It returns the report of all calls so far.

        If *fn* uses random numbers, the code compiled here uses those of eager mode (``fallback_random``). An *fn* that
        is compiled already uses other random numbers; if its results differ, code compiled for the comparison is
        compared instead. *fn* is also compiled once more if Dynamo has compiled all of it before, because otherwise
        there would be nothing to report.

    Raises:
        OptionError: *options* for a function that is compiled already, an unknown option or a wrong value. A call
            raises any error that the backend raises.
        TargetError: *fn* was compiled by another backend.
        TargetTypeError: *fn* cannot be called.

    Example:
        >>> report = explain(lambda x: (x.sin() + 1).sum())(torch.ones(8))
        >>> report.agrees
        True
    """
    _refuse_what_cannot_be_called(fn)
    _check_options(options, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
    _check_repeats(repeats)
    target = _target(fn, options, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
    collector = Collector(fresh=True)
    calls: list[CallRecord] = []

    def explained(*args: Any, **kwargs: Any) -> Report:
        with replayed_random_numbers() as numbers:

            def replay(called: Callable[..., Any]) -> Outcome:
                numbers.rewind()
                return run(called, args, kwargs, target.modules)

            calls.append(_explained_call(target, collector, numbers, replay, (args, kwargs), repeats))
        return Report(_name(target.eager), _torch_compat.compiling.torch_text(), tuple(calls), collector.compilations())

    return explained


@dataclass(frozen=True)
class _Target:
    """The function that is explained.

    Attributes:
        eager: The function as it was written.
        given: The compiled function that is explained as it is; None for a function that is compiled here.
        again: The function compiled for the report, from a new code object.
    """

    eager: Callable[..., Any]
    given: Callable[..., Any] | None
    again: Callable[..., Any]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters and buffers the function uses."""
        owner = module_of(self.eager)
        return () if owner is None else (owner,)


def _explained_call(
    target: _Target,
    collector: Collector,
    numbers: Replay,
    replay: Callable[[Callable[..., Any]], Outcome],
    inputs: Any,
    repeats: int,
) -> CallRecord:
    """Run the target eager and compiled with the random numbers of *replay*. Returns the record of the call."""
    numbers.rewind()
    eager = [replay(target.eager)]
    draws = numbers.were_drawn()
    before, broken = len(collector), len(_torch_compat.frames.graph_breaks())
    collector.eager_random = draws and target.given is None
    compiled = target.again if target.given is None else target.given
    with collecting(collector):
        first = replay(compiled)

    def compared(outcome: Outcome) -> tuple[Difference, ...]:
        return differences(outcome, eager[0], computed_in=collector.dtypes)

    found, random, again = compared(first), "", False
    if draws:
        random = SAME_RANDOM
    if target.given is not None:
        differ = draws and not all(difference.agrees for difference in found)
        collector.eager_random, again = draws, not len(collector)
        if again or differ:
            with collecting(collector if again else Collector(fresh=True, eager_random=True)):
                other = replay(target.again)
            if draws:
                found, random = compared(other), OTHER_RANDOM
            else:
                found = compared(first)  # again, because the graphs and so their dtypes are known only now
    new_breaks = tuple(dict.fromkeys(str(graph_break(each)) for each in _torch_compat.frames.graph_breaks()[broken:]))
    later = tuple(replay(compiled).seconds for _ in range(repeats))
    eager += [replay(target.eager) for _ in range(repeats - 2)]
    return CallRecord(
        inputs=tuple(describe_input(leaf) for _, leaf in leaves_of(inputs) if isinstance(leaf, torch.Tensor)),
        first_seconds=first.seconds,
        later_seconds=later,
        eager_seconds=tuple(outcome.seconds for outcome in eager),
        compilations=len(collector) - before,
        graph_breaks=new_breaks,
        differences=found,
        layouts=other_layouts(first, eager[0]),
        random=random,
        again=again,
    )


def _refuse_what_cannot_be_called(fn: object) -> None:
    if not callable(fn) or isinstance(fn, type):
        msg = f"explain takes a module or a function, and got {fn!r} (a {type(fn).__name__})."
        raise TargetTypeError(msg)


def _check_options(options: Mapping[str, Any] | None, *, mode: str | None, dynamic: object, fullgraph: object) -> None:
    """Raise for options that ``torch.compile`` would refuse at the first call, or would misread."""
    if mode is not None and options:
        msg = (
            f"explain: mode={mode!r} together with options. Give one of them; "
            f'options={{"magi.mode": {mode!r}}} does both.'
        )
        raise OptionError(msg)
    read_request(mode=mode, options=options)
    for name, value, kinds in (("dynamic", dynamic, "True, False or None"), ("fullgraph", fullgraph, "True or False")):
        if not isinstance(value, bool) and not (value is None and "None" in kinds):
            msg = f"explain: {name}={value!r} is a {type(value).__name__}; it takes {kinds}."
            raise OptionError(msg)


def _check_repeats(repeats: object) -> None:
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 0:
        msg = f"explain: repeats={repeats!r} is not a number of calls; it takes 0, 1, 2, …"
        raise OptionError(msg)


def _target(fn: Callable[..., Any], options: Mapping[str, Any] | None, **keywords: Any) -> _Target:
    original = _torch_compat.values.uncompiled(fn)
    if original is None:
        compiled = torch.compile(fn, backend="magi", options=dict(options) if options else None, **keywords)
        return _Target(fn, None, _compiled_again(fn, compiled))
    given = [name for name, value in {"options": options, **keywords}.items() if value]
    if given:
        msg = (
            f"explain: {_name(original)} is compiled already, so {', '.join(given)} would have no effect. "
            "Give them to torch.compile, or explain the function itself."
        )
        raise OptionError(msg)
    return _Target(original, fn, _compiled_again(original, fn))


def _compiled_again(original: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """*original* compiled again as *compiled* was.

    Raises:
        TargetError: Another backend compiled it.
    """
    how = _torch_compat.values.compiled_by(compiled)
    if how is None or not _torch_compat.compiling.is_our_backend(how.backend):
        by = f"the backend {how.backend_name!r}" if how is not None else "something other than torch.compile"
        name = _name(original)
        msg = (
            f"explain: {name} was compiled by {by}, and what that did is not on record here. Explain the function "
            f'itself: explain({name}), or what torch.compile({name}, backend="magi") returns.'
        )
        raise TargetError(msg)
    return CompiledAgain(original, how)


def _name(fn: object) -> str:
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        return type(owner).__qualname__
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))
