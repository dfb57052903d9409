# SPDX-License-Identifier: Apache-2.0
"""Run a function compiled and eager, side by side, and report what the compiler did."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from magi_backend import _torch_compat
from magi_backend._records.collect import Collector, collecting
from magi_backend._records.records import describe_input
from magi_backend._settings.options import read_request
from magi_backend._verify.compare import Difference, compare, compare_trees, magnitude
from magi_backend._verify.copies import InputCopies, copy_inputs
from magi_backend._verify.random import replayed_random_numbers
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

            def run(target: Callable[..., Any]) -> _Run:
                rewind()
                return _run(target, args, kwargs, modules)

            reference = run(eager)
            before, breaks = len(collector), _torch_compat.graph_breaks()
            with collecting(collector):
                first = run(compiled)
            after = _torch_compat.graph_breaks()
            new_breaks = tuple(reason for reason, count in after.items() if count > breaks.get(reason, 0))
            next_seconds = min(run(compiled).seconds for _ in range(2))
            eager_seconds = min(reference.seconds, run(eager).seconds)
        calls.append(
            CallRecord(
                inputs=tuple(
                    describe_input(leaf)
                    for leaf in pytree.tree_leaves((args, kwargs))
                    if isinstance(leaf, torch.Tensor)
                ),
                first_seconds=first.seconds,
                next_seconds=next_seconds,
                eager_seconds=eager_seconds,
                compilations=len(collector) - before,
                graph_breaks=new_breaks,
                differences=_differences(first, reference),
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


@dataclass(frozen=True)
class _Run:
    """The result of one run: outputs, arguments that were written to, and gradients by the name of what they are of."""

    outputs: Any
    written: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    seconds: float


def _run(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], modules: tuple[nn.Module, ...]
) -> _Run:
    copies = copy_inputs((args, kwargs))
    args, kwargs = copies.values
    state = [copy.deepcopy(dict(module.named_buffers())) for module in modules]
    versions = _versions(copies.values)
    start = time.perf_counter()
    try:
        outputs = target(*args, **kwargs)
        gradients = _gradients(outputs, copies, modules)
        _torch_compat.synchronize()
        seconds = time.perf_counter() - start
        outputs = pytree.tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, outputs
        )
    finally:
        with torch.no_grad():
            for module, buffers in zip(modules, state, strict=True):
                for name, buffer in module.named_buffers():
                    buffer.copy_(buffers[name])
    written = {
        name: tensor.detach()
        for name, (tensor, version) in _versions(copies.values).items()
        if version != versions[name][1]
    }
    return _Run(outputs, written, gradients, seconds)


def _versions(arguments: Any) -> dict[str, tuple[torch.Tensor, int]]:
    """Each tensor argument, and how often it was written to so far."""
    return {
        pytree.keystr(path): (leaf, _torch_compat.version(leaf))
        for path, leaf in pytree.tree_leaves_with_path(arguments)
        if isinstance(leaf, torch.Tensor)
    }


def _gradients(outputs: Any, copies: InputCopies, modules: tuple[nn.Module, ...]) -> dict[str, torch.Tensor | None]:
    roots = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    wanted: dict[str, torch.Tensor] = {
        name: p for module in modules for name, p in module.named_parameters() if p.requires_grad
    }
    for (path, _), leaf in zip(pytree.tree_leaves_with_path(copies.values), copies.leaves, strict=True):
        if leaf is not None:
            wanted[f"argument{pytree.keystr(path)}"] = leaf
    if not roots or not wanted:
        return {}
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(root.shape, generator=generator, dtype=root.dtype).to(root.device) for root in roots]
    found = torch.autograd.grad(roots, list(wanted.values()), cotangents, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _differences(actual: _Run, expected: _Run) -> tuple[Difference, ...]:
    largest = max((magnitude(g) for g in expected.gradients.values() if g is not None), default=1.0)
    return (
        *compare_trees("output", actual.outputs, expected.outputs),
        *compare_trees("argument after the call", actual.written, expected.written),
        *(
            compare(f"gradient of {name}", actual.gradients.get(name), gradient, scale=min(1.0, largest))
            for name, gradient in expected.gradients.items()
        ),
    )


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
