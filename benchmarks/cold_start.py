# SPDX-License-Identifier: Apache-2.0
"""From the start of a process to its answers: compile time with empty caches, a later call, and starts that are warm.

    python benchmarks/cold_start.py                        # on a machine with a CUDA GPU: cold_start
    python benchmarks/cold_start.py                        # on another one: cold_start_cpu
    python benchmarks/cold_start.py --tiny --case llama32  # a case of the GPU on a CPU; nothing is written

Each (case, arm) is a process with caches of its own. The arms of a case compile at the same time, each on as many
processors; then they are called in turn, while nothing compiles. The time to compile is that of the first two calls,
with Dynamo's part; on a GPU all sizes are symbols (``dynamic=True``). ``whole`` is the backend with ``magi.regions``
off. Then come new processes, one at a time, timed from their start to their first output, so with their imports and
the making of the model, which are all that ``eager`` does. ``stock`` has the caches of its first process, and
``loaded`` has empty ones and a folder that `magi_backend.save` wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

ARMS = {"stock": "stock_dynamic", "magi": "magi_dynamic", "whole": "magi_dynamic:magi.regions=false"}
STARTS = {"eager": "eager", "stock": "stock_dynamic", "loaded": "magi_dynamic"}
NOTE = (
    "Seconds of the first two calls, with empty caches, of a later call, and from the start of a process with warm "
    "caches to its first output. Random weights, no gradients; bfloat16 on a GPU."
)
Case = tuple[Any, Callable[[], object]]
"""A module to compile, and the call to time."""


def _called(model: Any, **given: Any) -> Case:
    return model, lambda: model(**given)


def _llama32(tiny: bool) -> Case:
    import torch
    import transformers

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    small = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=32, vocab_size=32000, **(small if tiny else sizes))
    shape = (2, 13) if tiny else (2, 1000)
    return _called(transformers.LlamaForCausalLM(config), input_ids=torch.randint(0, 32000, shape), use_cache=False)


def _wan_dit(tiny: bool) -> Case:
    import diffusers
    import torch

    sizes = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 96, "freq_dim": 32, "text_dim": 16}
    sizes = sizes if tiny else {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960}
    model = diffusers.WanTransformer3DModel(num_layers=30, **sizes)
    dtype = _dtype()
    latent = torch.randn((1, 16, 2, 6, 8) if tiny else (1, 16, 5, 60, 104), dtype=dtype)
    text = torch.randn(1, 7 if tiny else 226, model.config.text_dim, dtype=dtype)
    return _called(model, hidden_states=latent, timestep=torch.tensor([500]), encoder_hidden_states=text)


def _timm(name: str, tiny: bool) -> Case:
    import timm
    import torch

    return _called(timm.create_model(name), x=torch.randn((1, 3, 96, 64) if tiny else (8, 3, 256, 192), dtype=_dtype()))


def _of_decoders(name: str, tiny: bool) -> Case:
    from _real_models import MODELS, compiled_part, decode, denoise

    kind = MODELS[name]
    model = kind.build(tiny=tiny).to(_device(), _dtype())
    given = kind.arguments(_device(), _dtype(), tiny=tiny, second=False)
    return compiled_part(model), partial(denoise if name == "unet" else decode, model, **given)


def _llama(tiny: bool) -> Case:
    import _real_classes
    import torch

    config = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 500}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = _real_classes._of_transformers("LlamaForCausalLM", config)  # noqa: SLF001 (of the tests)
    return _called(model, input_ids=torch.randint(0, 500, (2, 13)), use_cache=False)


def _classifier(tiny: bool) -> Case:
    import _real_classes
    import torch

    return _called(_real_classes._of_timm("resnet10t", {"num_classes": 10}), x=torch.randn(2, 3, 71, 53))  # noqa: SLF001 (of the tests)


def _breaks(tiny: bool) -> Case:
    import torch

    class Breaks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).relu()
            if x.sum() > 1000:
                x = x + 1
            x = self.second(x).sin()
            if x.sum() > 1000:
                x = x + 2
            return x.cos()

    return _called(Breaks(), x=torch.randn(7, 16))


GPU_CASES: dict[str, Callable[[bool], Case]] = {
    "llama32": _llama32,
    "wan_dit": _wan_dit,
    "sdxl_unet": partial(_of_decoders, "unet"),
    **{name: partial(_of_decoders, name) for name in ("wan21", "wan22", "kl", "cogvideox")},
    **{name: partial(_timm, name) for name in ("densenet121", "hrnet_w18")},
}
CPU_CASES: dict[str, Callable[[bool], Case]] = {"llama": _llama, "classifier": _classifier, "breaks": _breaks}


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype() -> Any:
    import torch

    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def serve(case: str, arm: str, folder: str, *, tiny: bool, started: float) -> None:
    """Print the seconds from *started* to the first output of *case*, and those of two calls.

    Then print those of one call for each line on the standard input. An arm "loaded" loads *folder*; another that is
    the backend saves it in the end.
    """
    import torch
    from _arms import arm_named

    torch.manual_seed(0)
    with torch.device(_device()):
        part, call = (GPU_CASES | CPU_CASES)[case](tiny)
    part.to(_device(), _dtype()).eval().requires_grad_(False)
    how = arm_named((ARMS | STARTS)[arm])
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 (documented)
    if arm == "loaded":
        import magi_backend

        magi_backend.load(folder)
    if how.is_compiled:
        part.forward = how.compile(part.forward, dynamic=True if case in GPU_CASES else None)

    def seconds(calls: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if _device() == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    with torch.no_grad():
        first = seconds()
        print(time.time() - started, flush=True)
        print(first + seconds(), flush=True)
        calls = max(1, round(0.5 / max(seconds(), seconds())))
        for _ in sys.stdin:
            print(seconds(calls), flush=True)
    if arm == "magi":
        import magi_backend

        magi_backend.save(folder)


def _process(case: str, arm: str, folder: str, caches: str, tiny: bool, cores: list[int]) -> subprocess.Popen[str]:
    """A process that runs `serve` on the processors *cores*."""
    command = [sys.executable, __file__, "--serve", case, arm, folder, *(["--tiny"] if tiny else [])]
    environment = {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": f"{caches}/triton"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": str(len(cores))}
    # The first process writes bytecode for the others, as on a machine whose packages have been used before.
    environment |= {"PYTHONPYCACHEPREFIX": str(Path(caches).parent / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), *command, "--started", str(time.time())],
        env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _line(process: subprocess.Popen[str], *, asked: bool = False) -> list[float]:
    """The seconds that *process* prints next, where it is *asked* first; none if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    if asked:
        process.stdin.write("\n")
        process.stdin.flush()
    return [float(line)] if (line := process.stdout.readline()) else []


Seconds = dict[str, list[float]]
"""Those of each arm."""


def measured(case: str, arms: list[str], repeats: int, again: int, *, tiny: bool) -> Iterator[tuple[str, Seconds]]:
    """What was measured, and its seconds: the compilation, *repeats* later calls, and *again* starts."""
    compiled, called, started = Seconds(), Seconds(), Seconds()
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // len(arms))
    with tempfile.TemporaryDirectory() as place:
        folder = f"{place}/saved"
        running = {
            arm: _process(case, arm, folder, f"{place}/{arm}", tiny, cores[at * each : at * each + each] or cores)
            for at, arm in enumerate(arms)
        }
        for arm, process in running.items():
            if _line(process) and (seconds := _line(process)):
                compiled[arm] = seconds
        yield f"{case} compile", compiled
        for repeat in range(repeats):
            for arm in arms if repeat % 2 == 0 else reversed(arms):
                if arm in compiled:
                    called.setdefault(arm, []).extend(_line(running[arm], asked=True))
        yield f"{case} run", called
        for process in running.values():
            process.communicate()
        starts = [
            arm for arm in STARTS if arm == "eager" or Path(folder if arm == "loaded" else f"{place}/{arm}").exists()
        ]
        for repeat in range(again):
            for arm in starts if repeat % 2 == 0 else reversed(starts):
                caches = f"{place}/{arm if arm == 'stock' else repeat}"
                process = _process(case, arm, folder, caches, tiny, cores[:each])
                started.setdefault(arm, []).extend(_line(process))
                process.communicate()
        yield f"{case} start", started


def main() -> None:
    """Measure the cases that are named, or all that this machine is for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=GPU_CASES | CPU_CASES, help="again for several")
    parser.add_argument("--arm", action="append", choices=ARMS, help="again for several; stock and magi by default")
    parser.add_argument("--repeats", type=int, default=7, help="later calls")
    parser.add_argument("--starts", type=int, default=7, help="new processes with warm caches")
    parser.add_argument("--tiny", action="store_true", help="few channels, small sizes; nothing is written")
    parser.add_argument("--serve", nargs=3, metavar=("CASE", "ARM", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(*chosen.serve, tiny=chosen.tiny, started=chosen.started)
        return

    from _results import rows_of, rows_written, say, write

    name, cases = ("cold_start", GPU_CASES) if _device() == "cuda" else ("cold_start_cpu", CPU_CASES)
    for case in chosen.case or cases:
        arms = chosen.arm or ["stock", "magi"]
        for what, seconds in measured(case, arms, chosen.repeats, chosen.starts, tiny=chosen.tiny):
            if not seconds:
                continue
            say(f"{what}: {json.dumps(seconds)}")
            if not chosen.tiny:
                write(name, [row for row in rows_written(name) if row.case != what] + rows_of(what, seconds), note=NOTE)


if __name__ == "__main__":
    main()
