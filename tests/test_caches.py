# SPDX-License-Identifier: Apache-2.0
"""A second process finds what the first one compiled, also when the cache travels as a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parent.parent


ATTEMPT = (
    "Dynamo compiles the float of a dataclass as a symbol first, and starts anew when it has to be a constant: "
    "that first attempt ends before there is anything to remember, with every backend"
)

PROGRAM = """
import json, sys
from dataclasses import dataclass
import torch
from magi_backend import explain, magi_register_custom_op
from torch._dynamo.utils import counters

@dataclass(frozen=True)
class Settings:
    scale: float = 2.0

@magi_register_custom_op(
    "magi_caches::scale",
    infer_output_meta_fn=["x"],
    setup_context_fn=lambda ctx, inputs, output: setattr(ctx, "settings", inputs[1]),
    backward_fn=lambda ctx, grad: (grad * ctx.settings.scale, None),
    is_subgraph_boundary="--boundary" in sys.argv,
)
def scale(x: torch.Tensor, settings: Settings) -> torch.Tensor:
    return x * settings.scale

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.settings = Settings(3.0)
    def forward(self, x):
        return self.second(scale(self.first(x).relu(), self.settings)).sin()

action, file = sys.argv[1:3]
if action == "load":
    torch.compiler.load_cache_artifacts(open(file, "rb").read())
torch.manual_seed(0)
model, x = Model(), torch.randn(4, 8)
compiled = torch.compile(model, backend="inductor" if action == "stock" else "magi", dynamic=True)
loss = compiled(x).square().mean()
loss.backward()
reference = model(x).square().mean()
assert torch.allclose(loss, reference, atol=1e-5)
if action == "save":
    artifacts, _ = torch.compiler.save_cache_artifacts()
    open(file, "wb").write(artifacts)
print(json.dumps({
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "bypasses": counters["aot_autograd"]["autograd_cache_bypass"] + counters["inductor"]["fxgraph_cache_bypass"],
    "fx_misses": counters["inductor"]["fxgraph_cache_miss"],
    "fx_hits": counters["inductor"]["fxgraph_cache_hit"],
}))
"""


def run(tmp_path: Path, cache: str, *arguments: str, program: str = PROGRAM) -> dict[str, Any]:
    file = tmp_path / "program.py"
    file.write_text(program)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    done = subprocess.run(
        [sys.executable, file, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("extra", "attempts"),
    [pytest.param((), 1, id="whole", marks=pytest.mark.slow), pytest.param(("--boundary",), 0, id="split")],
)
def test_a_second_process_hits_both_caches(tmp_path: Path, extra: tuple[str, ...], attempts: int) -> None:
    artifacts = str(tmp_path / "artifacts")

    first = run(tmp_path, "first", "save", artifacts, *extra)
    second = run(tmp_path, "first", "run", artifacts, *extra)
    loaded = run(tmp_path, "elsewhere", "load", artifacts, *extra)

    assert first["hits"] == 0
    assert first["misses"] > 0
    for warm in (second, loaded):
        assert warm["hits"] > 0
        assert warm["misses"] == attempts, ATTEMPT
        assert (warm["fx_misses"], warm["bypasses"]) == (0, 0)


def test_what_stock_inductor_left_is_not_taken_for_ours(tmp_path: Path) -> None:
    run(tmp_path, "shared", "stock", "-")

    ours = run(tmp_path, "shared", "run", "-")

    assert ours["hits"] == 0
    assert ours["fx_hits"] == 0


MODELS = """
import json, sys
import torch
import _models
from torch._dynamo.utils import counters

name = sys.argv[1]
model = getattr(_models, name)().eval()
inputs = {
    "vae": lambda: torch.randn(1, 4, 8, 8),
    "llama": lambda: torch.randint(0, 97, (2, 12)),
    "vit": lambda: torch.randn(2, 3, 32, 32),
}
torch.manual_seed(1)
x = inputs[name]()
with torch.no_grad():
    out = torch.compile(model, backend="magi", dynamic=True)(x)
    assert torch.allclose(out, model(x), rtol=1e-4, atol=1e-4)
print(json.dumps({
    "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
    "aot_misses": counters["aot_autograd"]["autograd_cache_miss"],
    "aot_bypasses": counters["aot_autograd"]["autograd_cache_bypass"],
    "fx_misses": counters["inductor"]["fxgraph_cache_miss"],
    "fx_bypasses": counters["inductor"]["fxgraph_cache_bypass"],
    "fx_hits": counters["inductor"]["fxgraph_cache_hit"],
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["vae", "llama", "vit"])
def test_a_second_process_is_warm_on_a_real_model(model: str, tmp_path: Path) -> None:
    first = run(tmp_path, "cache", model, program=MODELS)
    second = run(tmp_path, "cache", model, program=MODELS)

    assert first["aot_misses"] > 0
    assert first["aot_bypasses"] == first["fx_bypasses"] == 0
    assert second["aot_hits"] == 1
    assert second["aot_misses"] == first["aot_misses"] - 1, ATTEMPT
    assert second["fx_hits"] > 0
    assert (second["aot_bypasses"], second["fx_misses"], second["fx_bypasses"]) == (0, 0, 0)
