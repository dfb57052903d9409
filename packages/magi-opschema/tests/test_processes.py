# SPDX-License-Identifier: Apache-2.0
"""What holds between processes: what an import loads, compile caches, forks, spawns, two ranks, handles of objects."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from _python import python
from torch.torch_version import TorchVersion


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


HANDLES = """
import torch
from torch import Tensor, nn
from magi_opschema import ObjectHandle, errors, get_object, magi_register_custom_op, register_object

class Runner:
    def __init__(self, scale):
        self.scale = scale

@magi_register_custom_op("handle_process::run", infer_output_meta_fn=["x"])
def run(x: Tensor, runner: ObjectHandle[Runner]) -> Tensor:
    return x * runner.scale

class Layer(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.runner = Runner(scale)
        register_object(self.runner)

    def forward(self, x):
        return run(x, self.runner) + 1

x = torch.ones(2)
"""


def run(script: str, tmp_path: Path, op: str = OP, **environment: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(op + textwrap.dedent(script))
    return python(path, env={"OMP_NUM_THREADS": "1", **environment})


def test_import_loads_no_torch_and_registering_loads_no_compiler(tmp_path: Path) -> None:
    before = """
    import sys
    import magi_opschema
    assert "torch" not in sys.modules
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
    assert run(textwrap.dedent(before) + OP + textwrap.dedent(after), tmp_path, op="").strip() == "[]"


def test_exported_programs_in_another_process(tmp_path: Path) -> None:
    """One with a record runs there; one with an object runs here, and says there why it cannot."""
    records, objects = str(tmp_path / "records.pt2"), str(tmp_path / "objects.pt2")
    export = f"""
    class Model(torch.nn.Module):
        def forward(self, x, w):
            return apply(x, Config(w, 3.0)) + apply(x, Config(w, mode="add"))

    rows = torch.export.Dim("rows")
    program = torch.export.export(Model(), (torch.ones(4, 2), torch.ones(2)), dynamic_shapes=({{0: rows}}, None))
    torch.export.save(program, {records!r})
    exported = torch.export.export(Layer(3.0), (x,))
    torch.export.save(exported, {objects!r})
    print(exported.module()(x).tolist(), torch.export.load({objects!r}).module()(x).tolist())
    """
    load = f"""
    model = torch.export.load({records!r}).module()
    print(model(torch.ones(3, 2), torch.tensor([1.0, 2.0])).tolist())
    try:
        torch.export.load({objects!r}).module()(x)
    except errors.HandleError as error:
        print("a program that loads what this one pickled or exported" in str(error))
    """
    assert run(export, tmp_path, OP + HANDLES).strip() == "[4.0, 4.0] [4.0, 4.0]"
    assert run(load, tmp_path, OP + HANDLES).splitlines() == ["[[5.0, 10.0], [5.0, 10.0], [5.0, 10.0]]", "True"]


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


def test_a_process_group_on_two_ranks(tmp_path: Path) -> None:
    """Alone, optional, in a list and in a record: the body of an op talks to the other rank, eager and compiled."""
    script = """
    import os, tempfile
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.distributed import ProcessGroup

    @dataclass(frozen=True)
    class Plan:
        weight: Tensor
        group: ProcessGroup | None = None

    def total(x, group):
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    def save_plan(ctx, inputs, output):
        ctx.save_for_backward(inputs[1].weight)

    def plan_backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None

    @magi_register_custom_op(
        "ranks::planned", infer_output_meta_fn=["x"], setup_context_fn=save_plan, backward_fn=plan_backward
    )
    def planned(x: Tensor, plan: Plan) -> Tensor:
        weighted = x * plan.weight
        return weighted if plan.group is None else total(weighted, plan.group)

    @magi_register_custom_op("ranks::several", infer_output_meta_fn=["x"])
    def several(x: Tensor, group: ProcessGroup, more: list[ProcessGroup]) -> Tensor:
        for one in [group, *more]:
            x = total(x, one)
        return x

    def run(x, group, other):
        fixed, plan = x.detach(), Plan(torch.full((2,), 3.0), group)
        return planned(x, plan) + 1, planned(x, Plan(fixed)), several(fixed, group, [other])

    def work(rank, path):
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        everyone, other = dist.group.WORLD, dist.new_group([0, 1])
        x = torch.full((2,), rank + 1.0, requires_grad=True)
        for call in [run, *(torch.compile(run, fullgraph=True, backend=name) for name in ("aot_eager", "inductor"))]:
            for group, second in ((everyone, other), (other, everyone)):
                added, alone, both = call(x, group, second)
                assert added.tolist() == [(1 + 2) * 3 + 1] * 2, added
                assert alone.tolist() == [(rank + 1.0) ** 2] * 2
                assert both.tolist() == [(1 + 2) * 2] * 2
                assert torch.autograd.grad(added.sum(), x)[0].tolist() == [3.0] * 2
        dist.barrier()
        os._exit(0)

    if __name__ == "__main__":
        mp.start_processes(work, (tempfile.mktemp(),), nprocs=2, start_method="fork")
        print("equal")
    """
    assert run(script, tmp_path).strip().endswith("equal")


def test_a_forked_child_knows_what_was_registered_before(tmp_path: Path) -> None:
    script = """
    import os
    runner, late = Runner(3.0), Runner(4.0)
    before = register_object(runner)
    receive, send = os.pipe()
    to_child, from_parent = os.pipe()
    if os.fork() == 0:
        after = int(os.read(to_child, 100))
        lines = [str(run(x, before).tolist()), str(run(x, runner).tolist())]
        try:
            run(x, after)
        except errors.HandleError as error:
            lines.append(str("is not a handle of this process" in str(error) or "stale" in str(error)))
        own = register_object(Runner(5.0))
        lines.append(str(own != after and run(x, own).tolist() == [5.0, 5.0]))
        os.write(send, chr(10).join(lines).encode())
        os._exit(0)
    os.write(from_parent, str(int(register_object(late))).encode())
    os.wait()
    print(os.read(receive, 1000).decode())
    """
    assert run(script, tmp_path, HANDLES).splitlines() == ["[3.0, 3.0]", "[3.0, 3.0]", "True", "True"]


@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.slow), "spawn"])
def test_worker_process(tmp_path: Path, method: str) -> None:
    """It has the ops with their gradients; one that was spawned knows no handle."""
    script = f"""
    import multiprocessing
    torch.set_num_threads(1)

    def work(queue, handle, runner):
        x = torch.ones(2, requires_grad=True)
        y = apply(x, Config(torch.full((2,), 3.0)))
        y.sum().backward()
        queue.put((y.tolist(), x.grad.tolist(), run(x, runner).tolist()))
        try:
            run(x, handle)
            queue.put("known")
        except errors.HandleError as error:
            queue.put("not in a spawned worker" in str(error))

    if __name__ == "__main__":
        runner = Runner(3.0)
        handle = register_object(runner)
        context = multiprocessing.get_context("{method}")
        queue = context.Queue()
        worker = context.Process(target=work, args=(queue, handle, runner))
        worker.start()
        print(queue.get(timeout=120), queue.get(timeout=120))
        worker.join()
    """
    expected = f"([6.0, 6.0], [6.0, 6.0], [3.0, 3.0]) {'known' if method == 'fork' else True}"
    assert run(script, tmp_path, OP + HANDLES).strip() == expected


@pytest.mark.slow
@pytest.mark.parametrize("passed", ["self.runner", "self.handle"])
def test_compile_caches_serve_other_objects(tmp_path: Path, passed: str) -> None:
    cache, hit = "aot_autograd", "autograd_cache_hit"
    if TorchVersion(torch.__version__) >= "2.15":  # the key of AOTAutograd has the number of a handle
        cache, hit = "inductor", "fxgraph_cache_hit"
    script = f"""
    from torch._dynamo.utils import counters

    class Own(Layer):
        def __init__(self, scale):
            super().__init__(scale)
            self.handle = register_object(self.runner)

        def forward(self, x):
            return run(x, {passed}) + 1

    print(torch.compile(Own(3.0), fullgraph=True)(x).tolist(), counters[{cache!r}][{hit!r}])
    """
    folder = str(tmp_path / "cache")
    assert run(script, tmp_path, HANDLES, TORCHINDUCTOR_CACHE_DIR=folder).splitlines() == ["[4.0, 4.0] 0"]
    assert run(script, tmp_path, HANDLES, TORCHINDUCTOR_CACHE_DIR=folder).splitlines() == ["[4.0, 4.0] 1"]
