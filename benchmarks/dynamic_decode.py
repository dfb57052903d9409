# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 (forward does what the class says)
"""Decoders with dynamic height and width: eager, stock torch.compile and magi_passes.

    python benchmarks/dynamic_decode.py --model wan --size 540p --arms stock_dynamic,magi --out DIR
    python benchmarks/dynamic_decode.py --merge DIR

Each (model, size, arm) is one process with caches of its own, measured alone. With ``--parallel-compile`` all arms are
compiled at the same time first, and the processes that measure find warm caches; compile times are then not recorded.
``--merge`` joins the parts into results/dynamic_decode.json and .md. ``--smoke`` runs tiny models on the CPU.
A time is that of a call among enough queued ones to fill a quarter of a second, at most 20, as a decoder of many chunks
runs them: the device waits for no launch. The time of a call on an idle device stands beside it as ``alone_seconds``.

An arm ``passes:padding+temporal+layout+moments+nd2`` compiles with just those passes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _ratios import ratios
from torch import Tensor, nn
from torch.nn import functional


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


NAME = "dynamic_decode"
RESULTS = Path(__file__).parent / "results"
MODELS = ("wan", "groupnorm", "kl", "plain")
ARMS = ("eager", "stock_static", "stock_dynamic", "stock_no_coalesce", "magi", "magi_tuned")
# Latent height and width: an eighth of the image.
SIZES = {"480p": (60, 104), "540p": (68, 120), "720p": (90, 160), "1080p": (136, 240)}
SMOKE_SIZE = (6, 8)
WARM_UPS, REPEATS = 3, 15
QUEUED_SECONDS, MOST_QUEUED = 0.25, 20
Row = dict[str, Any]


class RMSNorm(nn.Module):
    """RMS norm over channels, as in WAN's decoder."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = functional.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma
        return out


class CausalConv3d(nn.Conv3d):
    """Sees two frames back and one pixel around."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(channels, out, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, (1, 1, 1, 1, 2, 0)))


class WanBlock(nn.Module):
    """RMS norm, SiLU, convolution, twice, and a shortcut."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *(RMSNorm(channels), nn.SiLU(), CausalConv3d(channels, out)),
            *(RMSNorm(out), nn.SiLU(), CausalConv3d(out, out)),
        )
        self.shortcut = nn.Conv3d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.residual(x)
        return out


class WanUpsample(nn.Module):
    """Each frame twice as large, with half the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, frames, height, width = x.shape
        images = x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width)
        images = functional.interpolate(images.float(), scale_factor=2.0, mode="nearest-exact").type_as(images)
        images = self.conv(images)
        video: Tensor = images.reshape(batch, frames, channels // 2, 2 * height, 2 * width).permute(0, 2, 1, 3, 4)
        return video


class Wan(nn.Module):
    """A causal video decoder in the style of WAN 2.1: [1, 16, 3, H, W] to [1, 3, 3, 8 H, 8 W]."""

    def __init__(self, widths: Sequence[int] = (384, 384, 192, 96), latent: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = [CausalConv3d(latent, widths[0])]
        channels = widths[0]
        for level, width in enumerate(widths):
            if level:
                layers.append(WanUpsample(channels))
                channels //= 2
            for _ in range(3):
                layers.append(WanBlock(channels, width))
                channels = width
        self.layers = nn.Sequential(*layers, RMSNorm(channels), nn.SiLU(), CausalConv3d(channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class GroupNormBlock(nn.Module):
    """GroupNorm, SiLU, convolution, twice, and a shortcut."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        parts = ((nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv3d(channels, channels, 3, padding=1)) for _ in "12")
        self.residual = nn.Sequential(*(module for part in parts for module in part))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.residual(x)
        return out


class GroupNorm(nn.Module):
    """A small video decoder with group norms: [1, 48, 7, H, W] to [1, 3, 7, 2 H, 2 W]."""

    def __init__(self, channels: int = 128, latent: int = 48, groups: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(latent, channels, 3, padding=1),
            *(GroupNormBlock(channels, groups) for _ in range(2)),
            nn.Upsample(scale_factor=(1, 2, 2), mode="nearest"),
            nn.Conv3d(channels, channels, 3, padding=1),
            *(GroupNormBlock(channels, groups) for _ in range(2)),
            *(nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv3d(channels, 3, 3, padding=1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class PlainBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Plain(nn.Module):
    """No convolution at all: 12 transformer blocks over [1, 1024, H, W]."""

    def __init__(self, width: int = 1024, heads: int = 16, depth: int = 12) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(PlainBlock(width, heads) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.blocks(x.flatten(2).transpose(1, 2))
        return tokens.transpose(1, 2).reshape(x.shape)


def build(model: str, *, smoke: bool = False) -> nn.Module:
    """One of `MODELS` with random weights; a tiny one for *smoke*."""
    if model == "wan":
        return Wan((16, 16, 8), latent=4) if smoke else Wan()
    if model == "groupnorm":
        return GroupNorm(8, latent=4, groups=4) if smoke else GroupNorm()
    if model == "plain":
        return Plain(64, heads=2, depth=1) if smoke else Plain()
    from diffusers import AutoencoderKL

    vae_class: Any = AutoencoderKL
    widths = [32, 32] if smoke else [128, 256, 512, 512]
    vae = vae_class(
        down_block_types=["DownEncoderBlock2D"] * len(widths),
        up_block_types=["UpDecoderBlock2D"] * len(widths),
        block_out_channels=widths,
        layers_per_block=1 if smoke else 2,
        latent_channels=16,
        norm_num_groups=8 if smoke else 32,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    decoder: nn.Module = vae.decoder
    return decoder


def input_shape(model: str, size: str, *, smoke: bool = False) -> tuple[int, ...]:
    """The shape of the model's input for an image *size*."""
    height, width = SMOKE_SIZE if smoke else SIZES[size]
    return {
        "wan": (1, 4 if smoke else 16, 3, height, width),
        "groupnorm": (1, 4 if smoke else 48, 3 if smoke else 7, height // 2, width // 2),
        "kl": (1, 16, height, width),
        "plain": (1, 64 if smoke else 1024, height // 2, width // 2),
    }[model]


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

    def seconds(self, run: Callable[[Tensor], Tensor], calls: int = 1) -> float:
        """Wall time of each of *calls* calls, the first of which finds an idle device."""
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            run(self.x)
        self.wait()
        return (time.perf_counter() - start) / calls

    def timed(self, run: Callable[[Tensor], Tensor]) -> tuple[list[float], list[float]]:
        """The times of calls alone, and of calls in a queue."""
        alone = [self.seconds(run) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
        calls = min(MOST_QUEUED, max(1, round(QUEUED_SECONDS / statistics.median(alone))))
        return alone, [self.seconds(run, calls) for _ in range(1 + REPEATS)][1:]


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
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run(case.x)
        case.wait()
    seconds, launches = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            kind = kind_of_kernel(event.name)
            seconds[kind] += event.device_time * 1e-6
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


def ceilings(device: str) -> dict[str, float]:
    """What the device reaches: FLOP/s of a large bf16 product, bytes/s of a large copy."""
    if device != "cuda":
        return {}
    a, big = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16), torch.empty(2**30, device=device)

    def best(run: Callable[[], object]) -> float:
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    return {"flops_per_second": 2 * 8192**3 / best(lambda: a @ a), "bytes_per_second": 2**33 / best(big.clone)}


def floor_seconds(done: dict[str, float], ceiling: dict[str, float]) -> float | None:
    """No faster: all arithmetic at the ceiling, and each operand written or read once more outside of it."""
    if not ceiling:
        return None
    return done["flops"] / ceiling["flops_per_second"] + done["bytes"] / ceiling["bytes_per_second"]


def measure(model: str, size: str, arm: str, *, smoke: bool, compile_only: bool) -> list[Row]:
    """Run one case in this process. Rows: one for the run time, one for the compile time of compiled arms."""
    case = Case(model, size, arm, smoke=smoke)
    name = f"{model}_{size}"
    base: Row = {"arm": arm, "torch": torch.__version__, "triton": triton_version(), "device": device_name(case.device)}
    rows: list[Row] = []
    with torch.no_grad():
        if arm != "eager":
            # The first compilation of a process also starts the compiler's workers.
            torch.compile(lambda x: x + 1)(torch.ones(8, device=case.device))
        run = case.compiled()
        compile_seconds = case.seconds(run)
        if compile_only:
            return []
        if arm != "eager":
            rows.append({**base, "case": f"{name}_compile", "seconds": [compile_seconds]})
        out = run(case.x)
        reference = case.model(case.x)
        error = ((out.float() - reference.float()).norm() / reference.float().norm()).item()
        del out, reference
        if case.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        alone, seconds = case.timed(run)
        peak = torch.cuda.max_memory_allocated() if case.device == "cuda" else None
        by_kind, launches = profile(case, run)
        row: Row = {**base, "case": name, "seconds": seconds, "alone_seconds": alone}
        row |= {"relative_error": error, "peak_bytes": peak}
        row |= {"seconds_by_kind": by_kind, "launches": launches, "passes": pass_lines()}
        if arm == "eager":
            done, ceiling = work(case), ceilings(case.device)
            row |= {"work": done, "ceilings": ceiling, "floor_seconds": floor_seconds(done, ceiling)}
    return [row, *rows]


def pass_lines() -> list[str]:
    """What the passes of this process reported, without those of candidates."""
    if "magi_passes" not in sys.modules:
        return []
    from magi_passes import pass_records

    return [str(record) for record in pass_records()][-3:]


def triton_version() -> str | None:
    """The version of Triton, where there is one."""
    try:
        import triton
    except ImportError:
        return None
    version: str = triton.__version__
    return version


def device_name(device: str) -> str:
    """The name of the GPU or processor."""
    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()


def child(
    model: str, size: str, arm: str, arguments: argparse.Namespace, *, compile_only: bool
) -> subprocess.Popen[str]:
    """Start the process of one case, with the caches of that case."""
    folder = Path(arguments.out) / "caches" / f"{model}_{size}_{arm}".replace(":", "_")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, __file__, "--child", model, size, arm, "--out", arguments.out]
    command += ["--smoke"] * arguments.smoke + ["--compile-only"] * compile_only
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], model: str, size: str, arm: str) -> list[Row]:
    """The rows that a process printed; a row with the reason when it failed, for example for want of memory."""
    output, _ = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("ROWS ")]
    if process.returncode == 0 and lines:
        return list(json.loads(lines[-1].removeprefix("ROWS ")))
    said = [line for line in output.splitlines() if "Error" in line] or output.splitlines() or ["no output"]
    print(output[-4000:])
    return [
        {"arm": arm, "case": f"{model}_{size}", "seconds": [], "reason": said[-1][:400], "torch": torch.__version__}
    ]


def run_all(arguments: argparse.Namespace) -> None:
    """Measure every case asked for, write one part per case, print a table."""
    cases = [(m, s, a) for m in arguments.model for s in arguments.size for a in arguments.arms]
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    if arguments.parallel_compile:
        start = time.perf_counter()
        compiling = [(case, child(*case, arguments, compile_only=True)) for case in cases if case[2] != "eager"]
        for case, process in compiling:
            output, _ = process.communicate()
            if process.returncode:
                print(*case, "did not compile:", output[-1500:])
        print(f"compiled {len(compiling)} cases in {time.perf_counter() - start:.0f} s", flush=True)
    rows: list[Row] = []
    for case in cases:
        found = finish(child(*case, arguments, compile_only=False), *case)
        if arguments.parallel_compile:
            found = [row for row in found if not row["case"].endswith("_compile")]
        commit = arguments.commit or head()
        rows += ({**row, "commit": commit} for row in found)
        part = Path(arguments.out) / f"{'_'.join(case)}.json".replace(":", "_")
        part.write_text(json.dumps([row | {"commit": commit} for row in found], indent=1))
        print(*(line for line in table(found)), sep="\n", flush=True)
    print("", *table(rows), "", json.dumps(ratios(NAME, rows), indent=1), sep="\n")


def head() -> str:
    """The commit that is checked out."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return done.stdout.strip() or "unknown"


def table(rows: Iterable[Row]) -> list[str]:
    """A Markdown table, one line per row."""
    lines = [
        "| case | arm | median ms | alone ms | compile s | triton / conv / copies ms | launches | peak GiB | error |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    rows = list(rows)
    compiled = {
        (row["case"].removesuffix("_compile"), row["arm"]): row for row in rows if row["case"].endswith("_compile")
    }
    for row in rows:
        if row["case"].endswith("_compile"):
            continue
        if not row["seconds"]:
            lines.append(f"| {row['case']} | {row['arm']} | {row['reason']} | | | | | | |")
            continue
        compile_row = compiled.get((row["case"], row["arm"]))
        kinds = [1e3 * row["seconds_by_kind"].get(kind, 0.0) for kind in ("triton", "convolution", "layout_copies")]
        times = [row["seconds"], row.get("alone_seconds")]  # rows of before 2026-11-21 are of calls alone
        cells = [
            *(row["case"], row["arm"], *(f"{1e3 * statistics.median(part):.3f}" if part else "" for part in times)),
            f"{compile_row['seconds'][0]:.1f}" if compile_row else "",
            " / ".join(f"{ms:.2f}" for ms in kinds) if row["seconds_by_kind"] else "",
            str(sum(row["launches"].values())) if row["launches"] else "",
            f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "",
            f"{row['relative_error']:.2e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
        lines += [f"|  | {line} | | | | | | | |" for line in row.get("passes", ()) if row["arm"].startswith("magi")]
    return lines


def merge(folder: Path) -> None:
    """Join the parts in *folder* and the rows already in the results; a part replaces the rows of its case and arm."""
    target = RESULTS / f"{NAME}.json"
    rows: dict[tuple[str, str, str], Row] = {}
    earlier = json.loads(target.read_text())["rows"] if target.exists() else []
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for row in (*earlier, *(row for part in parts for row in part)):
        rows[row["case"], row["arm"], row["torch"]] = row
    merged = list(rows.values())
    result = {
        "name": NAME,
        "commit": Counter(row["commit"] for row in merged).most_common(1)[0][0],
        "versions": {"torch": sorted({row["torch"] for row in merged})},
        "machine": sorted({row["device"] for row in merged if "device" in row}),
        "rows": merged,
        "ratios": ratios(NAME, merged),
    }
    RESULTS.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    lines = [f"# {NAME}", "", *table(merged), "", "| ratio | value |", "|---|---|"]
    lines += [f"| {key} | {value:.3f} |" for key, value in result["ratios"].items()]
    (RESULTS / f"{NAME}.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split = functools.partial(str.split, sep=",")
    parser.add_argument("--model", type=split, default=list(MODELS), help="comma-separated: wan, groupnorm, kl, plain")
    parser.add_argument("--size", type=split, default=["540p"], help="comma-separated: 480p, 540p, 720p, 1080p")
    parser.add_argument("--arms", type=split, default=list(ARMS), help="comma-separated")
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / NAME), help="folder for parts and caches")
    parser.add_argument("--parallel-compile", action="store_true", help="compile all arms at once first")
    parser.add_argument("--merge", metavar="DIR", help="join the parts in DIR into results/")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--commit", help="the commit to record, where there is no git")
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "SIZE", "ARM"), help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.merge:
        merge(Path(arguments.merge))
    elif arguments.child:
        rows = measure(*arguments.child, smoke=arguments.smoke, compile_only=arguments.compile_only)
        print("ROWS " + json.dumps(rows))
    else:
        run_all(arguments)


if __name__ == "__main__":
    main()
