# SPDX-License-Identifier: Apache-2.0
"""Which of the passes for convolutions a graph gets: by a cost model, or by trying them.

The cost model asks three questions of the graph, with the sizes of the example inputs:

1. Are convolutions three eighths of its arithmetic (`conv_share`)? If not, the graph stays as it is. The half of
   SDXL's UNet that goes down has 40%, beside its transformers: channels-first, 13 of its convolutions copied what they
   read and wrote, 0.5 ms of 34 (one H200, torch 2.11). Less was not tried: wav2vec 2.0 has 36%, of one dimension.
2. Are most of those convolutions 3D with few taps, in half precision on CUDA (`TemporalConvPass`)? Then they become 2D,
   and channels-last is forced, because their inputs are written that way.
3. Otherwise, is channels-last expected to be faster (`ConvLayoutPass`)?

Padding, group norms and convolutions with few output channels are rewritten in addition to either, because that removes
work and adds none. A graph on a GPU that is changed by any of them also gets tilings of up to three dimensions. The
rewrites leave kernels that read one layout and write another, and with one dimension each load of such a kernel touches
a different memory sector. The decoder of WAN 2.1 takes 403 ms with one dimension and 261 ms with three (one H200, torch
2.11). Tilings of two dimensions made another model slower, at 0.7 times its speed, so only tuning tries them.

Tuning compiles the graph with each of several plans, times them in turn on inputs like the example inputs, and keeps
the times on disk. The plan of the cost model comes first and stock second, so that a budget of seconds which ends early
leaves the choice between these two.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
from filelock import FileLock
from torch.fx import Graph

from . import _torch_compat
from ._framework.compilation import PassContext, Reason, current_context, logger
from ._framework.declared import is_disabled
from ._framework.graph_pass import CheckedPass, MagiInductorPass, outside_of_current
from ._framework.pipeline import PassPipeline
from ._graph.nodes import conv_share, convolutions_of, flops, has_collectives, hinted, is_dynamic
from ._identity.code import digest
from ._rewrites.code_generation import ConvLayoutPass, NDTilingWorkaroundPass
from ._rewrites.few_channels import FewOutputChannelsPass
from ._rewrites.moments import ChannelMomentsPass
from ._rewrites.padding import ConvPaddingPass
from ._rewrites.temporal import TemporalConvPass, is_temporal


Run = Callable[[list[Any]], Any]
Plan = tuple[MagiInductorPass, ...]


@dataclass(frozen=True)
class ForceChannelsLastPass(ConvLayoutPass):
    """Channels-last for every 2D convolution, without a cost model, because `TemporalConvPass` needs it."""

    hook: ClassVar[str] = "post_grad_custom_pre_pass"

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies unless the user switched the layout off."""
        return Reason(bool(context.config["layout_optimization"]), "channels-last")


@dataclass(frozen=True)
class ConvChooser(CheckedPass):
    """Choose among stock, channels-last, ND tiling, temporal convolutions as 2D, and their combinations.

    Example:
        >>> from magi_passes import ConvChooser, PassPipeline
        >>> options = PassPipeline([ConvChooser()]).inductor_options()

    Attributes:
        tune: Compile the candidates, measure each on inputs like the example inputs, and keep the fastest, stock among
            them. The choice is remembered on disk per graph, device and torch release. A graph with collectives is
            not tuned, but gets the choice of the cost model.
        cache_dir: Where choices are remembered; None is a folder in Inductor's cache directory.
        temporal: Whether `TemporalConvPass` may be chosen.
        layout: Whether channels-last may be chosen.
        nd_tiling: Whether ND tiling may be chosen.
        max_tiles: The most tile dimensions that may be chosen, 2 or 3.
        min_share: The share of arithmetic in convolutions below which a graph is left alone.
        tune_seconds: How long tuning may take for each graph, in seconds; None sets no end. A candidate is not tried if
            it would end too late when it compiles as long as the slowest before it. The plan of the cost model is
            always tried, however long it takes, and all that were compiled are called at least twice.
    """

    hook: ClassVar[str] = "post_grad_custom_pre_pass"
    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = (
        *NDTilingWorkaroundPass.inductor_config_keys_potentially_mutated_by_this_pass,
        *ConvLayoutPass.inductor_config_keys_potentially_mutated_by_this_pass,
    )

    tune: bool = False
    cache_dir: str | None = None
    temporal: bool = True
    layout: bool = True
    nd_tiling: bool = True
    max_tiles: int = 3
    min_share: float = 0.375
    tune_seconds: float | None = None

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies if convolutions are enough of the work, and some passes are expected, or measured, to pay."""
        share = conv_share(graph).flops
        if share < self.min_share:
            return Reason(False, f"{share:.0%} of the arithmetic is in convolutions")
        if self._is_tuned(graph):
            plan, text = self._tuned(graph, context)
            return Reason(bool(plan), text)
        plan = self._planned(graph, context)
        names = " + ".join(type(part).__name__ for part in plan) or "nothing to gain"
        not_tuned = "; not tuned, because the graph has collectives" if self.tune else ""
        return Reason(bool(plan), f"{share:.0%} of the arithmetic is in convolutions: {names}{not_tuned}")

    def __call__(self, graph: Graph) -> None:
        """Run the chosen passes in order, each if it applies to the graph that the earlier ones returned."""
        context = current_context() or PassContext()
        plan = self._tuned(graph, context)[0] if self._is_tuned(graph) else self._planned(graph, context)
        for part in plan:
            if part.is_applicable(graph, context):
                part(graph)

    def _is_tuned(self, graph: Graph) -> bool:
        # Processes that time a candidate a different number of times would wait for each other without end.
        return self.tune and not has_collectives(graph)

    def _planned(self, graph: Graph, context: PassContext) -> Plan:
        convolutions = convolutions_of(graph)
        over_time = sum(flops(conv.node) for conv in convolutions if is_temporal(conv))
        mostly_temporal = over_time > 0.5 * sum(flops(conv.node) for conv in convolutions)
        if self.temporal and mostly_temporal and TemporalConvPass().is_applicable(graph, context):
            wanted: Sequence[MagiInductorPass] = (*_rewrites(), TemporalConvPass(), ForceChannelsLastPass())
        elif self.layout and ConvLayoutPass().is_applicable(graph, context):
            wanted = (*_rewrites(), ConvLayoutPass())
        else:
            wanted = _rewrites()
        plan = [part for part in wanted if self._may(part) and part.is_applicable(graph, context)]
        on_gpu = any(conv.x.meta["val"].device.type != "cpu" for conv in convolutions)
        # Before the release that the pass knows, Inductor itself proposed no tilings for symbolic sizes.
        newest = None if plan and on_gpu else NDTilingWorkaroundPass.max_torch
        tiling = NDTilingWorkaroundPass(newest, self.max_tiles, static=bool(plan))
        return (*plan, *(part for part in (tiling,) if self._may(part) and part.is_applicable(graph, context)))

    def _may(self, part: MagiInductorPass) -> bool:
        allowed = {
            TemporalConvPass: self.temporal,
            ConvLayoutPass: self.layout,
            ForceChannelsLastPass: self.layout,
            NDTilingWorkaroundPass: self.nd_tiling,
        }
        return allowed.get(type(part), True) and not is_disabled(part)

    def _tuned(self, graph: Graph, context: PassContext) -> tuple[Plan, str]:
        candidates = [tuple(part for part in plan if self._may(part)) for plan in self._candidates(graph, context)]
        return choose_fastest(graph, context, list(dict.fromkeys(candidates)), self.cache_dir, self.tune_seconds)

    def _candidates(self, graph: Graph, context: PassContext) -> list[Plan]:
        """The plans to try: what the cost model would choose, stock, and each layout with each tiling."""
        tilings: list[Plan] = [()]
        # The tiling keys affect Triton code only.
        on_gpu = any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in context.example_inputs)
        if is_dynamic(graph) and on_gpu:
            tilings += [(NDTilingWorkaroundPass(None, tiles),) for tiles in range(2, self.max_tiles + 1)]
        bases: list[Plan] = [(), (*_rewrites(), ForceChannelsLastPass())]
        if TemporalConvPass().is_applicable(graph, context):
            bases.append((*_rewrites(), TemporalConvPass(), ForceChannelsLastPass()))
        return [self._planned(graph, context), (), *((*base, *tiling) for base in bases for tiling in tilings)]


def _rewrites() -> Plan:
    """The rewrites that every plan begins with."""
    return (ConvPaddingPass(), FewOutputChannelsPass(), ChannelMomentsPass())


ROUNDS = 7
QUEUED_SECONDS, MOST_QUEUED = 0.05, 20
MOST_SECONDS_WAITING = 600.0


def seconds_of_a_call(runs: dict[str, Run], examples: Sequence[Any], deadline: float = math.inf) -> dict[str, float]:
    """The shortest time of a call of each of *runs*, in seconds, on real arguments shaped like *examples*.

    They run in turn, each once in a round, so that a machine that slows down slows all of them. Many calls are queued
    at a time, so that the wait for a launch on an idle device does not count. A run that fails is left out, with a
    warning. After the second round none begins behind *deadline*, a time of `perf_counter`.
    """
    arguments = [_real(example) for example in examples]
    devices = {x.device for x in arguments if isinstance(x, torch.Tensor)}
    wait: Callable[[], object] = torch.cuda.synchronize if any(d.type == "cuda" for d in devices) else lambda: None
    best: dict[str, float] = {}
    # The first round also loads kernels; the second says how many calls fill a queue.
    calls = dict.fromkeys(runs, 1)
    with alone_on(devices):
        for turn in range(2 + ROUNDS):
            if turn > 1 and perf_counter() > deadline:
                break
            for name in list(calls):
                try:
                    wait()
                    start = perf_counter()
                    for _ in range(calls[name]):
                        runs[name](list(arguments))
                    wait()
                    seconds = (perf_counter() - start) / calls[name]
                except Exception as error:  # noqa: BLE001 (a candidate that does not run is one to leave out)
                    warn_left_out(name, error)
                    del calls[name]
                    best.pop(name, None)
                    continue
                if turn > 0:
                    best[name] = min(seconds, best.get(name, seconds))
                    calls[name] = min(MOST_QUEUED, max(1, round(QUEUED_SECONDS / seconds)))
    return best


@contextlib.contextmanager
def alone_on(devices: Iterable[torch.device]) -> Iterator[None]:
    """A context in which no other process of the user times graphs on *devices*.

    Two ranks on one machine compile the same graph at the same time, and would slow down each other's runs at random.
    """
    folder = Path(_torch_compat.config.shared_folder()) / "magi_passes"
    locks = [FileLock(folder / f"{name}.lock") for name in sorted(map(_torch_compat.config.device_identity, devices))]
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for lock in locks:
                lock.acquire(timeout=MOST_SECONDS_WAITING)  # its Timeout is an OSError
                held.callback(lock.release)
        except OSError as error:
            logger.warning("tuning: other processes may measure at the same time, so times may be wrong: %s", error)
        yield


def _real(example: Any) -> Any:
    """A value that a compiled graph can be called with, shaped like *example*."""
    if not isinstance(example, torch.Tensor):
        return hinted(example)
    shape, stride = [hinted(n) for n in example.shape], [hinted(n) for n in example.stride()]
    value = torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device)
    return value.normal_() if example.dtype.is_floating_point else value.zero_()


def warn_left_out(name: str, error: Exception) -> None:
    """Log a warning that the candidate *name* is left out, and why."""
    logger.warning("tuning: %s failed with %s: %s", name, type(error).__name__, error)


def choose_fastest(
    graph: Graph, context: PassContext, plans: Sequence[Plan], cache_dir: str | None, budget: float | None = None
) -> tuple[Plan, str]:
    """The fastest of *plans* on inputs like those of *graph*, from disk if it was measured before, and each time.

    The empty plan is stock Inductor. A plan that fails to compile or to run is left out, with a warning. If all fail,
    it is stock. Plans for which *budget* seconds leave no time are not tried. If the folder cannot be read or written,
    a warning says so, and the next process measures again.
    """
    names = [plan_name(plan) for plan in plans]
    folder = Path(_torch_compat.config.inductor_cache_dir(), "magi_passes") if cache_dir is None else Path(cache_dir)
    path = folder / f"{_key(graph, context, plans, budget)}.json"
    seconds = _recall(path)
    if not seconds:
        deadline = math.inf if budget is None else perf_counter() + budget
        runs = _compiled_until(deadline, graph, context, dict(zip(names, plans, strict=True)))
        seconds = seconds_of_a_call(runs, context.example_inputs, deadline)
        _remember(path, seconds)
    measured = [name for name in names if name in seconds]
    if not measured:
        return (), "tuned: stock, because no candidate could be measured"
    best = min(measured, key=seconds.__getitem__)
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3f} ms" for name in measured)
    within = "" if budget is None else f" within {budget:g} s"
    missing = ", ".join(name for name in names if name not in seconds)
    left_out = f"; not measured{within}: {missing}" if missing else ""
    return plans[names.index(best)], f"tuned: {best} ({times}){left_out}"


def _compiled_until(deadline: float, graph: Graph, context: PassContext, plans: Mapping[str, Plan]) -> dict[str, Run]:
    """Those of *plans* that compile, as long as each can be expected to before *deadline*; the first in any case."""
    runs: dict[str, Run] = {}
    now, longest = perf_counter(), 0.0
    for turn, (name, plan) in enumerate(plans.items()):
        if turn > 0 and now + longest > deadline:
            break
        if (run := _compiled(graph, context, name, plan)) is not None:
            runs[name] = run
        before, now = now, perf_counter()
        longest = max(longest, now - before)
    return runs


def plan_name(plan: Plan) -> str:
    """*plan* in words: ``ConvPadding + TemporalConv + NDTilingWorkaround 2``, or ``stock`` when it is empty."""
    tiles = (f"{type(part).__name__.removesuffix('Pass')} {getattr(part, 'max_tiles', '')}".strip() for part in plan)
    return " + ".join(tiles) or "stock"


def _key(graph: Graph, context: PassContext, plans: Sequence[Plan], budget: float | None) -> str:
    """A digest of what the times depend on: the graph with its sizes, the device, torch, the passes and the budget."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = [hinted(n) for n in value.shape] if isinstance(value, torch.Tensor) else ""
        dtype = value.dtype if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {shape} {dtype}")
    devices = {x.device for x in context.example_inputs if isinstance(x, torch.Tensor)}
    names = {torch.cuda.get_device_name(one) if one.type == "cuda" else one.type for one in devices}
    uuids = [part.uuid() for plan in plans for part in plan]
    return digest(
        "\n".join(lines), *sorted(names), context.torch_version, str(context.is_backward), str(budget), *uuids
    )


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
    scratch = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
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
