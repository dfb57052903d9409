# SPDX-License-Identifier: Apache-2.0
"""Compile time with empty caches, and the time of a call after it, of models in which blocks repeat.

    python benchmarks/cold_start.py                        # on a machine with a CUDA GPU
    python benchmarks/cold_start.py --tiny --case llama32  # any machine

Each (model, arm) is a process with caches of its own. The arms of a model compile at the same time, each on as many
processors; then they are called in turn, while nothing compiles. The time to compile is that of the first call, with
Dynamo's part; all sizes are symbols (``dynamic=True``). ``whole`` is the backend with ``magi.regions`` off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any


ARMS = {"stock": "stock_dynamic", "magi": "magi_dynamic", "whole": "magi_dynamic:magi.regions=false"}
NOTE = "Seconds of the first call, with empty caches, and of a later call. bfloat16 on a GPU, random weights."


def _llama(tiny: bool) -> tuple[Any, dict[str, Any]]:
    import torch
    import transformers

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    small = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=32, vocab_size=32000, **(small if tiny else sizes))
    shape = (2, 13) if tiny else (2, 1000)
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(0, 32000, shape), "use_cache": False}


def _wan_dit(tiny: bool) -> tuple[Any, dict[str, Any]]:
    import diffusers
    import torch

    sizes = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 96, "freq_dim": 32, "text_dim": 16}
    sizes = sizes if tiny else {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960}
    model = diffusers.WanTransformer3DModel(num_layers=30, **sizes)
    latent = (1, 16, 2, 6, 8) if tiny else (1, 16, 5, 60, 104)
    text = torch.randn(1, 7 if tiny else 226, model.config.text_dim)
    return model, {"hidden_states": torch.randn(latent), "timestep": torch.tensor([500]), "encoder_hidden_states": text}


def _timm(name: str, tiny: bool) -> tuple[Any, dict[str, Any]]:
    import timm
    import torch

    return timm.create_model(name), {"x": torch.randn((1, 3, 96, 64) if tiny else (8, 3, 256, 192))}


def _of_decoders(name: str, tiny: bool) -> tuple[Any, dict[str, Any]]:
    import torch
    from _real_models import MODELS, decode, denoise

    kind = MODELS[name]

    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = kind.build(tiny=tiny)

        def forward(self, **given: Any) -> Any:
            return (denoise if name == "unet" else decode)(self.model, **given)

    return Called(), kind.arguments("cpu", torch.float32, tiny=tiny, second=False)


CASES: dict[str, Callable[[bool], tuple[Any, dict[str, Any]]]] = {
    "llama32": _llama,
    "wan_dit": _wan_dit,
    "sdxl_unet": partial(_of_decoders, "unet"),
    "wan21": partial(_of_decoders, "wan21"),
    "kl": partial(_of_decoders, "kl"),
    "densenet121": partial(_timm, "densenet121"),
    "hrnet_w18": partial(_timm, "hrnet_w18"),
}


def serve(case: str, arm: str, *, tiny: bool) -> None:
    """Compile *case*, print the seconds, and then those of a call for each line on the standard input."""
    import torch
    from _arms import arm_named

    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    torch.manual_seed(0)
    with torch.device(device):
        model, given = CASES[case](tiny)
    model = model.to(device, dtype).eval().requires_grad_(False)
    given = {
        name: value.to(device, dtype if value.is_floating_point() else None) if torch.is_tensor(value) else value
        for name, value in given.items()
    }
    compiled = arm_named(ARMS[arm]).compile(model, dynamic=True)

    def seconds(calls: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            compiled(**given)
        if not tiny:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    with torch.no_grad():
        print(seconds(), flush=True)
        calls = max(1, round(0.5 / max(seconds(), seconds())))
        for _ in sys.stdin:
            print(seconds(calls), flush=True)


def measured(case: str, arms: list[str], repeats: int, *, tiny: bool) -> dict[str, dict[str, list[float]]]:
    """The seconds of each of *arms*, by what was measured."""
    found: dict[str, dict[str, list[float]]] = {f"{case} compile": {}, f"{case} run": {}}
    each = max(1, (os.cpu_count() or 1) // len(arms))
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for place, arm in enumerate(arms):
            cores = ",".join(map(str, range(place * each, place * each + each)))
            command = ["taskset", "-c", cores] * (len(arms) > 1)
            command += [sys.executable, __file__, "--serve", case, arm, *(["--tiny"] if tiny else [])]
            environment = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{arm}", "TORCHINDUCTOR_COMPILE_THREADS": str(each)}
            environment |= {"TRITON_CACHE_DIR": f"{folder}/{arm}/triton"}
            running[arm] = subprocess.Popen(
                command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        for arm, process in running.items():
            assert process.stdout is not None
            if line := process.stdout.readline():
                found[f"{case} compile"][arm] = [float(line)]
                sys.stderr.write(f"{time.strftime('%H:%M:%S')} {case} {arm} compiled in {float(line):.1f} s\n")
        for repeat in range(repeats):
            for arm in arms if repeat % 2 == 0 else reversed(arms):
                process = running[arm]
                if arm in found[f"{case} compile"] and process.poll() is None:
                    assert process.stdin is not None
                    assert process.stdout is not None
                    process.stdin.write("\n")
                    process.stdin.flush()
                    found[f"{case} run"].setdefault(arm, []).append(float(process.stdout.readline()))
        for process in running.values():
            process.communicate()
    return found


def main() -> None:
    """Measure the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="again for several")
    parser.add_argument("--arm", action="append", choices=ARMS, help="again for several; stock and magi by default")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="few channels, small sizes, on the CPU; nothing is written")
    parser.add_argument("--serve", nargs=2, metavar=("CASE", "ARM"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(*chosen.serve, tiny=chosen.tiny)
        return

    from _results import rows_of, rows_written, write

    cases = chosen.case or list(CASES)
    names = {f"{case} {what}" for case in cases for what in ("compile", "run")}
    rows = [row for row in rows_written("cold_start") if row.case not in names]
    for case in cases:
        for name, seconds in measured(case, chosen.arm or ["stock", "magi"], chosen.repeats, tiny=chosen.tiny).items():
            sys.stderr.write(f"{name}: {json.dumps(seconds)}\n")
            rows += rows_of(name, seconds)
        if not chosen.tiny:
            write("cold_start", rows, note=NOTE)


if __name__ == "__main__":
    main()
