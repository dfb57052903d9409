# SPDX-License-Identifier: Apache-2.0
"""How long a new process takes to its first output on a CPU: eager, stock from warm caches, and a loaded folder.

The arm ``stock`` is ``torch.compile`` with the caches of an earlier process in place. The arm ``loaded`` begins with
empty caches and a folder that `magi_backend.save` wrote. The time runs from the start of the process, so it includes
the imports of torch and of the model's library, and making the model, which are all that ``eager`` does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

REPEATS = 7
CASES = ("llama", "classifier", "breaks")
ARMS = ("eager", "stock", "loaded")
NOTE = (
    "Seconds from the start of a process to its first output: a Llama of transformers with four tiny layers, a "
    "classifier of timm (`resnet10t`), and a module with two graph breaks. Random weights, odd sizes, no gradients."
)


def made(case: str) -> Callable[[Callable[..., Any]], object]:
    """A function that calls what its argument makes of the model of *case*."""
    import _real_classes
    import torch

    if case == "llama":
        config = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 500}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = _real_classes._of_transformers("LlamaForCausalLM", config)  # noqa: SLF001 (of the tests)
        inputs: dict[str, object] = {"input_ids": torch.randint(0, 500, (2, 13)), "use_cache": False}
        return lambda way: way(model.eval())(**inputs)
    if case == "classifier":
        model = _real_classes._of_timm("resnet10t", {"num_classes": 10})  # noqa: SLF001 (of the tests)
        return lambda way: way(model.eval())(torch.randn(2, 3, 71, 53))

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

    return lambda way: way(Breaks().eval())(torch.randn(7, 16))


def run(case: str, arm: str, folder: Path, *, saves: bool, started: float) -> None:
    """Print the seconds from *started* to the first output of *case*."""
    import torch

    call = made(case)
    if arm == "loaded" and not saves:
        import magi_backend

        magi_backend.load(folder)
    backend = "inductor" if arm == "stock" else "magi"
    with torch.no_grad():
        call((lambda model: model) if arm == "eager" else lambda model: torch.compile(model, backend=backend))
    seconds = time.time() - started
    if arm == "loaded" and saves:
        import magi_backend

        magi_backend.save(folder)
    sys.stdout.write(f"{seconds}\n")


def seconds(case: str, arm: str, folder: Path, caches: Path, *, saves: bool = False) -> float:
    """What `run` prints in a process of its own."""
    command = [sys.executable, __file__, "--run", case, arm, str(folder), "--started", str(time.time())]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches)}
    found = subprocess.run(
        [*command, *(["--saves"] if saves else [])], env=environment, check=True, capture_output=True, text=True
    )
    return float(found.stdout.split()[-1])


def main() -> None:
    """Measure the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="again for several")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--run", nargs=3, metavar=("CASE", "ARM", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--saves", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        case, arm, folder = chosen.run
        run(case, arm, Path(folder), saves=chosen.saves, started=chosen.started)
        return

    from _results import rows_of, rows_written, write

    cases = chosen.case or CASES
    rows = [row for row in rows_written("cold_start_cpu") if row.case not in cases]
    for case in cases:
        found: dict[str, list[float]] = {arm: [] for arm in ARMS}
        with tempfile.TemporaryDirectory() as place:
            folder, stock = Path(place, "warm"), Path(place, "stock")
            seconds(case, "stock", folder, stock)
            seconds(case, "loaded", folder, Path(place, "first"), saves=True)
            for repeat in range(chosen.repeats):
                for arm in ARMS if repeat % 2 == 0 else reversed(ARMS):
                    caches = stock if arm == "stock" else Path(place, f"empty {repeat}")
                    found[arm].append(seconds(case, arm, folder, caches))
                    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {case} {arm} {found[arm][-1]:.2f} s\n")
        rows += rows_of(case, found)
    write("cold_start_cpu", rows, note=NOTE)


if __name__ == "__main__":
    main()
