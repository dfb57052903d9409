# SPDX-License-Identifier: Apache-2.0
"""A real class under one arm, in this process: compiled with symbolic sizes, and compared with float32 at two sizes."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from _arms import arm_named
from _case import graphs_compiled, in_float32, pass_lines
from _clock import Clock, calls_in_a_queue, true_float32
from _difference import difference


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from _real_classes import CLASSES
from _workers import Row


WHOLE = ("resnet50", "efficientnet_b3", "regnety_032", "mobilenetv3_large_100")
"""With all their blocks: the classifiers that did not compile."""

KNOWN = {
    *("UNet2DConditionModel", "AutoencoderKL", "AutoencoderKLWan", "AutoencoderKLCogVideoX", "LlamaForCausalLM"),
    *("AutoencoderKLQwenImage", "AutoencoderKLHunyuanVideo", "AutoencoderKLMochi", "AutoencoderKLLTXVideo"),
    *("AutoencoderKLAllegro", "AutoencoderKLTemporalDecoder"),
}
"""Classes of the other benchmarks."""

ROUNDED = {"VQModel", "EncodecModel", "DacModel", "MimiModel"}
"""Classes that choose the nearest of many vectors: an error of rounding is another choice, and then any error."""

NAMES = tuple(name for name in CLASSES if name not in KNOWN | ROUNDED)
FELL_BACK = "was compiled once more without"
"""In the warning of magi-backend for a graph that Inductor compiled without it."""

REPEATS, QUEUED_SECONDS = 3, 0.05


def measure(name: str, arm: str, tiny: bool, beside: int, *, commands: Iterator[str]) -> list[Row]:
    """The row of the class *name* under *arm*; *beside* others that compile and run at the same time."""
    del commands  # nothing is measured alone
    torch.set_num_threads(1)
    os.environ["MAGI_COMPILE_STRICT"] = "0"  # what falls back is counted
    clock = Clock("cpu" if tiny else "cuda")
    kind, how = CLASSES[name], arm_named(arm)
    torch.manual_seed(0)
    model = kind.build(whole=not tiny and name in WHOLE).to(clock.device)
    row: Row = {
        "arm": arm,
        "case": name,
        "dtype": str(kind.dtype).removeprefix("torch."),
        "compiled_beside": beside,
    }
    sizes = kind.small if tiny else kind.large
    compiled = how.compile(model, dynamic=how.dynamic)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        outputs = [compiled(**kind.inputs(size, clock.device)) for size in sizes]
        clock.wait()
        row |= {"sizes": sizes, "cold_seconds": [time.perf_counter() - start], "graphs": graphs_compiled()}
        given = kind.inputs(sizes[0], clock.device)
        alone = min(clock.seconds(lambda: compiled(**given)) for _ in range(2))
        calls = calls_in_a_queue(alone, QUEUED_SECONDS)
        row["seconds"] = [clock.seconds(lambda: compiled(**given), calls) for _ in range(REPEATS)]
    row["fell_back"] = [str(each.message)[:400] for each in caught if FELL_BACK in str(each.message)]
    row["passes"] = pass_lines() if how.is_ours else []
    with torch.no_grad():
        eager = [model(**kind.inputs(size, clock.device)) for size in sizes]
        model.float()
        with true_float32():
            exact = [model(**in_float32(kind.inputs(size, clock.device))) for size in sizes]
    for which, ours, theirs, reference in zip(("", "second_"), outputs, eager, exact, strict=True):
        row[f"{which}difference"] = asdict(difference(ours, reference))
        row[f"{which}eager_difference"] = asdict(difference(theirs, reference))
    return [row]
