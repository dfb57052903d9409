# SPDX-License-Identifier: Apache-2.0
"""What one eager call of an op costs, beside a torch.library.custom_op whose parameters were flattened by hand.

Same body in both arms, float32[8] on the CPU, so that the body is a small part of the time.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from _results import Row, measure_paired, rows_of, write
from magi_opschema import magi_register_custom_op, op_def
from torch import Tensor


_NOTE = (
    "One eager call of an op; `decorate` is one decoration. `import` is what the first access of every public name "
    "adds to `import torch` in a fresh process, `first op` the first decoration after it."
)
_names = itertools.count()

# What the first access of every public name adds to `import torch`, and then the first op of the process.
_IMPORT = """
import time
import torch
from torch import Tensor

start = time.perf_counter()
import magi_opschema
for name in magi_opschema.__all__:
    getattr(magi_opschema, name)
imported = time.perf_counter()

@magi_opschema.magi_register_custom_op("bench_import::copy")
def copy(x: Tensor, factor: float = 2.0) -> Tensor:
    return x.clone()

print(imported - start, time.perf_counter() - imported)
"""


@dataclass(frozen=True)
class Scale:
    eps: float = 1e-6
    mode: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True)
class Config:
    weight: Tensor
    scale: Scale = Scale()
    groups: int = 2


@dataclass(frozen=True)
class Target:
    out: Tensor
    scale: Scale = Scale()
    groups: int = 2


@dataclass(frozen=True)
class First:
    a: float = 0.0
    b: float = 1.0
    c: int = 2
    d: int = 3
    e: bool = True
    f: float = 5.0
    g: float = 6.0


@dataclass(frozen=True)
class Second:
    first: First = First()
    h: float = 7.0
    i: int = 8
    j: int = 9
    k: bool = False
    l: float = 11.0  # noqa: E741
    m: float = 12.0
    n: int = 13


@dataclass(frozen=True)
class Third:
    second: Second = Second()
    o: float = 14.0
    p: int = 15
    q: bool = True
    r: float = 17.0
    s: float = 18.0
    t: int = 19


def _inference(*, with_backward: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """One op of five leaves in both arms."""
    name = f"inference{next(_names)}"

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    def rich_backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None

    options = {"setup_context_fn": setup, "backward_fn": rich_backward} if with_backward else {}

    @magi_register_custom_op(f"bench_magi::{name}", infer_output_meta_fn=["x"], **options)  # type: ignore[arg-type]
    def rich(x: Tensor, cfg: Config) -> Tensor:
        return x.clone()

    @torch.library.custom_op(f"bench_hand::{name}", mutates_args=())
    def hand(x: Tensor, weight: Tensor, eps: float, mode: str, groups: int) -> Tensor:
        return x.clone()

    @hand.register_fake
    def _(x: Tensor, weight: Tensor, eps: float, mode: str, groups: int) -> Tensor:
        return torch.empty_like(x)

    if with_backward:
        hand.register_autograd(lambda ctx, grad: (grad, None, None, None, None), setup_context=setup)
    return rich, hand


def _direct() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """One op whose signature torch takes as it is."""

    @magi_register_custom_op("bench_magi::direct", infer_output_meta_fn=["x"])
    def rich(x: Tensor, weight: Tensor, eps: float, groups: int = 2) -> Tensor:
        return x.clone()

    @torch.library.custom_op("bench_hand::direct", mutates_args=())
    def hand(x: Tensor, weight: Tensor, eps: float, groups: int = 2) -> Tensor:
        return x.clone()

    return rich, hand


def _lowered() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """One op with annotations of our own, whose values go to torch as they are."""

    @magi_register_custom_op("bench_magi::lowered", infer_output_meta_fn=["x"])
    def rich(x: Tensor, weight: Tensor, mode: Literal["rms", "layer"], groups: Annotated[int, "even"] = 2) -> Tensor:
        return x.clone()

    @torch.library.custom_op("bench_hand::lowered", mutates_args=())
    def hand(x: Tensor, weight: Tensor, mode: str, groups: int = 2) -> Tensor:
        return x.clone()

    return rich, hand


def _mutating() -> tuple[Callable[..., Any], Callable[..., Any]]:
    @magi_register_custom_op("bench_magi::mutating", mutates_args=["cfg.out"])
    def rich(x: Tensor, cfg: Target) -> None:
        cfg.out.copy_(x)

    @torch.library.custom_op("bench_hand::mutating", mutates_args=("out",))
    def hand(x: Tensor, out: Tensor, eps: float, mode: str, groups: int) -> None:
        out.copy_(x)

    return rich, hand


def _leaves20() -> tuple[Callable[..., Any], Callable[..., Any]]:
    @magi_register_custom_op("bench_magi::leaves20", infer_output_meta_fn=["x"])
    def rich(x: Tensor, cfg: Third) -> Tensor:
        return x.clone()

    @torch.library.custom_op("bench_hand::leaves20", mutates_args=())
    def hand(
        x: Tensor, a: float, b: float, c: int, d: int, e: bool, f: float, g: float, h: float, i: int, j: int, k: bool,
        l: float, m: float, n: int, o: float, p: int, q: bool, r: float, s: float, t: int,  # noqa: E741
    ) -> Tensor:  # fmt: skip
        return x.clone()

    return rich, hand


def _decorate_rich() -> None:
    @magi_register_custom_op(f"bench_magi::decorated{next(_names)}", infer_output_meta_fn=_rich_fake)
    def op(x: Tensor, cfg: Config) -> Tensor:
        return x.clone()


def _rich_fake(x: Tensor, cfg: Config) -> Tensor:
    return torch.empty_like(x)


def _decorate_hand() -> None:
    @torch.library.custom_op(f"bench_hand::decorated{next(_names)}", mutates_args=())
    def op(x: Tensor, weight: Tensor, eps: float, mode: str, groups: int) -> Tensor:
        return x.clone()

    @op.register_fake
    def _(x: Tensor, weight: Tensor, eps: float, mode: str, groups: int) -> Tensor:
        return torch.empty_like(x)


def measure() -> list[Row]:
    """All cases."""
    x, weight, out = torch.randn(8), torch.randn(8), torch.empty(8)
    wanted = torch.randn(8, requires_grad=True)
    cfg, target, many = Config(weight), Target(out), Third()
    flat = (weight, 1e-6, "rms", 2)
    rows: list[Row] = []

    def pair(case: str, arms: dict[str, Callable[[], object]], number: int = 4000) -> None:
        rows.extend(rows_of(case, measure_paired(arms, number=number)))

    plain, plain_hand = _inference(with_backward=False)
    plain_op = op_def(plain).torch_op
    with torch.no_grad():
        arms = {
            "magi": lambda: plain(x, cfg),
            "custom_op": lambda: plain_hand(x, *flat),
            "torch_op": lambda: plain_op(x, *flat),
        }
        pair("inference", arms)
    pair("grad_mode", {"magi": lambda: plain(x, cfg), "custom_op": lambda: plain_hand(x, *flat)})
    trained, trained_hand = _inference(with_backward=True)
    pair("autograd_idle", {"magi": lambda: trained(x, cfg), "custom_op": lambda: trained_hand(x, *flat)})
    pair("autograd_active", {"magi": lambda: trained(wanted, cfg), "custom_op": lambda: trained_hand(wanted, *flat)})
    direct, direct_hand = _direct()
    pair("direct", {"magi": lambda: direct(x, weight, 1e-6), "custom_op": lambda: direct_hand(x, weight, 1e-6)})
    lowered, lowered_hand = _lowered()
    pair("lowered", {"magi": lambda: lowered(x, weight, "rms"), "custom_op": lambda: lowered_hand(x, weight, "rms")})
    mutating, mutating_hand = _mutating()
    pair("mutating", {"magi": lambda: mutating(x, target), "custom_op": lambda: mutating_hand(x, out, *flat[1:])})
    leaves20, leaves20_hand = _leaves20()
    keywords: dict[str, Any] = _flat_fields(many)
    pair("leaves20", {"magi": lambda: leaves20(x=x, cfg=many), "custom_op": lambda: leaves20_hand(x=x, **keywords)})
    pair("decorate", {"magi": _decorate_rich, "custom_op": _decorate_hand}, number=40)
    for case, seconds in zip(("import", "first op"), _import_seconds(), strict=True):
        rows.extend(rows_of(case, {"magi": seconds}))
    return rows


def _import_seconds(repeats: int = 11) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The import and the first op, each in fresh processes that find bytecode, as those of an installed package do."""
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", _IMPORT]
        printed = [
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
            for _ in range(repeats + 1)
        ]
    # The first process wrote the bytecode.
    imports, first_ops = zip(*printed[1:], strict=True)
    return tuple(map(float, imports)), tuple(map(float, first_ops))


def _flat_fields(record: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in record.__dataclass_fields__:
        value = getattr(record, name)
        fields |= _flat_fields(value) if hasattr(value, "__dataclass_fields__") else {name: value}
    return fields


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    write("call_overhead", measure(), note=_NOTE)


if __name__ == "__main__":
    main()
