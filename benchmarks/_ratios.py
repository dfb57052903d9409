# SPDX-License-Identifier: Apache-2.0
"""Every published ratio, computed from rows alone.

A ratio is one (arm, case) over another, below 1 is faster: the median over the repeats, in each of which both arms were
measured. Where one was measured once, a floor for example, it is the median of the other over it.
A key that ends in `_speedup` is the other way round; one that ends in `_ms` is no ratio but milliseconds.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any


Measured = tuple[str, str]  # arm, case

_CALL_CASES = ("inference", "grad_mode", "autograd_idle", "autograd_active", "mutating", "leaves20", "decorate")

RATIOS: dict[str, dict[str, tuple[Measured, Measured]]] = {
    "call_overhead": {
        **{case: (("magi", case), ("custom_op", case)) for case in _CALL_CASES},
        "flatten_cost": (("magi", "inference"), ("torch_op", "inference")),
    },
    "handles": {
        "handle_int_vs_int": (("handle", "call"), ("int", "call")),
        "handle_object_vs_int": (("object", "call"), ("int", "call")),
    },
    "nvfp4_linear": {
        "m1_8192_vs_bf16_speedup": (("bf16", "m1_8192"), ("nvfp4", "m1_8192")),
        "m1_8192_without_graph_vs_bf16_speedup": (("bf16", "m1_8192 no graph"), ("nvfp4", "m1_8192 no graph")),
        "m1_8192_vs_floor": (("nvfp4", "m1_8192"), ("nvfp4 floor", "m1_8192")),
        "m1_8192_bf16_vs_floor": (("bf16", "m1_8192"), ("bf16 floor", "m1_8192")),
    },
    "pass_overhead": {"pipeline_vs_compile": (("pipeline", "graph_of_1000"), ("compile", "graph_of_1000"))},
    "see_through": {
        "launch_bound_vs_hand": (("see_through", "launch_bound"), ("hand", "launch_bound")),
        "launch_bound_vs_opaque_speedup": (("opaque", "launch_bound"), ("see_through", "launch_bound")),
        "launch_bound_vs_opaque_opschema_speedup": (
            ("opaque_opschema", "launch_bound"),
            ("see_through", "launch_bound"),
        ),
        "large_vs_opaque": (("see_through", "large"), ("opaque", "large")),
        "epilogue_vs_see_through": (("epilogue", "capped"), ("see_through", "capped")),
        "launch_bound_vs_floor": (("see_through", "launch_bound"), ("floor", "launch_bound")),
        "large_vs_floor": (("see_through", "large"), ("floor", "large")),
    },
}

MILLISECONDS: dict[str, dict[str, Measured]] = {"call_overhead": {"import_ms": ("magi", "import")}}
"""Medians that are published as they are."""


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """*ours* over *theirs*: the median of the ratios of paired repeats.

    A machine that is slow for half of the time shifts the median of either arm by chance, and that of pairs hardly.
    """
    if len(ours) != len(theirs):
        return statistics.median(ours) / statistics.median(theirs)
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _aten_surface(seconds: Mapping[Measured, Sequence[float]]) -> dict[str, float]:
    """The worse of the functional and the out form.

    An active slot is charged what the surface adds to its kernel, the kernel called directly being taken off.
    """
    forms = ("functional", "out")

    def added(form: str) -> list[float]:
        return [a - k for a, k in zip(seconds["active", form], seconds["kernel", form], strict=True)]

    return {
        "slot8_vs_overload": max(ratio_of(seconds["slot8", form], seconds["overload", form]) for form in forms),
        "active_slot_vs_overload": max(
            ratio_of(added(case), seconds["overload", case]) for case in (f"{form} active" for form in forms)
        ),
    }


DERIVED: dict[str, Callable[[Mapping[Measured, Sequence[float]]], dict[str, float]]] = {"aten_surface": _aten_surface}
"""Benchmarks whose ratios are more than one median over another."""


def _backend_parity(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each model, the lower end of the 95% interval of magi over stock Inductor, for a run and a compilation."""
    seconds = {(row["arm"], row["case"]): row["seconds"] for row in rows}
    cases = [case for arm, case in seconds if arm == "inductor"]
    return {
        f"{case.replace(' ', '_')}_vs_inductor": _interval(seconds["magi", case], seconds["inductor", case])[0]
        for case in cases
    }


def _interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the ratio of medians of paired repeats, by resampling the pairs."""
    chance = random.Random(0)  # noqa: S311 - a seed for the resampling
    pairs = list(zip(ours, theirs, strict=True))
    found = []
    for _ in range(2000):
        drawn = chance.choices(pairs, k=len(pairs))
        found.append(statistics.median(a for a, _ in drawn) / statistics.median(b for _, b in drawn))
    found.sort()
    return found[50], found[-51]


def _recompute(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Time and peak memory of a step of each arm over those of stock, and of the two arms with a budget."""
    found: dict[str, float] = {}
    for what, field in (("step", "seconds"), ("peak", "bytes")):
        median = {row["arm"]: statistics.median(row[field]) for row in rows}
        for arm, other in (("magi", "stock"), ("magi_budget", "stock"), ("magi_budget", "stock_budget")):
            found[f"{arm}_{what}_vs_{other}"] = median[arm] / median[other]
    return found


def _dynamic_decode(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Every arm of magi over stock."""
    seconds = {(row["case"], row["arm"]): row["seconds"] for row in rows if row["seconds"]}
    found: dict[str, float] = {}
    for (case, arm), mine in sorted(seconds.items()):
        if arm not in {"magi", "magi_tuned"}:
            continue
        model_and_size, compiled, _ = case.partition("_compile")
        name = model_and_size + "_tuned" * (arm == "magi_tuned")
        for stock in ("stock_dynamic", "stock_static"):
            theirs = seconds.get((case, stock))
            if theirs is None:
                continue
            if not compiled:
                found[f"{name}_vs_{stock}_speedup"] = ratio_of(theirs, mine)
            elif stock == "stock_dynamic":
                # Compilations alone sort before those of all arms together, and stay.
                found.setdefault(f"{name}_compile_vs_stock", ratio_of(mine, theirs))
    return found


FROM_ROWS: dict[str, Callable[[Sequence[Mapping[str, Any]]], dict[str, float]]] = {
    "backend_parity": _backend_parity,
    "dynamic_decode": _dynamic_decode,
    "recompute": _recompute,
}
"""Benchmarks whose ratios are made of whole rows."""


def ratios(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratios of benchmark *name* whose two sides are among *rows*, within each release of torch.

    The keys of every release but the oldest end in it: ``large_vs_opaque_torch213``.
    """
    by_release: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_release.setdefault(tuple(map(int, row["torch"].split(".")[:2])), []).append(row)
    found: dict[str, float] = {}
    for place, (release, those) in enumerate(sorted(by_release.items())):
        suffix = f"_torch{''.join(map(str, release))}" if place else ""
        found |= {f"{key}{suffix}": value for key, value in _of_a_release(name, those).items()}
    return found


def _of_a_release(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if name in FROM_ROWS:
        return FROM_ROWS[name](rows)
    seconds = {(row["arm"], row["case"]): row["seconds"] for row in rows}
    if name in DERIVED:
        return DERIVED[name](seconds)
    found = {
        key: ratio_of(seconds[numerator], seconds[denominator])
        for key, (numerator, denominator) in RATIOS[name].items()
        if numerator in seconds and denominator in seconds
    }
    times = MILLISECONDS.get(name, {})
    return found | {key: statistics.median(seconds[at]) * 1e3 for key, at in times.items() if at in seconds}
