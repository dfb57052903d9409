# SPDX-License-Identifier: Apache-2.0
"""Compile a graph with each of several plans, measure them, and remember the fastest."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from magi_passes import _torch_compat
from magi_passes._framework.pipeline import PassPipeline
from magi_passes._framework.records import logger
from magi_passes._framework.scope import outside_of_current
from magi_passes._graph.sizes import hinted
from magi_passes._identity.code import digest

from .timing import seconds_of_a_call, warn_left_out


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph

    from magi_passes._framework.context import PassContext
    from magi_passes._framework.graph_pass import MagiInductorPass


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
    return Path(cache_dir) if cache_dir is not None else Path(_torch_compat.inductor_cache_dir()) / "magi_passes"


def _key(graph: Graph, context: PassContext, plans: Sequence[Plan]) -> str:
    """A digest of what the times depend on: the graph with its sizes, the device, torch, and the passes."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = [hinted(n) for n in value.shape] if isinstance(value, torch.Tensor) else ""
        dtype = value.dtype if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {shape} {dtype}")
    devices = sorted(
        {_torch_compat.device_name(x.device) for x in context.example_inputs if isinstance(x, torch.Tensor)}
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
    scratch = path.with_name(f"{path.name}.{_torch_compat.unique_suffix()}")
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
            return _torch_compat.compile_graph(module, context.example_inputs, options, context.is_backward)
    except Exception as error:  # noqa: BLE001 (a candidate that torch cannot compile is one to leave out)
        warn_left_out(name, error)
        return None
