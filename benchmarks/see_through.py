# SPDX-License-Identifier: Apache-2.0
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
from typing import TYPE_CHECKING

import torch
from _ceilings import measure_ceilings
from _kernels import kernels_of
from _results import measure_paired, rows_of, rows_written, write
from _stack import Case, registered, stack


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn


CASES = (
    Case("launch_bound", tokens=1, width=1024, layers=32, capped=False, calls=10, repeats=201),
    Case("large", tokens=8192, width=4096, layers=32, capped=False, calls=1, repeats=41),
    Case("capped", tokens=1, width=1024, layers=32, capped=True, calls=10, repeats=201),
)
CHECK = (Case("check", tokens=2, width=64, layers=2, capped=True, calls=1, repeats=1),)


def compiled(model: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    """The model under `torch.compile`."""
    return torch.compile(model, fullgraph=True, dynamic=False, backend=backend)


def has_epilogue_fusion() -> bool:
    """Whether this torch can fuse pointwise work into user kernels."""
    from torch._inductor import config

    return hasattr(config, "epilogue_fusion_user_defined_triton_kernel")


def backends_of_arms(device: str) -> dict[str, str]:
    """The arms that this machine and this torch can run, and the backend of each."""
    backends = dict.fromkeys(registered(), "inductor")
    if has_epilogue_fusion():
        backends["epilogue"] = "magi"
    if device == "cpu":
        del backends["hand"]  # torch's own triton_op cannot be traced under Triton's interpreter
    return backends


def arms(case: Case, device: str, dtype: torch.dtype, only: str = "") -> dict[str, Callable[[Tensor], Tensor]]:
    """Every arm compiled, or one of them, and checked against the opaque one in eager."""
    torch.compiler.reset()
    ops = registered()
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


def check_fusion(case: Case, found: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> None:
    """Refuse to time an arm that is named after a fusion which has not happened."""
    if case.capped and x.is_cuda and "epilogue" in found:
        apart = len(kernels_of(lambda: found["see_through"](x)))
        together = len(kernels_of(lambda: found["epilogue"](x)))
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
