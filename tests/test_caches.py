# SPDX-License-Identifier: Apache-2.0
"""What one process compiled, others find: in a folder, also a read-only one, and in a file that travels."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from _pages import COMPILES_QUICKLY
from _python import python


ROOT = Path(__file__).parent.parent
WARM = {"hits": 1, "misses": 0, "bypasses": 0, "fx_misses": 0}

# The end of every program: what the caches answered, and what the program found itself.
COUNTS = """
import json
from torch._dynamo.utils import counters
aot, fx = counters["aot_autograd"], counters["inductor"]
print(json.dumps({
    "hits": aot["autograd_cache_hit"],
    "misses": aot["autograd_cache_miss"],
    "bypasses": aot["autograd_cache_bypass"] + fx["fxgraph_cache_bypass"],
    "fx_hits": fx["fxgraph_cache_hit"],
    "fx_misses": fx["fxgraph_cache_miss"],
    "found": globals().get("found"),
}))
"""
PROGRAM = """
import sys
from dataclasses import dataclass
import torch
from magi_backend import magi_register_custom_op

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
"""


def run(
    tmp_path: Path, cache: str, *arguments: str, program: str = PROGRAM, by: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What *program* prints at its end, in a process with this cache folder, started *by* another program."""
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache), **COMPILES_QUICKLY}
    file = tmp_path / "program.py"
    file.write_text(program + COUNTS)
    executable, *rest = (*by, sys.executable, file)
    result: dict[str, Any] = json.loads(python(*rest, *arguments, executable=executable, env=own).splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "extra", [pytest.param((), id="whole", marks=pytest.mark.slow), pytest.param(("--boundary",), id="split")]
)
def test_a_second_process_hits_both_caches(tmp_path: Path, extra: tuple[str, ...]) -> None:
    """What stock Inductor left is not taken for ours."""
    artifacts = str(tmp_path / "artifacts")

    run(tmp_path, "first", "stock", artifacts, *extra)
    first = run(tmp_path, "first", "save", artifacts, *extra)
    second = run(tmp_path, "first", "run", artifacts, *extra)
    loaded = run(tmp_path, "elsewhere", "load", artifacts, *extra)

    assert (first["hits"], first["fx_hits"]) == (0, 0)
    assert first["misses"] > 0
    for warm in (second, loaded):
        assert warm["hits"] > 0
        assert {**WARM, "hits": warm["hits"]}.items() <= warm.items()


TWICE = """
import torch
from torch._dynamo.utils import counters

for _ in range(2):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    compiled = torch.compile(torch.nn.Linear(8, 8), backend="magi", dynamic=True)
    compiled(torch.ones(4, 8)).sum().backward()
"""


def test_a_compilation_does_not_change_the_key_of_the_next(tmp_path: Path) -> None:
    """As one did that wrote into what the code of a repair reads."""
    assert WARM.items() <= run(tmp_path, "cache", program=TWICE).items()


SMALL = """
import torch
from magi_backend import magi_register_custom_op

torch._inductor.config.cpp_cache_precompile_headers = False  # torch 2.10 has no variable for it

@magi_register_custom_op("magi_caches::double", infer_output_meta_fn=["x"])
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def model(x):
    return double(x.sin()).cos()

x = torch.arange(4.0)
assert torch.allclose(torch.compile(model, backend="magi")(x), model(x))
"""


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    """As one that is part of a container."""
    assert run(tmp_path, "warm", program=SMALL)["misses"] > 0
    folders = [tmp_path / "warm", *filter(Path.is_dir, (tmp_path / "warm").rglob("*"))]
    # Root may write wherever it wants, unless it gives that right up.
    by = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    try:
        for folder in folders:
            folder.chmod(0o555)
        assert WARM.items() <= run(tmp_path, "warm", program=SMALL, by=by).items()
    finally:
        for folder in folders:
            folder.chmod(0o755)


NOTEBOOK = """
import linecache, os

def run_cell(number, text):
    # As ipykernel does it: the name of a cell holds the number of the process.
    name = f"/tmp/ipykernel_{os.getpid()}/{number}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), globals())

run_cell(0, '''
from dataclasses import dataclass
import torch
from magi_backend import magi_register_custom_op
from torch._dynamo.utils import counters
''')
operator = '''
@dataclass(frozen=True)
class Settings:
    name: str = "FACTOR"

@magi_register_custom_op("magi_notebook::scale", override=True, infer_output_meta_fn=["x"])
def scale(x: torch.Tensor, settings: Settings = Settings()) -> torch.Tensor:
    return x * {"two": 2.0, "five": 5.0}[settings.name]
'''
use = '''
@torch.compile(backend="magi")
def model(x):
    return scale(x).sin()
'''
found = []
for number, (factor, text) in enumerate([("two", operator + use), ("two", operator), ("five", operator)]):
    run_cell(number + 1, text.replace("FACTOR", factor))
    x = torch.arange(4.0)
    assert torch.allclose(model(x), (x * {"two": 2.0, "five": 5.0}[factor]).sin()), number
    found.append([counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss")])
    counters.clear()
"""


@pytest.mark.slow
def test_a_notebook_kernel_is_restarted(tmp_path: Path) -> None:
    """The cell of an operator is run, run again, and edited; the next kernel finds what this one compiled."""
    first = run(tmp_path, "cache", program=NOTEBOOK)
    second = run(tmp_path, "cache", program=NOTEBOOK)

    assert first["found"] == [[0, 1], [1, 0], [0, 1]]
    assert second["found"] == [[1, 0], [1, 0], [1, 0]]


EDITED = """
import sys
import torch
import magi_backend

factor = float(sys.argv[1])

@torch.library.custom_op("magi_edited::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
    return x * factor

scale.register_fake(lambda x, factor=0.0: torch.empty_like(x))

def model(x):
    return scale(x).sin()

x = torch.arange(4.0)
found = {}
for backend in ("inductor", "magi"):
    torch.compiler.reset()
    found[backend] = torch.allclose(torch.compile(model, backend=backend)(x), model(x))
"""


def test_an_edited_default_is_not_served_from_the_cache(tmp_path: Path) -> None:
    """torch's keys have no defaults, and its generated code has them, for operators of torch.library as for ours."""
    assert run(tmp_path, "cache", "2", program=EDITED)["found"] == {"inductor": True, "magi": True}
    found = run(tmp_path, "cache", "5", program=EDITED)["found"]

    assert found["magi"]
    assert not found["inductor"], "torch has mended this: ActiveRepairs need no schemas from this release on"


MODELS = """
import sys
import torch
import _models

name = sys.argv[1]
model = getattr(_models, name)().eval()
inputs = {
    "vae": lambda: torch.randn(1, 4, 8, 8),
    "llama": lambda: torch.randint(0, 97, (2, 12)),
}
torch.manual_seed(1)
x = inputs[name]()
with torch.no_grad():
    out = torch.compile(model, backend="magi", dynamic=True)(x)
    assert torch.allclose(out, model(x), rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["vae", "llama"])
def test_a_second_process_is_warm_on_a_real_model(model: str, tmp_path: Path) -> None:
    first = run(tmp_path, "cache", model, program=MODELS)
    second = run(tmp_path, "cache", model, program=MODELS)

    assert first["misses"] > 0
    assert first["bypasses"] == 0
    assert second["fx_hits"] > 0
    assert WARM.items() <= second.items()


HOT = """
import torch
import magi_backend

weight = torch.randn(3, 3, requires_grad=True)
compiled = torch.compile(
    lambda x: (x @ weight).sin() @ weight, backend="magi", dynamic=True,
    options={"magi.hot_sizes": 2, "magi.hot_after": 2, "magi.compile_sizes": ({"x": (6, 3)},)},
)
for rows in (4, 4, 5, 5, 6, 4):
    x = torch.randn(rows, 3, requires_grad=True)
    compiled(x).sum().backward()
    ours, x.grad = x.grad, None
    ((x @ weight).sin() @ weight).sum().backward()
    assert torch.allclose(ours, x.grad, atol=1e-5)
"""


def test_code_for_single_sizes_is_found_by_a_second_process(tmp_path: Path) -> None:
    """The code for any size, for one that was asked for, and for two that came back; forward and backward."""
    first = run(tmp_path, "cache", program=HOT)
    second = run(tmp_path, "cache", program=HOT)

    assert first["misses"] > 0
    assert first["bypasses"] == 0
    assert {**WARM, "hits": 4}.items() <= second.items()
