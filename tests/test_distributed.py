# SPDX-License-Identifier: Apache-2.0
"""Two ranks: DDP, FSDP2 and DTensor inputs, compiled with magi, give what one process gives. gloo, or NCCL on GPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from _python import python


PROGRAM = """
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from magi_backend import magi_register_custom_op
from torch import nn

kind, kind_of_device, rank, store = sys.argv[1], sys.argv[2], int(sys.argv[3]), f"file://{sys.argv[4]}"
device = torch.device(kind_of_device, rank if kind_of_device == "cuda" else None)


@dataclass(frozen=True)
class Settings:
    factor: float = 2.0


@magi_register_custom_op(
    "magi_distributed::scale",
    infer_output_meta_fn=["x"],
    setup_context_fn=lambda ctx, inputs, output: setattr(ctx, "settings", inputs[1]),
    backward_fn=lambda ctx, grad: (grad * ctx.settings.factor, None),
)
def scale(x: torch.Tensor, settings: Settings) -> torch.Tensor:
    return x * settings.factor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.settings = Settings(0.5)

    def forward(self, x):
        return self.second(scale(self.first(x).relu(), self.settings)).sin()


def reference(inputs):
    torch.manual_seed(0)
    model = Model().to(device)
    model(inputs).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


if kind_of_device == "cuda":
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=2, init_method=store, device_id=device)
else:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=store)
torch.manual_seed(0)
model = Model().to(device)
inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(device)
mine = inputs.chunk(2)[rank]
options = {"magi.progress": False}

if kind == "ddp":
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model), backend="magi", options=options)
    compiled(mine).square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
elif kind == "fsdp":
    from torch.distributed.fsdp import fully_shard

    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    compiled = torch.compile(model, backend="magi", options=options)
    compiled(mine).square().mean().backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
else:
    from magi_opschema import register_sharding
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    register_sharding(scale, lambda x, settings: [([p], [p, None]) for p in (Replicate(), Shard(0), Shard(1))])
    mesh = init_device_mesh(kind_of_device, (2,))
    x = distribute_tensor(inputs, mesh, [Shard(0)])
    fn = lambda x: scale(x.sin(), Settings(3.0)) + 1
    out = torch.compile(fn, backend="magi", options=options, fullgraph=True)(x)
    assert out.placements == (Shard(0),), out.placements
    torch.testing.assert_close(out.full_tensor(), inputs.sin() * 3.0 + 1)
    found = None

if found is not None:
    expected = reference(inputs)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)
dist.barrier()
dist.destroy_process_group()
print("agrees")
"""


TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs of one host; here: {torch.cuda.device_count()}"
)


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])],
)
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "dtensor"])
def test_two_ranks_agree_with_one_process(kind: str, device: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    for store in (tmp_path / "cold", tmp_path / "warm"):
        with ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(python, program, kind, device, rank, store, env=shared) for rank in range(2)]
        assert [rank.result().splitlines()[-1] for rank in ranks] == ["agrees", "agrees"]
