# SPDX-License-Identifier: Apache-2.0
"""One case of dynamic_decode in this process: compiled under an arm, compared with eager, timed, profiled."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from _ceilings import measure_ceilings
from _decoders import build, input_shape
from _kernels import kernels_of
from _results import device_name, version_of
from torch import Tensor


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


ARMS = ("eager", "stock_static", "stock_dynamic", "stock_no_coalesce", "magi", "magi_tuned")
WARM_UPS, REPEATS = 2, 9
QUEUED_SECONDS, MOST_QUEUED = 0.25, 20
READY, REPEAT = "READY", "repeat"
Row = dict[str, Any]


def pass_options(arm: str) -> dict[str, Any] | None:
    """The Inductor options of *arm*; None for arms that are not compiled."""
    if arm == "eager":
        return None
    if arm in ("stock_static", "stock_dynamic"):
        return {}
    if arm == "stock_no_coalesce":
        return {"triton.coalesce_tiling_analysis": False}
    import magi_passes as mp

    if arm in ("magi", "magi_tuned"):
        return mp.PassPipeline([mp.ConvChooser(tune=arm == "magi_tuned")]).inductor_options()
    by_name: dict[str, Callable[[], mp.MagiInductorPass]] = {
        "padding": mp.ConvPaddingPass,
        "temporal": mp.TemporalConvPass,
        "temporal_all_frames": lambda: mp.TemporalConvPass(min_skipped=2.0),
        "layout": mp.ConvLayoutPass,
        "moments": mp.ChannelMomentsPass,
        "nd2": lambda: mp.NDTilingWorkaroundPass(None, 2),
        "nd3": lambda: mp.NDTilingWorkaroundPass(None, 3),
    }
    names = arm.removeprefix("passes:").split("+")
    return mp.PassPipeline([by_name[name]() for name in names]).inductor_options()


class Case:
    """One model at one size under one arm, on the GPU or for a smoke run on the CPU."""

    def __init__(self, model: str, size: str, arm: str, *, smoke: bool) -> None:
        self.arm, self.device = arm, "cpu" if smoke else "cuda"
        self.dtype = torch.float32 if smoke else torch.bfloat16
        torch.manual_seed(0)
        self.model = build(model, smoke=smoke).eval().to(self.device, self.dtype).requires_grad_(False)
        self.x = torch.randn(input_shape(model, size, smoke=smoke), device=self.device).to(self.dtype)

    def compiled(self) -> Callable[[Tensor], Tensor]:
        """The model as the arm runs it; compiled on its first call."""
        options = pass_options(self.arm)
        if options is None:
            return self.model
        is_static = self.arm == "stock_static"
        if not is_static:
            dims = [self.x.dim() - 2, self.x.dim() - 1]
            torch._dynamo.mark_dynamic(self.x, dims)  # noqa: SLF001 (documented, see torch.compile's dynamic shapes)
        compiled: Any = torch.compile(self.model, dynamic=False if is_static else None, options=options or None)
        return compiled  # type: ignore[no-any-return]

    def wait(self) -> None:
        """Until the GPU has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def make_room(self) -> None:
        """Give cached memory back, and count its peak anew."""
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, run: Callable[[Tensor], Tensor], calls: int = 1) -> float:
        """Wall time of each of *calls* calls, the first of which finds an idle device."""
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            run(self.x)
        self.wait()
        return (time.perf_counter() - start) / calls

    def calls_in_a_queue(self, seconds_alone: float) -> int:
        """Enough calls that waiting for the first launch does not count."""
        return min(MOST_QUEUED, max(1, round(QUEUED_SECONDS / seconds_alone)))


def kind_of_kernel(name: str) -> str:
    """What a GPU kernel is, by its name."""
    lowered = name.lower()
    if lowered.startswith("triton_"):
        return "triton"
    if any(part in lowered for part in ("nchwtonhwc", "nhwctonchw", "nchw2nhwc", "nhwc2nchw", "tensortransform")):
        return "layout_copies"
    if any(part in lowered for part in ("conv", "fprop", "implicit", "winograd")):
        return "convolution"
    if any(part in lowered for part in ("gemm", "cutlass", "matmul", "nvjet", "flash", "fmha", "attention")):
        return "matrix"
    return "other"


def profile(case: Case, run: Callable[[Tensor], Tensor]) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds and launches of one call, by kind of kernel."""
    if case.device != "cuda":
        return {}, {}
    seconds, launches = Counter[str](), Counter[str]()
    for kernel in kernels_of(lambda: run(case.x)):
        kind = kind_of_kernel(kernel.name)
        seconds[kind] += kernel.device_time * 1e-6
        launches[kind] += 1
    return dict(seconds), dict(launches)


def work(case: Case) -> dict[str, float]:
    """FLOPs of one call, and the bytes that convolutions and matrix products read and write."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    traffic = [0]

    class Bytes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if any(part in str(func) for part in ("conv", "aten.mm", "aten.addmm", "aten.bmm")):
                tensors = [value for value in (*args, out) if isinstance(value, Tensor)]
                traffic[0] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            return out

    recorder: Any = Bytes
    with FlopCounterMode(display=False) as counter, recorder():
        case.model(case.x)
    return {"flops": float(counter.get_total_flops()), "bytes": float(traffic[0])}


def measure(model: str, size: str, arm: str, *, smoke: bool, beside: int) -> list[Row]:
    """Run one case in this process. Rows: one for the run time, one for the compile time of compiled arms."""
    case = Case(model, size, arm, smoke=smoke)
    name = f"{model}_{size}"
    base: Row = {"arm": arm, "torch": torch.__version__, "triton": version_of("triton"), "device": device_name()}
    rows: list[Row] = []
    with torch.no_grad():
        run = case.compiled()
        if arm != "eager":
            # The first compilation of a process also starts the compiler's workers.
            torch.compile(lambda x: x + 1)(torch.ones(8, device=case.device))
            compile_case = f"{name}_compile_together" if beside else f"{name}_compile"
            row: Row = {**base, "case": compile_case, "seconds": [case.seconds(run)], "compiled_beside": beside}
            rows.append(row)
        case.make_room()
        # Nothing else may compile or run while this process measures: the parent says when.
        commands = ready_for_commands()
        next(commands)
        stay_on_one_core()
        out = run(case.x)
        reference = case.model(case.x)
        error = ((out.float() - reference.float()).norm() / reference.float().norm()).item()
        del out, reference
        case.make_room()
        alone = [case.seconds(run) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
        calls = case.calls_in_a_queue(statistics.median(alone))
        case.seconds(run, calls)
        seconds = [case.seconds(run, calls) for _ in commands]
        peak = torch.cuda.max_memory_allocated() if case.device == "cuda" else None
        by_kind, launches = profile(case, run)
        row = {**base, "case": name, "seconds": seconds, "alone_seconds": alone}
        row |= {"relative_error": error, "peak_bytes": peak}
        row |= {"seconds_by_kind": by_kind, "launches": launches, "passes": pass_lines()}
        if arm == "eager":
            row["work"] = done = work(case)
            if case.device == "cuda":
                ceilings = measure_ceilings()
                row |= {
                    "ceilings": asdict(ceilings),
                    "floor_seconds": ceilings.floor_seconds(done["flops"], done["bytes"]),
                }
    return [row, *rows]


def stay_on_one_core() -> None:
    """Run this thread on the last of its cores, as the other arms do.

    Launch-bound arms with the same kernels have differed by half on different cores, now one ahead and now the other.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def ready_for_commands() -> Iterator[str]:
    """The parent's commands to repeat; before each this process says that it waits."""
    print(READY, flush=True)
    for line in sys.stdin:
        if line.strip() != REPEAT:
            break
        yield line
        print(READY, flush=True)


def pass_lines() -> list[str]:
    """What ConvChooser reported in this process, or the last passes of an arm without it."""
    if "magi_passes" not in sys.modules:
        return []
    from magi_passes import pass_records

    lines = [str(record) for record in pass_records()]
    # A tuned choice leaves the records of its candidates' passes too.
    return ([line for line in lines if line.startswith("ConvChooser ")] or lines)[-3:]
