# SPDX-License-Identifier: Apache-2.0
"""What holds between processes: what an import loads, compile caches, forks, spawns, two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


OP = """
from dataclasses import dataclass, field
from typing import Literal
import torch
from torch import Tensor
from magi_opschema import magi_register_custom_op

@dataclass(frozen=True)
class Config:
    weight: Tensor
    factor: float = 2.0
    mode: Literal["add", "mul"] = "mul"

def save(ctx, inputs, output):
    ctx.save_for_backward(inputs[1].weight)

def backward(ctx, grad):
    return grad * ctx.saved_tensors[0] * 2, None

@magi_register_custom_op("process::apply", infer_output_meta_fn=["x"], setup_context_fn=save, backward_fn=backward)
def apply(x: Tensor, cfg: Config) -> Tensor:
    return x * cfg.weight * cfg.factor
"""


def run(script: str, tmp_path: Path, *, with_op: bool = True, **environment: str) -> str:
    path = tmp_path / "script.py"
    path.write_text((OP if with_op else "") + textwrap.dedent(script))
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_no_torch_and_registering_loads_no_compiler(tmp_path: Path) -> None:
    before = """
    import sys
    import magi_opschema
    assert "torch" not in sys.modules
    assert set(dir(magi_opschema)) >= set(magi_opschema.__all__)
    magi_opschema.errors
    assert "torch" not in sys.modules
    for name in magi_opschema.__all__:
        getattr(magi_opschema, name)
    """
    after = """
    siblings = ("magi_tritonwrap", "magi_passes", "magi_backend")
    forbidden = ("triton", "torch._inductor", "torch._dynamo", "pydantic", *siblings)
    print([name for name in forbidden if name in sys.modules])
    """
    assert run(textwrap.dedent(before) + OP + textwrap.dedent(after), tmp_path, with_op=False).strip() == "[]"


@pytest.mark.slow  # tests/test_caches.py has the fast ones
def test_second_process_hits_the_compile_caches(tmp_path: Path) -> None:
    script = """
    from torch._dynamo.utils import counters
    x = torch.ones(8, requires_grad=True)
    torch.compile(lambda x, w: apply(x, Config(w)).relu(), fullgraph=True)(x, torch.ones(8)).sum().backward()
    print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
    """
    cache = str(tmp_path / "cache")
    assert run(script, tmp_path, TORCHINDUCTOR_CACHE_DIR=cache).split() == ["0", "1"]
    assert run(script, tmp_path, TORCHINDUCTOR_CACHE_DIR=cache).split() == ["1", "0"]


def test_an_exported_program_is_loaded_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    export = f"""
    class Model(torch.nn.Module):
        def forward(self, x, w):
            return apply(x, Config(w, 3.0)) + apply(x, Config(w, mode="add"))

    rows = torch.export.Dim("rows")
    program = torch.export.export(Model(), (torch.ones(4, 2), torch.ones(2)), dynamic_shapes=({{0: rows}}, None))
    torch.export.save(program, {str(path)!r})
    """
    load = f"""
    model = torch.export.load({str(path)!r}).module()
    print(model(torch.ones(3, 2), torch.tensor([1.0, 2.0])).tolist())
    """
    run(export, tmp_path)
    assert run(load, tmp_path).strip() == "[[5.0, 10.0], [5.0, 10.0], [5.0, 10.0]]"


@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.slow), "spawn"])
def test_worker_process(tmp_path: Path, method: str) -> None:
    script = f"""
    import multiprocessing
    torch.set_num_threads(1)

    def work(queue):
        x = torch.ones(2, requires_grad=True)
        y = apply(x, Config(torch.full((2,), 3.0)))
        y.sum().backward()
        queue.put((y.tolist(), x.grad.tolist()))

    if __name__ == "__main__":
        context = multiprocessing.get_context("{method}")
        queue = context.Queue()
        worker = context.Process(target=work, args=(queue,))
        worker.start()
        print(queue.get(timeout=120))
        worker.join()
    """
    assert run(script, tmp_path).strip() == "([6.0, 6.0], [6.0, 6.0])"


def test_dtensors_on_two_ranks(tmp_path: Path) -> None:
    script = """
    import os, tempfile
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from magi_opschema import register_sharding

    @register_sharding(apply)
    def rule(x, cfg):
        replicated = ([Replicate()], [Replicate(), {"weight": Replicate()}])
        rows = ([Shard(0)], [Shard(0), {"weight": Replicate()}])
        return [replicated, rows]

    def work(rank, path):
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        full, weight = torch.arange(12.0).reshape(4, 3), torch.arange(3.0)
        x, w = distribute_tensor(full, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()])
        y = apply(x, Config(w))
        assert y.placements == (Shard(0),), y.placements
        assert y.to_local().shape == (2, 3)
        torch.testing.assert_close(y.full_tensor(), full * weight * 2)
        dist.barrier()
        # A rank aborted once while Python shut down, perhaps because a thread of gloo still had a tensor to drop.
        os._exit(0)

    if __name__ == "__main__":
        mp.start_processes(work, (tempfile.mktemp(),), nprocs=2, start_method="fork")  # torch is imported once
        print("equal")
    """
    assert run(script, tmp_path).strip().endswith("equal")
