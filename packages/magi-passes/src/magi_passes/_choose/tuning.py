# SPDX-License-Identifier: Apache-2.0
"""Candidates that are compiled and timed on inputs like the example inputs, and the choice, which is kept on disk."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from magi_passes import _torch_compat
from magi_passes._framework.pipeline import PassPipeline
from magi_passes._framework.records import logger
from magi_passes._framework.scope import outside_of_current
from magi_passes._graph.predicates import hinted
from magi_passes._identity.code import digest


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph

    from magi_passes._framework.context import PassContext
    from magi_passes._framework.graph_pass import MagiInductorPass


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Run = Callable[[list[Any]], Any]


ROUNDS = 7
QUEUED_SECONDS, MOST_QUEUED = 0.05, 20
MOST_SECONDS_WAITING = 600.0


def seconds_of_a_call(runs: dict[str, Run], examples: Sequence[Any]) -> dict[str, float]:
    """The shortest time of a call of each of *runs*, in seconds, on real arguments shaped like *examples*.

    They run in turn, each once in a round, so that a machine that slows down slows all of them. Many calls are queued
    at a time, so that the wait for a launch on an idle device does not count. A run that fails is left out, with a
    warning.
    """
    arguments = [_real(example) for example in examples]
    devices = {x.device for x in arguments if isinstance(x, torch.Tensor)}
    wait: Callable[[], object] = torch.cuda.synchronize if any(d.type == "cuda" for d in devices) else lambda: None
    best: dict[str, float] = {}
    # The first round also loads kernels; the second says how many calls fill a queue.
    calls = dict.fromkeys(runs, 1)
    with alone_on(devices):
        for turn in range(2 + ROUNDS):
            for name in list(calls):
                try:
                    seconds = _seconds(runs[name], arguments, calls[name], wait)
                except Exception as error:  # noqa: BLE001 (a candidate that does not run is one to leave out)
                    warn_left_out(name, error)
                    del calls[name]
                    best.pop(name, None)
                    continue
                if turn > 0:
                    best[name] = min(seconds, best.get(name, seconds))
                    calls[name] = min(MOST_QUEUED, max(1, round(QUEUED_SECONDS / seconds)))
    return best


@contextmanager
def alone_on(devices: Iterable[torch.device]) -> Iterator[None]:
    """A context in which no other process of the user times graphs on *devices*.

    Two ranks on one machine compile the same graph at the same time, and would slow down each other's runs at random.
    """
    folder = Path(_torch_compat.machine.shared_folder()) / "magi_passes"
    locks = [FileLock(folder / f"{name}.lock") for name in sorted(map(_torch_compat.machine.device_identity, devices))]
    held = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for lock in locks:
            lock.acquire(timeout=MOST_SECONDS_WAITING)  # its Timeout is an OSError
            held.append(lock)
    except OSError as error:
        logger.warning("tuning: other processes may measure at the same time, so times may be wrong: %s", error)
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def _real(example: Any) -> Any:
    """A value that a compiled graph can be called with, shaped like *example*."""
    if not isinstance(example, torch.Tensor):
        return hinted(example)
    shape, stride = [hinted(n) for n in example.shape], [hinted(n) for n in example.stride()]
    value = torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device)
    return value.normal_() if example.dtype.is_floating_point else value.zero_()


def _seconds(run: Run, arguments: Sequence[Any], calls: int, wait: Callable[[], object]) -> float:
    wait()
    start = perf_counter()
    for _ in range(calls):
        run(list(arguments))
    wait()
    return (perf_counter() - start) / calls


def warn_left_out(name: str, error: Exception) -> None:
    """Log a warning that the candidate *name* is left out, and why."""
    logger.warning("tuning: %s failed with %s: %s", name, type(error).__name__, error)


Plan = tuple["MagiInductorPass", ...]


@dataclass(frozen=True)
class Choice:
    """The plan that was fastest, and a sentence with the time of each."""

    passes: Plan
    text: str


def choose_fastest(graph: Graph, context: PassContext, plans: Sequence[Plan], cache_dir: str | None) -> Choice:
    """The fastest of *plans* on inputs like those of *graph*, read from disk if it was measured before.

    A plan that fails to compile or to run is left out, with a warning. If all fail, the first plan is returned. If the
    folder cannot be read or written, a warning says so, and the next process measures again.

    Args:
        graph: The graph, before any of the passes ran. It is not changed.
        context: The compilation it belongs to.
        plans: What to try; the empty plan is stock Inductor.
        cache_dir: A folder, or None for one in Inductor's cache directory.
    """
    names = [plan_name(plan) for plan in plans]
    path = _folder(cache_dir) / f"{_key(graph, context, plans)}.json"
    seconds = _recall(path)
    if not seconds:
        compiled = {name: _compiled(graph, context, name, plan) for name, plan in zip(names, plans, strict=True)}
        runs = {name: run for name, run in compiled.items() if run is not None}
        seconds = seconds_of_a_call(runs, context.example_inputs)
        _remember(path, seconds)
    best = min(names, key=lambda name: seconds.get(name, float("inf")))
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3f} ms" for name in names if name in seconds)
    return Choice(plans[names.index(best)], f"tuned: {best} ({times})")


def plan_name(plan: Plan) -> str:
    """*plan* in words: ``ConvPadding + TemporalConv + NDTilingWorkaround 2``, or ``stock`` when it is empty."""
    tiles = (f"{type(part).__name__.removesuffix('Pass')} {getattr(part, 'max_tiles', '')}".strip() for part in plan)
    return " + ".join(tiles) or "stock"


def _folder(cache_dir: str | None) -> Path:
    return (
        Path(cache_dir) if cache_dir is not None else Path(_torch_compat.machine.inductor_cache_dir()) / "magi_passes"
    )


def _key(graph: Graph, context: PassContext, plans: Sequence[Plan]) -> str:
    """A digest of what the times depend on: the graph with its sizes, the device, torch, and the passes."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = [hinted(n) for n in value.shape] if isinstance(value, torch.Tensor) else ""
        dtype = value.dtype if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {shape} {dtype}")
    devices = sorted(
        {_torch_compat.machine.device_name(x.device) for x in context.example_inputs if isinstance(x, torch.Tensor)}
    )
    uuids = [part.uuid() for plan in plans for part in (*plan,)]
    return digest("\n".join(lines), *devices, context.torch_version, str(context.is_backward), *uuids)


def _recall(path: Path) -> dict[str, float]:
    """The times in the file at *path*, by plan; empty if there is no file, or it cannot be read."""
    try:
        return {str(name): float(seconds) for name, seconds in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("tuning: %s cannot be read, and the plans are measured again: %s", path, error)
        return {}


def _remember(path: Path, seconds: dict[str, float]) -> None:
    # Several processes may tune the same graph; a reader must never see half a file.
    scratch = path.with_name(f"{path.name}.{_torch_compat.machine.unique_suffix()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.write_text(json.dumps(seconds, indent=1))
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("tuning: the choice is not remembered, and the next process measures again: %s", error)


def _compiled(graph: Graph, context: PassContext, name: str, plan: Plan) -> Callable[[list[Any]], Any] | None:
    assert graph.owning_module is not None
    module = copy.deepcopy(graph.owning_module)
    options = PassPipeline(plan).inductor_options()
    try:
        with outside_of_current():
            return _torch_compat.compiling.compile_graph(module, context.example_inputs, options, context.is_backward)
    except Exception as error:  # noqa: BLE001 (a candidate that torch cannot compile is one to leave out)
        warn_left_out(name, error)
        return None
