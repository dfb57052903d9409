# SPDX-License-Identifier: Apache-2.0
"""What a picture of a benchmark shows, and what it calls arms and cases: the words of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


_DECODERS = {
    "eager": "eager",
    "eager_channels_last": "eager, channels last",
    "stock_dynamic": "stock dynamic",
    "stock_static": "stock static",
    "stock_no_coalesce": "no coalesce analysis",
    "magi": "magi",
    "magi_dynamic": "magi dynamic",
    "magi_static": "magi static",
    "magi_tuned": "magi, tuned",
    "magi_hot": "magi, hot sizes",
}
_STARTS = {"eager": "eager", "stock": "stock", "magi": "magi", "loaded": "magi, a loaded folder"}
ARMS: Mapping[str, Mapping[str, str]] = {
    "aten_surface": {
        "overload": "the overload itself",
        "slot8": "through the surface",
        "active": "through the surface",
        "kernel": "the kernel itself",
    },
    "backend_parity": {"inductor": "stock", "inductor_guarded": "stock, guard set by hand", "magi": "magi"},
    "call_overhead": {"magi": "magi-opschema", "custom_op": "custom_op", "torch_op": "its OpOverload, flat arguments"},
    "cold_start": _STARTS,
    "cold_start_cpu": _STARTS,
    "decoder_fragments": _DECODERS,
    "dynamic_decode": _DECODERS,
    "handles": {
        "handle": "an object handle",
        "object": "the object itself",
        "taken_apart": "an object, taken apart",
        "int": "an int",
        "inlined": "the body, without an op",
    },
    "hot_latency": {
        "background": "made beside the calls",
        "waits": "made in a call",
        "0 hot": "code for any size",
        "1 hot": "1 size with code",
        "2 hot": "2 sizes with code",
        "8 hot": "8 sizes with code",
        "first_call": "eager answers first",
        "eager_backend": "torch's backend eager",
        "eager": "eager",
    },
    "hot_sizes": {**_DECODERS, "direct": "that code, called directly", "dispatch": "found by the sizes"},
    "libraries": {"eager": "eager", "dynamo": "Dynamo", "opaque": "opaque", "seen_through": "seen through"},
    "nvfp4_linear": {
        "bf16": "bf16",
        "nvfp4": "NVFP4",
        "bf16 floor": "floor of bf16",
        "nvfp4 floor": "floor of NVFP4",
    },
    "pass_overhead": {"pipeline": "seven passes", "compile": "compilation"},
    "real_decoders": _DECODERS,
    "recompute": {
        "stock": "stock",
        "stock_budget": "stock, budget 0.3",
        "magi": "magi",
        "magi_budget": "magi, budget 0.3",
    },
    "report_overhead": {
        "compile": "compilation",
        "check": "check",
        "cold, with report": "compilation, recorded",
        "cold, report": "its record",
        "warm, with report": "from caches, recorded",
        "warm, report": "its record, from caches",
    },
    "see_through": {
        "hand": "hand-written wrap_triton",
        "see_through": "seen through",
        "epilogue": "with epilogue fusion",
        "opaque": "opaque",
        "opaque_opschema": "opaque through magi-opschema",
        "floor": "floor",
    },
    "varying_sizes": {
        "none": "without graphs",
        "graphs": "at most 8 graphs",
        "buckets": "at most 8 graphs, padded",
        "fixed": "a graph of each size alone",
        "made": "while code is made",
        "hot": "with it",
    },
    "wide": _DECODERS,
}


def _started(models: Mapping[str, str]) -> dict[str, str]:
    """The words for each case of `cold_start`."""
    phases = {"compile": "two calls, empty caches", "run": "a later call", "start": "first output, warm caches"}
    return {f"{name} {phase}": f"{model}: {words}" for name, model in models.items() for phase, words in phases.items()}


_CASES: Mapping[str, Mapping[str, str]] = {
    "aten_surface": {
        "functional": "no slot of its own",
        "out": "no slot of its own, out=",
        "functional active": "a slot's kernel",
        "out active": "a slot's kernel, out=",
    },
    "call_overhead": {
        "inference": "five leaves in nested dataclasses, no_grad",
        "grad_mode": "the same in grad mode, nothing requires a gradient",
        "autograd_idle": "with a backward, nothing requires a gradient",
        "autograd_active": "with a backward, an input requires a gradient",
        "direct": "a signature that torch takes as it is",
        "lowered": "annotations of ours, values as they are",
        "mutating": "one mutated Tensor in the dataclass",
        "leaves20": "20 scalar leaves in three nested classes, by keyword",
        "decorate": "decoration of one op",
    },
    "cold_start": _started(
        {
            "llama32": "a Llama, 32 layers",
            "wan_dit": "the transformer of WAN",
            "sdxl_unet": "the UNet of SDXL",
            "wan21": "the decoder of WAN 2.1",
            "wan22": "the decoder of WAN 2.2",
            "kl": "the decoder of SDXL",
            "cogvideox": "the decoder of CogVideoX",
            "densenet121": "densenet121",
            "hrnet_w18": "hrnet_w18",
        }
    ),
    "cold_start_cpu": _started(
        {
            "llama": "a Llama of transformers",
            "classifier": "a classifier of timm",
            "breaks": "a module with graph breaks",
        }
    ),
    "handles": {"call": "one call", "compiled": "one call in compiled code"},
    "nvfp4_linear": {
        "m1_8192": "1 row",
        "m1_8192 no graph": "1 row, without the graph",
        **{f"m{rows}_8192": f"{rows} rows" for rows in (4, 16, 64, 1024)},
        "llama_decode": "8 layers of a Llama",
        "moe_decode": "64 experts",
    },
    "pass_overhead": {"graph_of_1000": "a graph of 1,000 nodes"},
    "real_decoders": {
        "wan21_limit8": "wan21, torch's limit of compilations",
        "wan21_compile": "wan21, compilation",
        "kl_compile": "kl, compilation",
    },
    "recompute": {"step": "a training step"},
    "see_through": {
        "launch_bound": "1 token, width 1024",
        "large": "8192 tokens, width 4096",
        "capped": "1 token, a soft cap behind the norm",
    },
    "varying_sizes": {
        "decode": "decode, 8 batch sizes",
        "all sizes": "decode, 64 batch sizes",
        "prefill": "prefill, 8 lengths from 1 to 4096",
    },
}
_PARITY = {"vae": "AutoencoderKL decoder", "llama": "Llama-like", "vit": "ViT"}
_RUNS = {"run": "run", "compile": "compilation", "training": "training step"}


def panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each measured case, in the order of the file; no compilations beside others, and no recordings."""
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["seconds"] and not row.get("compiled_beside") and row["arm"] != "recordings":
            cases.setdefault(row["case"], []).append(row)
    return {case: found for case, found in cases.items() if len(found) > 1}


def of_arm(benchmark: str, arm: str) -> str:
    """The words for *arm*; a KeyError where nobody has found any."""
    return ARMS[benchmark][arm]


def of_case(benchmark: str, case: str) -> str:
    """The words for *case*; its own name where the page goes by that, as for classes of models and of kernels."""
    if benchmark == "backend_parity":
        model, run = case.split()
        return f"{_PARITY[model]}: {_RUNS[run]}"
    if benchmark in {"dynamic_decode", "hot_sizes"}:
        return case.replace("_compile", ": compilation").replace("_", ", ")
    return _CASES.get(benchmark, {}).get(case, case)
