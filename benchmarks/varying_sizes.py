# SPDX-License-Identifier: Apache-2.0
"""Sizes that vary: CUDA graphs for some of them, and the calls while code for one is made beside them.

A Llama of 8 layers is called with batches in random order, with `magi.graphs=8`.

Case ``decode``: 200 calls with two tokens a row and 1 to 64 rows, of eight sizes, in random order. Arms: dynamic code
without graphs (``none``), with at most eight (``graphs``), and static code of each size that is recorded alone
(``fixed``). One pass settles each arm, and the others are timed in turn: seconds are those of a call, over a pass. The
arm ``recordings`` has the seconds of each call that recorded a graph. Case ``all sizes``: the same with each size from
1 to 64, of which most have no graph at any time. Case ``prefill``: one row of lengths from 1 to 4096.

    python benchmarks/varying_sizes.py            # on one GPU; writes results/varying_sizes.json
    python benchmarks/varying_sizes.py --tiny     # a small model, fewer calls; writes nothing
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self
from unittest import mock

import torch
from _real_models import MODELS, compiled_part, decode, sharing_weights
from _results import Row, empty_caches, rows_of, rows_written, say, write
from torch import Tensor, nn


GRAPHS = 8
CALLS = 200
TOKENS = 2
BESIDE = ("none", "made", "hot")
LATER = 20
IDLE = 200
MOST_SECONDS_BESIDE = 420.0
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64)
LENGTHS = (1, 16, 100, 128, 500, 512, 1024, 4096)
NOTE = (
    "`graphs_vs_none_speedup` is the time of a call without graphs over that with `magi.graphs=8`, and "
    "`graphs_vs_fixed_size` that of static code, recorded for each size alone, over it. `memory_growth` is the memory "
    "that torch has reserved after the last call over that after the eighth recording. `all_sizes_vs_none` and "
    "`prefill_vs_none` are the time with graphs over that without, where most sizes have none, and where most time is "
    "arithmetic. `buckets_vs_none_speedup` is as the first where 64 sizes are padded to eight. "
    "`wan21_worst_call_vs_general` is the longest decode while code for one size is made over the median of decodes "
    "without hot sizes, and `wan21_thrash_vs_general` all of these and the later ones over as many without."
)
Run = Callable[[Tensor], Any]


def llama(*, tiny: bool) -> nn.Module:
    """A Llama of 8 layers without a cache, in bfloat16; a small one in float32 for a CPU."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=64 if tiny else 2048,
        intermediate_size=128 if tiny else 5632,
        num_attention_heads=4 if tiny else 16,
        num_key_value_heads=2 if tiny else 8,
        num_hidden_layers=2 if tiny else 8,
        vocab_size=97 if tiny else 32000,
        max_position_embeddings=8192,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: nn.Module = LlamaModel(config).eval().requires_grad_(False)
    return model if tiny else model.to(torch.bfloat16)


class Recorder:
    """The calls in which torch recorded a CUDA graph, and the memory after the eighth."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds: list[float] = []
        self.reserved = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which recordings count."""
        from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

        original: Any = CUDAGraphTreeManager.record_function

        def counted(manager: Any, *args: Any) -> Any:
            self.count += 1
            return original(manager, *args)

        with mock.patch.object(CUDAGraphTreeManager, "record_function", counted):
            yield

    def call(self, run: Run, given: Tensor) -> None:
        """Call *run*, and note what it recorded."""
        before, start = self.count, time.perf_counter()
        run(given)
        _wait()
        if self.count > before:
            self.seconds.append(time.perf_counter() - start)
            if len(self.seconds) == GRAPHS:
                self.reserved = _reserved()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 1


def arms_of(model: nn.Module, case: str, keys: Sequence[Any]) -> dict[str, Callable[[Any], Run]]:
    """What runs a size in each arm; all share the weights, and nothing that Dynamo keeps."""

    def compiled(*, dynamic: bool = True, **options: Any) -> Run:
        own = _Alone(sharing_weights(model))
        named = {name.replace("_", ".", 1): value for name, value in options.items()}
        return torch.compile(own, backend="magi", dynamic=dynamic, options=named or None)

    none, graphs = compiled(), compiled(magi_graphs=GRAPHS)
    found: dict[str, Callable[[Any], Run]] = {"none": lambda _: none, "graphs": lambda _: graphs}
    if case == "decode":
        fixed = {key: compiled(dynamic=False, triton_cudagraphs=True) for key in keys}
        found["fixed"] = lambda key: fixed[key]
    if case == "all sizes":
        buckets = compiled(magi_graphs=GRAPHS, magi_buckets={"tokens": {0: BATCHES}})
        found["buckets"] = lambda _: buckets
    return found


class _Alone(nn.Module):
    """A model with code of its own, so that no call passes the guards of another."""

    def __new__(cls, _: nn.Module) -> Self:
        return super().__new__(type("_Alone", (cls,), {"forward": _copied(cls.forward)}))

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens)


def _copied(function: Any) -> Any:
    """The same function with code of its own, which Dynamo compiles for itself."""
    made = type(function)(function.__code__.replace(), function.__globals__, function.__name__)
    made.__qualname__ = function.__qualname__
    return made


def check(run: Run, model: nn.Module, given: Tensor, key: Any) -> None:
    """Compare a call with eager.

    Raises:
        AssertionError: It is too far.
    """
    ours, theirs = run(given).last_hidden_state.float(), model(given).last_hidden_state.float()
    worst = (ours - theirs).abs().max().item() / theirs.abs().max().item()
    assert worst < 0.05, f"{key}: off by {worst:.3f} of the largest value"


def measure(model: nn.Module, shapes: Mapping[Any, tuple[int, int]], calls: int, repeats: int, case: str) -> list[Row]:
    """The rows of one case."""
    device = next(model.parameters()).device
    inputs = {key: torch.randint(0, 97, shape, device=device) for key, shape in shapes.items()}
    order = random.Random(0).choices(list(shapes), k=calls)  # noqa: S311 - a seed for an order
    torch.compiler.reset()
    arms, recorder, memory = arms_of(model, case, list(shapes)), Recorder(), (1, 1)
    for name, run_of in arms.items():
        start = time.perf_counter()
        if name == "graphs":
            with recorder.counting():
                for key in order * 2:
                    recorder.call(run_of(key), inputs[key])
            memory = (recorder.reserved or _reserved(), _reserved())
        else:
            for key in (*inputs, *inputs, *inputs, *order, *order):  # static code is recorded in its second call
                run_of(key)(inputs[key])
        _wait()
        say(f"{case}, {name}: settled in {time.perf_counter() - start:.1f} s")
        with recorder.counting() if name == "graphs" else nullcontext():
            for key, given in inputs.items():
                check(run_of(key), model, given, key)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats):
        for name in list(arms) if repeat % 2 == 0 else reversed(list(arms)):
            with recorder.counting() if name == "graphs" else nullcontext():
                _wait()
                start = time.perf_counter()
                for key in order:
                    arms[name](key)(inputs[key])
                _wait()
                seconds[name].append((time.perf_counter() - start) / calls)
    shown = ", ".join(f"{name} {1e3 * statistics.median(took):.3f} ms" for name, took in seconds.items())
    say(f"{case}: {shown}; {recorder.count} recordings")
    if recorder.seconds:
        # Those of timed passes are not timed by themselves.
        seconds["recordings"] = recorder.seconds + [0.0] * (recorder.count - len(recorder.seconds))
    return [replace(row, bytes=memory) if row.arm == "graphs" else row for row in rows_of(case, seconds)]


def _is_making() -> bool:
    """Whether code is made beside the calls; `magi_backend.wait` would let garbage be collected again."""
    return any(thread.name == "magi hot sizes" for thread in threading.enumerate())


def measure_beside(name: str, *, tiny: bool) -> list[Row]:
    """The rows of a decoder of real_decoders that decodes two sizes in turn while code for one is made."""
    torch.compiler.reset()
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    kind = MODELS[name]
    latents = [kind.arguments(device, dtype, tiny=tiny, second=second)["latent"] for second in (False, True)]
    with torch.device(device):
        model = kind.build(tiny=tiny).to(dtype)

    def compiled(**options: Any) -> Callable[[Tensor], tuple[float, Tensor]]:
        own = sharing_weights(model)
        part = compiled_part(own)
        part.forward = torch.compile(part.forward, backend="magi", dynamic=True, options=options)

        def timed(latent: Tensor) -> tuple[float, Tensor]:
            _wait()
            start = time.perf_counter()
            result = decode(own, latent)
            _wait()
            return time.perf_counter() - start, result

        for latent in latents:
            timed(latent)
        return timed

    none = compiled()
    general = [[none(latent)[0] for _ in range(1 + LATER)][1:] for latent in latents]
    expected = [none(latent)[1] for latent in latents]
    # The general code is found in the caches, so this compiles nothing until a size has come back.
    hot = compiled(**{"magi.hot_sizes": 1, "magi.hot_in_background": True})
    seconds: list[list[float]] = [[] for _ in latents]
    end, idle = time.monotonic() + MOST_SECONDS_BESIDE, 0
    while idle < IDLE and time.monotonic() < end:
        idle = 0 if _is_making() else idle + 1
        for place, latent in enumerate(latents):
            took, result = hot(latent)
            seconds[place].append(took)
            worst = (result - expected[place]).abs().max().item() / expected[place].abs().max().item()
            assert worst < 0.1, f"{name}: off by {worst:.3f} of the largest value"
    rows = list[Row]()
    for which, of, all_of in zip(("first", "second"), general, seconds, strict=True):
        made, later = all_of[:-LATER], all_of[-LATER:]
        shown = [f"{1e3 * each:.0f}" for each in (statistics.median(of), statistics.median(later), *sorted(made)[-5:])]
        sys.stderr.write(f"{name}, {which} size, {len(made)} calls: general, later, worst: {', '.join(shown)} ms\n")
        rows += rows_of(f"{name}, {which} size", dict(zip(BESIDE, (of, made, later), strict=True)))
    return rows


def main() -> None:
    """Measure the cases, and print a short table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, to see that all runs")
    parser.add_argument("--cases", default="decode,all sizes,prefill,wan21", help="comma-separated; others stay")
    options = parser.parse_args()
    calls, repeats = (40, 2) if options.tiny else (CALLS, options.repeats)
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 (documented)
    lengths = (1, 4, 9) if options.tiny else LENGTHS
    cases: dict[str, dict[Any, tuple[int, int]]] = {
        "decode": {rows: (rows, TOKENS) for rows in (BATCHES[:3] if options.tiny else BATCHES)},
        "all sizes": {rows: (rows, TOKENS) for rows in range(1, 65)},
        "prefill": {length: (1, length) for length in lengths},
    }
    chosen, rows = options.cases.split(","), list[Row]()
    with torch.no_grad(), empty_caches():
        with torch.device("cpu" if options.tiny else "cuda"):
            model = llama(tiny=options.tiny)
        for case in chosen:
            if case in MODELS:
                rows += measure_beside(case, tiny=options.tiny)
            else:
                rows += measure(model, cases[case], calls, repeats, case)
    if options.tiny:
        return
    measured = {row.case for row in rows}
    others = [row for row in rows_written("varying_sizes") if row.case not in measured]
    write("varying_sizes", [*rows, *others], note=NOTE)


if __name__ == "__main__":
    main()
