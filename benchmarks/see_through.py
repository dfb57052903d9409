# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What see-through is worth: a 32-layer stack with two Triton ops a layer, registered in five ways.

    python benchmarks/see_through.py            # on a machine with a CUDA GPU; writes results/see_through.{json,md}
    python benchmarks/see_through.py --check    # tiny, any machine (TRITON_INTERPRET=1 without a GPU); writes nothing

A layer is RMSNorm, a linear to twice the width, SiLU times gate, a linear back, and the residual. All arms share the
kernels and the compiler, `torch.compile` with Inductor, no CUDA graphs; they differ in how the two ops are registered:

- `hand`            `torch.library.triton_op`, every launch written with `wrap_triton`
- `see_through`     `magi_tritonwrap.triton_op`, plain launches behind a helper
- `epilogue`        the same under `backend="magi"`, which fuses pointwise work into user kernels (torch >= 2.12)
- `opaque`          `torch.library.custom_op` with hand-written fakes
- `opaque_opschema` `magi_opschema.magi_register_custom_op`, opaque too; published without a bar
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import magi_opschema
import magi_tritonwrap
import torch
import triton
import triton.language as tl
from _ceilings import measure_ceilings
from _results import measure_paired, rows_of, rows_written, write
from torch import Tensor, nn
from torch.library import wrap_triton


EPS = 1e-6
CAP = 30.0


@triton.jit
def rms_norm_kernel(x, weight, out, width, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise one row by its root mean square."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + EPS)
    normed = values * scale * tl.load(weight + at, inside).to(tl.float32)
    tl.store(out + row * width + at, normed.to(out.dtype.element_ty), inside)


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """Gate one row: SiLU of its first half times its second."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, inside).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)


def launch_rows(kernel: object, rows: int, width: int, *arguments: object, **constants: object) -> None:
    """Launch one program a row; the helper that hides the kernels from a reader of the ops."""
    kernel[(rows,)](*arguments, width, BLOCK=triton.next_power_of_2(width), num_warps=4, **constants)  # type: ignore[index]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over rows, plain launch."""
    out = torch.empty_like(x)
    launch_rows(rms_norm_kernel, x.shape[0], x.shape[1], x, weight, out, EPS=EPS)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU times gate, plain launch."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    launch_rows(silu_mul_kernel, out.shape[0], out.shape[1], gate_up, out)
    return out


def rms_norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm with the launch wrapped by hand."""
    out = torch.empty_like(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    wrap_triton(rms_norm_kernel)[(rows,)](x, weight, out, width, EPS=EPS, BLOCK=block, num_warps=4)
    return out


def silu_mul_by_hand(gate_up: Tensor) -> Tensor:
    """SiLU times gate with the launch wrapped by hand."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    rows, width = out.shape
    wrap_triton(silu_mul_kernel)[(rows,)](gate_up, out, width, BLOCK=triton.next_power_of_2(width), num_warps=4)
    return out


def rms_norm_fake(x: Tensor, _weight: Tensor) -> Tensor:
    """What RMSNorm returns, for the compiler."""
    return torch.empty_like(x)


def silu_mul_fake(gate_up: Tensor) -> Tensor:
    """What SiLU times gate returns, for the compiler."""
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@dataclass(frozen=True)
class Ops:
    """The two ops of a layer, registered in one way."""

    norm: Callable[[Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]


def registered() -> dict[str, Ops]:
    """The ops of each arm."""
    opaque = Ops(
        torch.library.custom_op("see_through_opaque::norm", rms_norm, mutates_args=()),
        torch.library.custom_op("see_through_opaque::silu_mul", silu_mul, mutates_args=()),
    )
    opaque.norm.register_fake(rms_norm_fake)  # type: ignore[attr-defined]
    opaque.silu_mul.register_fake(silu_mul_fake)  # type: ignore[attr-defined]
    register = magi_opschema.magi_register_custom_op
    return {
        "hand": Ops(
            torch.library.triton_op("see_through_hand::norm", rms_norm_by_hand, mutates_args=()),
            torch.library.triton_op("see_through_hand::silu_mul", silu_mul_by_hand, mutates_args=()),
        ),
        "see_through": Ops(
            magi_tritonwrap.triton_op("see_through::norm", rms_norm, mutates_args=()),
            magi_tritonwrap.triton_op("see_through::silu_mul", silu_mul, mutates_args=()),
        ),
        "opaque": opaque,
        "opaque_opschema": Ops(
            register("see_through_opschema::norm", infer_output_meta_fn=rms_norm_fake)(rms_norm),
            register("see_through_opschema::silu_mul", infer_output_meta_fn=silu_mul_fake)(silu_mul),
        ),
    }


@dataclass(frozen=True)
class Case:
    """One size of the stack, and how often it runs between two readings of the clock."""

    name: str
    tokens: int
    width: int
    layers: int
    capped: bool
    calls: int
    repeats: int

    @property
    def flops(self) -> int:
        """Of the linears, up to twice the width and down again."""
        return 6 * self.layers * self.tokens * self.width**2

    @property
    def bytes(self) -> int:
        """What the linears read and write, weights once a call, in bfloat16."""
        return 2 * self.layers * (3 * self.width**2 + 5 * self.tokens * self.width)


CASES = (
    Case("launch_bound", tokens=1, width=1024, layers=32, capped=False, calls=50, repeats=21),
    Case("large", tokens=8192, width=4096, layers=32, capped=False, calls=2, repeats=9),
    Case("capped", tokens=1, width=1024, layers=32, capped=True, calls=50, repeats=21),
)
CHECK = (Case("check", tokens=2, width=64, layers=2, capped=True, calls=1, repeats=1),)


class Layer(nn.Module):
    """RMSNorm, SiLU times gate between two linears, residual; capped layers have pointwise work after the norm.

    It reads nothing but what the norm wrote: that is what Inductor can put into the norm's kernel
    (``can_fuse`` in torch/_inductor/scheduler.py, 2.12 to 2.15).
    """

    def __init__(self, ops: Ops, width: int, *, capped: bool) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)
        self.capped = capped

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        normed = self.ops.norm(x, self.weight)
        if self.capped:
            normed = CAP * torch.tanh(normed / CAP)
        hidden: Tensor = x + self.down(self.ops.silu_mul(self.up(normed)))
        return hidden


def stack(ops: Ops, case: Case, device: str, dtype: torch.dtype) -> nn.Module:
    """The model of one arm; the seed is the same for all."""
    torch.manual_seed(0)
    layers = (Layer(ops, case.width, capped=case.capped) for _ in range(case.layers))
    with torch.device(device):
        return nn.Sequential(*layers).to(dtype).eval()


def compiled(model: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    """The model under `torch.compile`."""
    return torch.compile(model, fullgraph=True, dynamic=False, backend=backend)


def has_epilogue_fusion() -> bool:
    """Whether this torch can fuse pointwise work into user kernels."""
    from torch._inductor import config

    return hasattr(config, "epilogue_fusion_user_defined_triton_kernel")


def backends_of_arms(device: str) -> dict[str, str]:
    """The arms that this machine and this torch can run, and the backend of each."""
    backends = dict.fromkeys(registered_once(), "inductor")
    if has_epilogue_fusion():
        backends["epilogue"] = "magi"
    if device == "cpu":
        del backends["hand"]  # torch's own triton_op cannot be traced under Triton's interpreter
    return backends


def arms(case: Case, device: str, dtype: torch.dtype, only: str = "") -> dict[str, Callable[[Tensor], Tensor]]:
    """Every arm compiled, or one of them, and checked against the opaque one in eager."""
    torch.compiler.reset()
    ops = registered_once()
    backends = {name: backend for name, backend in backends_of_arms(device).items() if only in {"", name}}
    x = torch.randn(case.tokens, case.width, device=device, dtype=dtype)
    expected = stack(ops["opaque"], case, device, dtype)(x)
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, backend in backends.items():
        found[name] = compiled(stack(ops["see_through" if name == "epilogue" else name], case, device, dtype), backend)
        error = ((found[name](x) - expected).float().norm() / expected.float().norm()).item()
        # Rounding of bf16 over 32 layers; another function of x would be off by the size of x.
        assert error < 2e-2, f"{case.name}, {name}: off by {error:.1e}"
    return found


def compile_in_parallel(cases: Sequence[Case], device: str) -> None:
    """Fill Inductor's cache, each arm of each case in a process of its own; nothing is measured here."""
    commands = [
        [sys.executable, __file__, "--compile", case.name, arm] for case in cases for arm in backends_of_arms(device)
    ]
    processes = [subprocess.Popen(command) for command in commands]
    for command, process in zip(commands, processes, strict=True):
        if process.wait() != 0:
            raise RuntimeError(f"{' '.join(command)} failed")


_REGISTERED: dict[str, Ops] = {}


def registered_once() -> dict[str, Ops]:
    """The ops; torch takes each name once a process."""
    if not _REGISTERED:
        _REGISTERED.update(registered())
    return _REGISTERED


def kernels_of(call: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """How many kernels of the GPU one call runs."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call(x)
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events() or ())


def check_fusion(case: Case, found: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> None:
    """Refuse to time an arm that is named after a fusion which has not happened."""
    if case.capped and x.is_cuda and "epilogue" in found:
        apart, together = kernels_of(found["see_through"], x), kernels_of(found["epilogue"], x)
        assert together == apart - case.layers, f"{together} kernels with fusion, {apart} without, {case.layers} layers"


def timed(call: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> Callable[[], None]:
    """Run *calls* calls and wait for the device; the clock of `measure_paired` is read around it."""

    def run() -> None:
        for _ in range(calls):
            call(x)
        if x.is_cuda:
            torch.cuda.synchronize()

    return run


def main() -> int:
    """Measure, write, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="tiny sizes, no files: does every arm compute the same?")
    parser.add_argument("--parallel-compile", action="store_true", help="compile all arms at once before measuring")
    parser.add_argument("--compile", nargs=2, metavar=("CASE", "ARM"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    check = arguments.check
    if not torch.cuda.is_available() and not check:
        sys.stderr.write("see_through.py needs a CUDA GPU; TRITON_INTERPRET=1 with --check runs without one.\n")
        return 1
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    rows = []
    if arguments.parallel_compile:
        compile_in_parallel(CASES, device)
    with torch.inference_mode(mode=False), torch.no_grad():
        if arguments.compile:
            name, arm = arguments.compile
            arms(next(case for case in CASES if case.name == name), device, dtype, arm)
            return 0
        for case in CHECK if check else CASES:
            x = torch.randn(case.tokens, case.width, device=device, dtype=dtype)
            found = arms(case, device, dtype)
            check_fusion(case, found, x)
            calls = {name: timed(call, x, case.calls) for name, call in found.items()}
            seconds = measure_paired(calls, number=1, repeats=case.repeats)
            per_call = {name: tuple(value / case.calls for value in values) for name, values in seconds.items()}
            rows += rows_of(case.name, per_call)
    if check:
        sys.stdout.write("every arm computes the same\n")
        return 0
    ceilings = measure_ceilings()
    for case in CASES:
        rows += rows_of(case.name, {"floor": [ceilings.floor_seconds(case.flops, case.bytes)]})
    others = [row for row in rows_written("see_through") if row.torch != torch.__version__]
    rows = sorted([*others, *rows], key=lambda row: row.torch)
    write("see_through", rows, note="Seconds for one call of the 32-layer stack, compiled, bf16, no CUDA graphs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
