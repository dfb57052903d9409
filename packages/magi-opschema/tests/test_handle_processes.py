# SPDX-License-Identifier: Apache-2.0
"""Object handles outside the process that gave them: pickled, forked, spawned, exported, and in compile caches."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


OP = """
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


def execute(script: str, folder: Path, **environment: str) -> list[str]:
    path = folder / "script.py"
    path.write_text(OP + textwrap.dedent(script))
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


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
    assert execute(script, tmp_path) == ["[3.0, 3.0]", "[3.0, 3.0]", "True", "True"]


def test_a_spawned_worker_knows_no_handle(tmp_path: Path) -> None:
    script = """
    import multiprocessing

    def work(queue, handle, runner):
        queue.put(run(x, runner).tolist())
        try:
            run(x, handle)
        except errors.HandleError as error:
            queue.put("not in a spawned worker" in str(error))

    if __name__ == "__main__":
        runner = Runner(3.0)
        handle = register_object(runner)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        worker = context.Process(target=work, args=(queue, handle, runner))
        worker.start()
        print(queue.get(timeout=120), queue.get(timeout=120))
        worker.join()
    """
    assert execute(script, tmp_path) == ["[3.0, 3.0] True"]


def test_a_pickled_module_is_registered_again(tmp_path: Path) -> None:
    script = """
    import pickle
    layer = Layer(3.0)
    torch.compile(layer, backend="eager", fullgraph=True)(x)
    other = pickle.loads(pickle.dumps(layer))
    other.runner.scale = 5.0
    print(other(x).tolist(), torch.compile(other, backend="eager", fullgraph=True)(x).tolist(), layer(x).tolist())
    handle = register_object(layer.runner)
    print(get_object(pickle.loads(pickle.dumps(handle))) is layer.runner)
    """
    assert execute(script, tmp_path) == ["[6.0, 6.0] [6.0, 6.0] [4.0, 4.0]", "True"]


def test_an_exported_program_runs_here_and_says_elsewhere_why_not(tmp_path: Path) -> None:
    program = tmp_path / "program.pt2"
    script = f"""
    layer = Layer(3.0)
    exported = torch.export.export(layer, (x,))
    print(exported.module()(x).tolist())
    torch.export.save(exported, {str(program)!r})
    print(torch.export.load({str(program)!r}).module()(x).tolist())
    """
    assert execute(script, tmp_path) == ["[4.0, 4.0]", "[4.0, 4.0]"]
    script = f"""
    try:
        torch.export.load({str(program)!r}).module()(x)
    except errors.HandleError as error:
        print("a program that loads what this one pickled or exported" in str(error))
    """
    assert execute(script, tmp_path) == ["True"]


@pytest.mark.slow
@pytest.mark.parametrize("passed", ["self.runner", "self.handle"])
def test_compile_caches_serve_other_objects(tmp_path: Path, passed: str) -> None:
    script = f"""
    from torch._dynamo.utils import counters

    class Own(Layer):
        def __init__(self, scale):
            super().__init__(scale)
            self.handle = register_object(self.runner)

        def forward(self, x):
            return run(x, {passed}) + 1

    print(torch.compile(Own(3.0), fullgraph=True)(x).tolist(), counters["aot_autograd"]["autograd_cache_hit"])
    """
    cache = str(tmp_path / "cache")
    assert execute(script, tmp_path, TORCHINDUCTOR_CACHE_DIR=cache) == ["[4.0, 4.0] 0"]
    assert execute(script, tmp_path, TORCHINDUCTOR_CACHE_DIR=cache) == ["[4.0, 4.0] 1"]
