# SPDX-License-Identifier: Apache-2.0
"""Every published ratio, computed from rows alone.

A ratio is one (arm, case) over another, below 1 is faster: the median over the repeats, in each of which both arms were
measured. Where one was measured once, a floor for example, it is the median of the other over it.
A key that ends in `_speedup` is the other way round; one that ends in `_ms` or `_us` is a time, not a ratio. One that
ends in `_low` or `_high` is an end of the 95% interval of the ratio that it is named after; bars hold for that ratio.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _difference import Difference


Measured = tuple[str, str]  # arm, case

_CALL_CASES = (
    "inference", "grad_mode", "autograd_idle", "autograd_active",
    "direct", "lowered", "mutating", "leaves20", "decorate",
)  # fmt: skip
_NVFP4_CASES = ("m1_8192", "m4_8192", "m16_8192", "m64_8192", "m1024_8192", "llama_decode", "moe_decode")

_COLD_STARTS = (
    "llama32", "wan_dit", "sdxl_unet", "wan21", "wan22", "kl", "cogvideox", "densenet121", "hrnet_w18",
)  # fmt: skip

RATIOS: dict[str, dict[str, tuple[Measured, Measured]]] = {
    "call_overhead": {
        **{case: (("magi", case), ("custom_op", case)) for case in _CALL_CASES},
        "flatten_cost": (("magi", "inference"), ("torch_op", "inference")),
    },
    **{
        name: {
            **{
                f"{case}_{what}_vs_stock": (("magi", f"{case} {what}"), ("stock", f"{case} {what}"))
                for case in cases
                for what in ("compile", "run")
            },
            **{
                f"{case}_{called}_vs_{other}_start": ((arm, f"{case} start"), (other, f"{case} start"))
                for case in cases
                for called, arm, other in (
                    ("warm", "loaded", "eager"),
                    ("warm", "loaded", "stock"),
                    ("stock", "stock", "eager"),
                )
            },
        }
        for name, cases in {
            "cold_start": _COLD_STARTS,
            "cold_start_cpu": ("llama", "classifier", "breaks"),
        }.items()
    },
    "handles": {
        "handle_int_vs_int": (("handle", "call"), ("int", "call")),
        "handle_object_vs_int": (("object", "call"), ("int", "call")),
        "taken_apart_vs_int": (("taken_apart", "call"), ("int", "call")),
        "compiled_handle_vs_int": (("handle", "compiled"), ("int", "compiled")),
        "compiled_object_vs_int": (("object", "compiled"), ("int", "compiled")),
        "compiled_taken_apart_vs_int": (("taken_apart", "compiled"), ("int", "compiled")),
        "compiled_int_vs_inlined": (("int", "compiled"), ("inlined", "compiled")),
    },
    "hot_latency": {
        "final_vs_hot": (("background", "later calls"), ("waits", "later calls")),
        "first_call_vs_eager": (("first_call", "after the capture"), ("eager", "after the capture")),
        "first_call_vs_eager_backend": (("first_call", "first call"), ("eager_backend", "first call")),
    },
    "nvfp4_linear": {
        **{f"{case}_vs_bf16_speedup": (("bf16", case), ("nvfp4", case)) for case in _NVFP4_CASES},
        "m1_8192_without_graph_vs_bf16_speedup": (("bf16", "m1_8192 no graph"), ("nvfp4", "m1_8192 no graph")),
        **{f"{case}_vs_floor": (("nvfp4", case), ("nvfp4 floor", case)) for case in _NVFP4_CASES},
        **{f"{case}_bf16_vs_floor": (("bf16", case), ("bf16 floor", case)) for case in _NVFP4_CASES},
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

MILLISECONDS: dict[str, dict[str, Measured]] = {
    "call_overhead": {"import_ms": ("magi", "import"), "first_op_ms": ("magi", "first op")},
    "hot_latency": {
        "worst_call_ms": ("background", "worst call"),
        "worst_call_that_waits_ms": ("waits", "worst call"),
    },
}
"""Medians that are published as they are."""

DEFAULT_LIMIT = 8
"""How often Dynamo compiles one function before it gives up, unless told otherwise (`recompile_limit`)."""


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


def _report_overhead(seconds: Mapping[Measured, Sequence[float]]) -> dict[str, float]:
    """A check with its search over the compilation that it checks, and the record of a run over the rest of it."""
    cases = [case for arm, case in seconds if arm == "check"]
    each = [ratio_of(seconds["check", case], seconds["compile", case]) for case in cases]
    found = {"check_vs_compile": statistics.median(each)} if each else {}
    shares, warm = [], []
    for case in (case for arm, case in seconds if arm == "cold, report"):
        pairs = zip(seconds["cold, report", case], seconds["cold, with report", case], strict=True)
        shares.append(statistics.median(spent / (total - spent) for spent, total in pairs))
        warm.append(statistics.median(seconds["warm, report", case]) * 1e3)
    return found | ({"report_compile_overhead": max(shares), "report_warm_ms": max(warm)} if shares else {})


def _hot_latency(seconds: Mapping[Measured, Sequence[float]]) -> dict[str, float]:
    """The calls of an order with code for some sizes over the same calls with the code for any size, the largest."""
    none = "0 hot"
    each = [
        ratio_of(took, seconds[none, case]) for (arm, case), took in seconds.items() if "hot" in arm and arm != none
    ]
    return {"thrash_worst": max(each)} if each else {}


def _cold_start(seconds: Mapping[Measured, Sequence[float]]) -> dict[str, float]:
    """The seconds from the start of a process that loads a folder to its first output."""
    starts = {case.removesuffix(" start"): each for (arm, case), each in seconds.items() if arm == "loaded"}
    return {f"{case}_warm_seconds": statistics.median(each) for case, each in starts.items()}


DERIVED: dict[str, Callable[[Mapping[Measured, Sequence[float]]], dict[str, float]]] = {
    "aten_surface": _aten_surface,
    "cold_start": _cold_start,
    "cold_start_cpu": _cold_start,
    "hot_latency": _hot_latency,
    "report_overhead": _report_overhead,
}
"""Benchmarks whose ratios are more than one median over another."""


def _backend_parity(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each model magi over stock Inductor, for a run and a compilation: the median, and where it may lie."""
    seconds = {(row["arm"], row["case"]): row["seconds"] for row in rows}
    found: dict[str, float] = {}
    for case in (case for arm, case in seconds if arm == "inductor"):
        ours, theirs = seconds["magi", case], seconds["inductor", case]
        name = f"{case.replace(' ', '_')}_vs_inductor"
        low, high = _interval(ours, theirs)
        found |= {name: ratio_of(ours, theirs), f"{name}_low": low, f"{name}_high": high}
    return found


def _interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the ratio of paired repeats, by resampling the pairs."""
    chance = random.Random(0)  # noqa: S311 - a seed for the resampling
    quotients = [a / b for a, b in zip(ours, theirs, strict=True)]
    found = sorted(statistics.median(chance.choices(quotients, k=len(quotients))) for _ in range(2000))
    return found[50], found[-51]


def _recompute(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Time and peak memory of a step of each arm over those of stock, and of the two arms with a budget."""
    found: dict[str, float] = {}
    for what, field in (("step", "seconds"), ("peak", "bytes")):
        median = {row["arm"]: statistics.median(row[field]) for row in rows}
        for arm, other in (("magi", "stock"), ("magi_budget", "stock"), ("magi_budget", "stock_budget")):
            found[f"{arm}_{what}_vs_{other}"] = median[arm] / median[other]
    return found


def _varying_sizes(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Calls with graphs over those without, and those of static code over them; recordings, and what they grew to."""
    found: dict[str, float] = {}
    by_arm = {(row["arm"], row["case"]): row for row in rows}
    for case in dict.fromkeys(row["case"] for row in rows):
        none = by_arm["none", case]["seconds"]
        if ("made", case) in by_arm:
            made, hot = (by_arm[arm, case]["seconds"] for arm in ("made", "hot"))
            both, general = [*made, *hot], statistics.median(none)
            for what, value in (("worst_call", max(made)), ("thrash", statistics.mean(both))):
                name = f"{case.partition(',')[0]}_{what}_vs_general"
                found[name] = max(found.get(name, 0.0), value / general)
            continue
        graphs = by_arm["graphs", case]["seconds"]
        if ("buckets", case) in by_arm:
            found["buckets_vs_none_speedup"] = ratio_of(none, by_arm["buckets", case]["seconds"])
        if case != "decode":
            found[f"{case.replace(' ', '_')}_vs_none"] = ratio_of(graphs, none)
            continue
        first, last = by_arm["graphs", case]["bytes"]
        found["graphs_vs_none_speedup"] = ratio_of(none, graphs)
        found["graphs_vs_fixed_size"] = ratio_of(by_arm["fixed", case]["seconds"], graphs)
        found["recordings"] = float(len(by_arm["recordings", case]["seconds"]))
        found["memory_growth"] = last / first
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


def _arms_of_magi(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each arm of magi over stock, dynamic and static, of each case.

    An arm of magi that failed, where stock did not, counts as 0.
    """
    seconds = {(row["case"], row["arm"]): row["seconds"] for row in rows}
    found: dict[str, float] = {}
    for (case, arm), mine in sorted(seconds.items()):
        if arm in {"magi_dynamic", "magi_static", "magi_tuned"}:
            name = case + arm.removeprefix("magi").removesuffix("_dynamic")
            for stock in ("stock_dynamic", "stock_static"):
                if theirs := seconds.get((case, stock)):
                    found[f"{name}_vs_{stock}_speedup"] = ratio_of(theirs, mine) if mine else 0.0
    return found


def _decoder_fragments(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratios of each fragment, and of the worst and the median fragment."""
    found = _arms_of_magi(rows)
    return found | _worst_and_median(found, rows, "fragments_")


def _worst_and_median(
    found: Mapping[str, float], rows: Sequence[Mapping[str, Any]], of: str, what: str = ""
) -> dict[str, float]:
    """The worst and the median over the cases of *rows* of what *found* has against stock, for keys that begin so."""
    summary: dict[str, float] = {}
    cases = {row["case"] for row in rows}
    for against in (f"{what}vs_stock_dynamic_speedup", f"{what}vs_stock_static_speedup"):
        if each := [found[f"{case}_{against}"] for case in cases if f"{case}_{against}" in found]:
            summary |= {f"{of}worst_{against}": min(each), f"{of}median_{against}": statistics.median(each)}
    return summary


def _wide(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratios of each class by wall time and by the time of its kernels; the worst and the median of the classes."""
    calls = [row for row in rows if "_compile" not in row["case"]]
    kernels = [
        {**row, "case": f"{row['case']}_kernels", "seconds": [sum(row["seconds_by_kind"].values())]}
        for row in calls
        if row.get("seconds_by_kind")
    ]
    found = _arms_of_magi([*calls, *kernels])
    found |= _of_decodes([row for row in rows if "_compile" in row["case"]])
    return found | _worst_and_median(found, calls, "") | _worst_and_median(found, calls, "", "kernels_")


def _real_decoders(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratios of each decode, over its floor too, and of the compilations of its first and second call.

    The keys of a changed model end in ``_nobreak``, those under Dynamo's own limit of compilations in ``_limit8``.
    """
    under: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        suffix = next((each for each in ("_nobreak", "_limit8") if each in row["case"]), "")
        under.setdefault(suffix, []).append({**row, "case": row["case"].replace(suffix, "")})
    # An arm that made fewer graphs than the limit allows ran as it does without one.
    unlimited = under.setdefault("", [])
    have = {(row["case"], row["arm"]) for row in unlimited}
    unlimited += [
        row
        for row in under.get("_limit8", [])
        if (row["case"], row["arm"]) not in have and row["seconds"] and row["graphs"] <= DEFAULT_LIMIT
    ]
    return {f"{key}{suffix}": value for suffix, those in under.items() for key, value in _of_decodes(those).items()}


def _of_decodes(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found = _arms_of_magi([row for row in rows if "_compile" not in row["case"]])
    seconds = {(row["case"], row["arm"]): row["seconds"] for row in rows if row["seconds"]}
    for (case, arm), mine in sorted(seconds.items()):
        model, compiled, _ = case.partition("_compile")
        if compiled and arm == "magi_dynamic" and (theirs := seconds.get((case, "stock_dynamic"))):
            # Compilations alone sort before those of all arms together, and stay.
            found.setdefault(f"{model}_compile_vs_stock", ratio_of(mine, theirs))
    for row in rows:
        if row.get("floor_seconds") and (ours := seconds.get((row["case"], "magi_dynamic"))):
            found[f"{row['case']}_vs_floor"] = statistics.median(ours) / row["floor_seconds"]
    return found


def _hot_sizes(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the way to the code for a size adds to a call, in microseconds; and that code over stock, model by model.

    The prompts of a language model count as one, by the geometric mean.
    """
    seconds = {(row["case"], row["arm"]): row["seconds"] for row in rows}
    found: dict[str, float] = {}
    for key, case in (("dispatch_us", "16 inputs"), ("dispatch_300_us", "300 inputs")):
        if (ours := seconds.get((case, "dispatch"))) and (theirs := seconds.get((case, "direct"))):
            found[key] = 1e6 * statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    for stock in ("stock_dynamic", "stock_static"):
        each: dict[str, list[float]] = {}
        for (case, arm), mine in sorted(seconds.items()):
            theirs = seconds.get((case, stock))
            if arm == "magi_hot" and theirs:
                model = "llama" if case.startswith("llama_") else case
                each.setdefault(model, []).append(ratio_of(theirs, mine) if mine else 0.0)
        for model, speedups in each.items():
            found[f"{model}_hot_vs_{stock}_speedup"] = math.prod(speedups) ** (1 / len(speedups))
    return found


def _libraries(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What seeing through an op is worth, and what it costs beside the library's call in eager mode.

    The median is over the ops at their small size, the worst at their large one; the two sizes of the Llama block
    count as one, by the geometric mean. Where an op seen through failed, and the other arm did not, its speedup is 0.
    """
    seconds = {(row["case"], row["arm"]): row["seconds"] for row in rows if row["seconds"]}
    found: dict[str, float] = {}
    for (case, arm), theirs in sorted(seconds.items()):
        mine = seconds.get((case, "seen_through"))
        if arm in {"opaque", "dynamo"}:
            found[f"{case}_vs_{arm}_speedup"] = ratio_of(theirs, mine) if mine else 0.0
        elif arm == "eager" and mine:
            found[f"{case}_vs_eager"] = ratio_of(mine, theirs)

    def of_ops(ending: str) -> list[float]:
        return [value for key, value in found.items() if key.endswith(ending) and not key.startswith("llama_block")]

    for size, suffix in (("small", ""), ("large", "_large")):
        for against in ("vs_opaque_speedup", "vs_dynamo_speedup"):
            if each := of_ops(f"_{size}_{against}"):
                found[f"libraries{suffix}_median_{against}"] = statistics.median(each)
    if each := of_ops("_large_vs_eager"):
        found["libraries_worst_vs_eager"] = max(each)
    if each := of_ops("_small_vs_eager"):
        found["libraries_small_worst_vs_eager"] = max(each)
    block = [found.get(f"llama_block_{size}_vs_dynamo_speedup") for size in ("small", "large")]
    if None not in block:
        found["llama_block_vs_dynamo_speedup"] = math.prod(each for each in block if each is not None) ** 0.5
    return found


def _card(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the classes that stock compiles: how many the backend compiles, gets wrong, and compiles without its passes.

    An output is wrong if it is too far from float32 for where stock's lies, at either size.
    """
    arms: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["case"], {})[row["arm"]] = row
    pairs = [
        (found["magi_dynamic"], found["stock_dynamic"])
        for found in arms.values()
        if "magi_dynamic" in found and found.get("stock_dynamic", {}).get("seconds")
    ]
    compiled = [(ours, stock) for ours, stock in pairs if ours["seconds"]]
    wrong = [
        ours["case"]
        for ours, stock in compiled
        if any(Difference(**ours[which]).too_far(Difference(**stock[which])) for which in _AT_EITHER_SIZE)
    ]
    return {
        "classes": len(pairs),
        "compiled_share": len(compiled) / max(1, len(pairs)),
        "wrong": len(wrong),
        "fell_back": sum(bool(ours["fell_back"]) for ours, _ in compiled),
    }


_AT_EITHER_SIZE = ("difference", "second_difference")

FROM_ROWS: dict[str, Callable[[Sequence[Mapping[str, Any]]], dict[str, float]]] = {
    "backend_parity": _backend_parity,
    "card": _card,
    "decoder_fragments": _decoder_fragments,
    "dynamic_decode": _dynamic_decode,
    "hot_sizes": _hot_sizes,
    "libraries": _libraries,
    "real_decoders": _real_decoders,
    "recompute": _recompute,
    "varying_sizes": _varying_sizes,
    "wide": _wide,
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
    found = {
        key: ratio_of(seconds[numerator], seconds[denominator])
        for key, (numerator, denominator) in RATIOS.get(name, {}).items()
        if numerator in seconds and denominator in seconds
    }
    if name in DERIVED:
        found |= DERIVED[name](seconds)
    times = MILLISECONDS.get(name, {})
    return found | {key: statistics.median(seconds[at]) * 1e3 for key, at in times.items() if at in seconds}
