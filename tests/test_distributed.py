# SPDX-License-Identifier: Apache-2.0
"""Two ranks: DDP and FSDP2 of records, eager and compiled, and DTensors give what one process gives. gloo or NCCL."""

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
class Batch:
    x: torch.Tensor
    factor: float = 0.5


@dataclass(frozen=True)
class Result:
    values: torch.Tensor


@magi_register_custom_op(
    "magi_distributed::scale",
    infer_output_meta_fn=["batch.x"],
    setup_context_fn=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[0].factor),
    backward_fn=lambda ctx, grad: ({"x": grad["values"] * ctx.factor},),
)
def scale(batch: Batch) -> Result:
    return Result(batch.x * batch.factor)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, batch: Batch) -> Result:
        return Result(self.second(scale(Batch(self.first(batch.x).relu())).values).sin())


def step(model, x):
    model(Batch(x)).values.square().mean().backward()


if kind_of_device == "cuda":
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=2, init_method=store, device_id=device)
else:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=store)
alone, model = Model().to(device), Model().to(device)
inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(device)
mine = inputs.chunk(2)[rank]
options = {"magi.progress": False}

if kind == "ddp":
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
elif kind == "fsdp":
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first)
    parallel = fully_shard(model)  # the second layer waits for the gradient of a record
else:
    from magi_opschema import register_sharding
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = (Replicate(), Shard(0), Shard(1))
    register_sharding(scale, lambda batch: [({"values": one}, [{"x": one}]) for one in placements])
    mesh = init_device_mesh(kind_of_device, (2,))
    x = distribute_tensor(inputs, mesh, [Shard(0)])
    fn = lambda x: scale(Batch(x.sin(), 3.0)).values + 1
    out = torch.compile(fn, backend="magi", options=options, fullgraph=True)(x)
    assert out.placements == (Shard(0),), out.placements
    torch.testing.assert_close(out.full_tensor(), inputs.sin() * 3.0 + 1)

if kind != "dtensor":
    step(alone, inputs)
    for eager_or_compiled in (parallel, torch.compile(parallel, backend="magi", options=options)):
        model.zero_grad()
        step(eager_or_compiled, mine)
        for expected, (name, parameter) in zip(alone.parameters(), model.named_parameters(), strict=True):
            found = parameter.grad.full_tensor() if kind == "fsdp" else parameter.grad
            torch.testing.assert_close(found, expected.grad, rtol=1e-4, atol=1e-5, msg=name)
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
