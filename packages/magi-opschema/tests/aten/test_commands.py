# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from magi_opschema._cli import main


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=cwd, check=False, env=env
    )


def test_new_writes_a_kernel_per_overload_and_a_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aten", "new", "add", "--slot", "3", "--out", str(tmp_path / "kernels")]) == 0

    text = (tmp_path / "kernels" / "add_slot3.py").read_text()
    assert '@aten.register_slot("add.Tensor", 3' in text
    assert '@aten.register_slot("add.Scalar", 3' in text
    assert (
        "def add_Tensor(input: Tensor, other: Tensor, *, alpha: Scalar = 1, out: Tensor | None = None) -> Tensor:"
        in text
    )
    assert "Generator" not in text
    compile((tmp_path / "kernels" / "test_add_slot3.py").read_text(), "test", "exec")
    assert main(["aten", "new", "add", "--slot", "3", "--out", str(tmp_path / "kernels")]) == 2
    assert "add_slot3.py exists" in capsys.readouterr().err


def test_new_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for op, slot, folder, sentence in (
        ("sofmax", "1", "", "no operator 'sofmax' that writes into out=; did you mean 'softmax'?"),
        ("add.Tensr", "1", "", "has no overload 'Tensr'; did you mean 'Tensor'?"),
        ("add", "8", "", "kernels go into slots 0 to 7"),
        ("add", "3", "file", f"cannot write {tmp_path / 'file'}"),
    ):
        assert main(["aten", "new", op, "--slot", slot, "--out", str(tmp_path / folder)]) == 2
        assert sentence in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "mine")]


def test_coverage_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aten", "coverage"]) == 0
    assert "# Coverage of the ATen surface" in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_kernel_goes_from_stub_to_tested(tmp_path: Path) -> None:
    assert main(["aten", "new", "relu", "--slot", "2", "--out", str(tmp_path)]) == 0
    stub = tmp_path / "relu_slot2.py"
    unfinished = run("aten_harness", "relu", "--slot", "2", "--kernels", stub.name, cwd=tmp_path)
    assert unfinished.returncode == 1
    assert "NotImplementedError" in unfinished.stdout

    stub.write_text(
        stub.read_text().replace(
            "    raise NotImplementedError",
            "    if out is not None:\n"
            "        aten.prepare_out(out, input.shape, input.dtype, input.device)\n"
            "        return out.copy_(input.clamp(min=0))\n"
            "    return input.clamp(min=0)",
        )
    )
    finished = run("aten_harness", "relu", "--slot", "2", "--kernels", stub.name, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert " 0 fail" in finished.stdout
    test = tmp_path / "test_relu_slot2.py"
    command = ("pytest", "-q", "-p", "no:cacheprovider", str(test))
    assert run(*command, cwd=tmp_path).returncode == 1
    test.write_text(test.read_text().replace("= []  #", "= [((torch.randn(3, 4),), {})]  #"))
    assert run(*command, cwd=tmp_path).returncode == 0
    for extra, sentence in (
        ((), "slot 3 of aten::relu has no kernel; active are 8"),
        (("--kernels", "gone.py"), "--kernels gone.py: no such file"),
    ):
        none = run("aten_harness", "relu", "--slot", "3", *extra, cwd=tmp_path)
        assert none.returncode == 2
        assert sentence in none.stderr


@pytest.mark.slow
def test_gap_lists_what_only_aten_covers(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import torch\n")
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from beside import torch\n"
        "assert sys.argv[1:] == ['--steps', '2']\n"
        "x = torch.randn(3, 4, requires_grad=True)\n"
        "torch.relu(x @ x.T).sum().backward()\n"
        "sys.exit(0)\n"
    )
    (tmp_path / "kernels.py").write_text(
        "from magi_opschema import aten\n"
        "@aten.register_slot('relu', 1)\n"
        "def relu(input):\n"
        "    return input.clamp(min=0)\n"
    )
    gap = ("magi_opschema._cli", "aten", "gap")
    done = run(*gap, "--kernels", "kernels.py", "program.py", "--", "--steps", "2", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    only, covered, outside = done.stdout.split("a lower slot")[0], *done.stdout.split("a lower slot")[1].split("not on")
    assert "mm " in only
    assert "threshold_backward" in only
    assert "relu " in covered
    assert "relu " not in only
    assert "t " in outside
    missing = run(*gap, "nothing.py", cwd=tmp_path)
    assert missing.returncode == 2
    assert "nothing.py is not a file" in missing.stderr
