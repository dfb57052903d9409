# SPDX-License-Identifier: Apache-2.0
"""Each program under examples/ runs, ends with exit status 0, and writes what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from _pages import COMPILES_ANEW, COMPILES_QUICKLY
from _python import python
from PIL import Image


EXAMPLES = Path(__file__).parent.parent / "examples"
# It compiles a decoder and its gradients for several sizes, while another test runs on the same two cores.
LONG = 1500
# The text that a program must print, the files it must write, and the environment that it needs without a GPU.
PROMISES: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "graph_pass": (["DropRepeated ran on", "max_fusion_size: 64 -> 8", "max_fusion_size is what it was"], [], {}),
    "norm_with_backward": (["path       flattened", "gradients agree", "compiled and eager agree"], [], {}),
    "passes_in_another_backend": (["their pass saw [2] sines", "SmallAngles ran on"], [], {}),
    "triton_op": (["kernels and PyTorch agree", "compiled and eager agree"], [], {"TRITON_INTERPRET": "1"}),
    "vae_decode": (
        ["in step 60", "path       flattened", "NDTilingWorkaroundPass", "compiled and eager agree"],
        ["vae_decode.png", "vae_decode.html", "vae_train.html"],
        {},
    ),
}
# A graph that an earlier run left in a cache needs no pass, and these show what passes do.
COMPILES = COMPILES_ANEW | COMPILES_QUICKLY


def test_every_example_has_promises() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PROMISES, "serve"}


def test_a_server_starts_warm(tmp_path: Path) -> None:
    environment = COMPILES_QUICKLY | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    cold, warm = (python(EXAMPLES / "serve.py", seconds=LONG, env=environment) for _ in range(2))

    assert "2 compilations, 0 of them after the first request" in cold
    assert "caches: 0 hits" in cold
    assert "2 compilations, 0 of them after the first request" in warm
    assert " hits, 0 misses" in warm


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str, tmp_path: Path) -> None:
    said, written, environment = PROMISES[name]
    options = ["--out", tmp_path] if written else []

    printed = python(EXAMPLES / f"{name}.py", *options, seconds=LONG, env=COMPILES | environment)

    for promise in said:
        assert promise in printed
    for file in written:
        assert (tmp_path / file).stat().st_size > 0
    if name == "vae_decode":
        _shows_what_was_drawn(tmp_path / "vae_decode.png")


def _shows_what_was_drawn(path: Path) -> None:
    """Four panels a row: drawn, eager, compiled, their difference. A decoder that learned nothing is one colour."""
    sheet = torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).float()
    for top in (0, 212):
        drawn, eager, compiled, difference = sheet[top : top + 192].split(288, dim=1)
        assert (eager - drawn).abs().mean() < 25 < drawn.std()
        assert (compiled - eager).abs().max() <= 1
        assert (difference == difference[..., :1]).all()  # grey, as it is one number for each pixel


def test_a_reader_of_a_pipe_sees_at_once_what_the_demo_does(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "vae_decode.py"), "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **COMPILES}) as program:
        assert program.stdout is not None
        lines = [program.stdout.readline() for _ in range(2)]
        still_running = program.poll() is None
        program.kill()

    assert still_running
    assert lines[1].startswith("compiling a training step")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton_op", "vae_decode"])
def test_example_on_a_gpu(name: str, tmp_path: Path) -> None:
    printed = python(EXAMPLES / f"{name}.py", *(["--out", tmp_path] if name == "vae_decode" else []))

    assert name == "vae_decode" or "see-through" in printed
    assert "compiled and eager agree" in printed


@pytest.mark.slow
def test_the_standalone_package_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Build the package, install it with magi-opschema only, and test it with torch and pytest of this environment."""
    package = tmp_path / "package"
    shutil.copytree(EXAMPLES / "standalone_package", package)
    wheels = tmp_path / "wheels"
    opschema = EXAMPLES.parent / "packages" / "magi-opschema"
    python("-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", wheels, package, opschema)
    venv.create(tmp_path / "fresh", with_pip=True)
    fresh = partial(python, executable=tmp_path / "fresh" / "bin" / "python")
    fresh("-m", "pip", "install", "-q", "--no-index", "--no-deps", *wheels.glob("*.whl"))
    (site,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    # A path in a .pth file does not run the .pth files behind it, so editable installs of ours stay out of sight.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(package / "src")

    where = fresh("-c", "import magi_opschema, rowscale; print(magi_opschema.__file__, rowscale.__file__)")
    assert where.count(str(site)) == 2
    printed = fresh("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", package / "pyproject.toml", package)
    assert "5 passed" in printed
