# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from _python import python
from magi_opschema import aten
from magi_opschema.aten._commands import main
from magi_opschema.aten._generate.schema import METADATA_FILE as FILE_NAME
from magi_opschema.aten.errors import SurfaceError, UnknownOpError


def test_every_public_name_is_an_operator_or_part_of_the_api() -> None:
    names = dir(aten)

    assert {"add", "softmax", "linalg", "fft", "special", "load", "slots", "register_slot", "pin", "use_slot"} <= set(
        names
    )
    for name in names:
        value = getattr(aten, name)
        assert callable(value) or isinstance(value, types.ModuleType), name


def test_forms_of_one_base() -> None:
    x = torch.randn(3, 4)

    assert aten.max(x).shape == ()
    assert [t.shape for t in aten.max(x, 1)] == [(3,), (3,)]
    assert [t.shape for t in aten.max(x, dim=1, keepdim=True)] == [(3, 1), (3, 1)]
    assert torch.equal(aten.max(x, -x), torch.maximum(x, -x))
    assert torch.equal(aten.max(x, other=-x), torch.maximum(x, -x))
    assert torch.equal(aten.sum(x), x.sum())
    assert torch.equal(aten.sum(x, dim=0, keepdim=True), x.sum(0, keepdim=True))
    assert torch.equal(aten.sum(x, None), x.sum())
    assert torch.equal(aten.std(x, False), x.std(unbiased=False))
    assert torch.equal(aten.std(x, 1), x.std(1))
    assert torch.equal(aten.std(x, correction=2), x.std(correction=2))
    assert torch.equal(aten.arange(4), torch.arange(4))
    assert torch.equal(aten.arange(end=4), torch.arange(4))
    assert torch.equal(aten.arange(1, 7, 2), torch.arange(1, 7, 2))
    assert torch.equal(aten.add(x, 2, alpha=3), x + 6)
    assert torch.equal(aten.div(x, 2.0, rounding_mode="floor"), torch.div(x, 2.0, rounding_mode="floor"))
    assert torch.equal(aten.all(x > 0, None), (x > 0).all())
    assert torch.equal(aten.all(x > 0, [0, 1]), (x > 0).all())
    assert torch.equal(aten.where(x > 0, x, 0.0), torch.where(x > 0, x, 0.0))
    assert torch.equal(aten.pow(2.0, x), torch.pow(2.0, x))
    assert torch.equal(aten.linalg.norm(x, "fro"), torch.linalg.norm(x, "fro"))


def test_out_is_returned_and_written() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    out = torch.empty(0)

    assert aten.add(x, y, alpha=2, out=out) is out
    assert torch.equal(out, torch.add(x, y, alpha=2))
    pair = (torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert aten.max(x, 1, out=pair) is pair
    assert torch.equal(pair[0], x.max(1).values)
    parts = [torch.empty(2, 4), torch.empty(1, 4)]
    assert aten.split_copy(x, 2, out=parts) is parts
    assert torch.equal(parts[1], x[2:])


def test_composed_out_keeps_the_contract() -> None:
    x = torch.randn(3, 4)
    out = torch.empty(0)

    assert aten.std(x, out=out) is out
    assert torch.equal(out, x.std())
    wide = torch.empty(3, 8)[:, ::2]
    strides = wide.stride()
    assert torch.equal(aten.where(x > 0, x, 0.0, out=wide), torch.where(x > 0, x, 0.0))
    assert wide.stride() == strides
    with pytest.raises(RuntimeError, match=r"result type torch\.float32 can't be cast to .* torch\.int64"):
        aten.std(x, out=torch.empty((), dtype=torch.int64))
    with pytest.raises(RuntimeError, match="Expected out tensor to have device cpu, but got meta"):
        aten.std(x, out=torch.empty((), device="meta"))
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        aten.std(x, out=torch.empty(3))
    with pytest.raises(ValueError, match="out= has 1 tensors, and the result 2"):
        aten.std_mean(x, out=torch.empty(()))  # type: ignore[call-overload]


def test_functional_form_that_aten_lacks() -> None:
    grad, x = torch.ones(1, 1, 1, 1, 1), torch.randn(1, 1, 2, 2, 2)

    assert torch.equal(aten.adaptive_avg_pool3d_backward(grad, x), torch.full_like(x, 1 / 8))


def test_factories_take_their_options_from_out() -> None:
    out = torch.empty(2, dtype=torch.int32)

    assert torch.equal(aten.zeros([2], out=out), torch.zeros(2, dtype=torch.int32))
    assert aten.zeros([2], dtype=torch.int32, device="cpu", layout=torch.strided, pin_memory=False, out=out) is out
    with pytest.raises(RuntimeError, match=r"dtype torch\.float64 does not match that of out: torch\.int32"):
        aten.zeros([2], dtype=torch.float64, out=out)
    with pytest.raises(RuntimeError, match="device meta does not match that of out: cpu"):
        aten.zeros([2], device="meta", out=out)
    with pytest.raises(RuntimeError, match="aten::zeros"):
        aten.zeros([2], colour="red", out=out)  # type: ignore[call-arg]


def test_arguments_that_fit_nothing_are_told() -> None:
    x = torch.ones(2)

    with pytest.raises(TypeError, match=r"no form of max takes \(Tensor, float\); there are max\(input, dim, keepdim="):
        aten.max(x, 1.5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"aten::linalg_pinv takes no atol"):
        aten.linalg.pinv(torch.eye(2), 0.1, atol=0.1)  # type: ignore[call-overload]
    with pytest.raises(UnknownOpError, match=r"has no operator 'sofmax'; did you mean 'softmax'\?"):
        _ = aten.sofmax  # type: ignore[attr-defined]
    with pytest.raises(UnknownOpError, match=r"has no operator 'nrm'; did you mean 'norm'\?"):
        _ = aten.linalg.nrm  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'sofmax'"):
        from magi_opschema.aten import sofmax  # type: ignore[attr-defined]  # noqa: F401


def test_gradients_flow_through_slot_8() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    ours, torchs = (torch.autograd.grad(call(x, -1)[:, 0].sum(), x)[0] for call in (aten.softmax, torch.softmax))

    assert torch.equal(ours, torchs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_slot_8_is_inlined_by_the_compiler(backend: str) -> None:
    def model(x: torch.Tensor, o: torch.Tensor) -> Any:
        y = aten.softmax(aten.add(x, x, alpha=2), -1)
        values, indices = aten.max(y, 1)
        return aten.mul(y, 2.0, out=o), values, indices, aten.sum(y, [0], keepdim=True), aten.linalg.vector_norm(y)

    x = torch.randn(3, 4)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for got, expected in zip(compiled(x, torch.empty(3, 4)), model(x, torch.empty(3, 4)), strict=True):
        torch.testing.assert_close(got, expected)


def test_load_takes_what_the_command_wrote(tmp_path: Path) -> None:
    allowlist, out = tmp_path / "ops.yaml", tmp_path / "my surface"
    allowlist.write_text("- add\n- linalg_norm\n- _softmax\n")
    assert main(["aten", "gen", "--allowlist", str(allowlist), "--out", str(out)]) == 0

    surface = aten.load(out)
    x = torch.randn(3, 4)
    assert torch.equal(surface.add(x, x), x + x)
    assert torch.equal(surface.linalg.norm(x), x.norm())
    assert torch.allclose(surface.internal.softmax(x, 1, False), x.softmax(1))
    assert aten.load(str(out)) is surface
    assert surface.__all__ == ["add", "internal", "linalg"]


def test_load_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(SurfaceError, match="is not a generated surface"):
        aten.load(tmp_path)
    for metadata, sentence in (
        ([1], "is not a generated surface"),
        ({"schema_version": 1, "torch": "1.0", "ops": []}, r"was generated for torch 1\.0, and torch .* is installed"),
        ({"schema_version": 1, "torch": version("torch"), "ops": []}, "cannot be imported"),
    ):
        (tmp_path / FILE_NAME).write_text(json.dumps(metadata))
        with pytest.raises(SurfaceError, match=sentence):
            aten.load(tmp_path)


def test_the_cache_is_made_once_and_survives_a_race(tmp_path: Path) -> None:
    code = "from magi_opschema import aten; assert callable(aten.add)"
    environment = {"MAGI_OPSCHEMA_CACHE_DIR": str(tmp_path)}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: python("-c", code, env=environment), range(2)))
    (folder,) = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    written = (folder / FILE_NAME).stat().st_mtime_ns
    # The second use needs no pyyaml: nothing is generated.
    python("-c", f"import sys; sys.modules['yaml'] = None; {code}", env=environment)
    assert (folder / FILE_NAME).stat().st_mtime_ns == written


def test_an_unwritable_cache_is_told() -> None:
    program = """
from magi_opschema import aten
try:
    aten.add
except aten.errors.OutputError as error:
    print(error)
"""
    printed = python("-c", program, env={"MAGI_OPSCHEMA_CACHE_DIR": "/proc/magi"})

    assert "cannot write the output folder /proc/magi" in printed
    assert "name another folder in MAGI_OPSCHEMA_CACHE_DIR" in printed


@pytest.mark.slow
def test_generated_stubs_and_calls_pass_mypy_strict(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""\
        import torch
        from typing import assert_type

        from magi_opschema import aten
        from magi_opschema.aten import linalg

        x = torch.ones(2, 2)
        assert_type(aten.add(x, 1, alpha=2), torch.Tensor)
        assert_type(aten.max(x), torch.Tensor)
        assert_type(aten.max(x, 1), tuple[torch.Tensor, torch.Tensor])
        assert_type(aten.split_copy(x, 1), list[torch.Tensor])
        assert_type(linalg.norm(x, "fro"), torch.Tensor)
        assert_type(aten.zeros([2], dtype=torch.int32, generator=None), torch.Tensor)
        aten.softmax(x)
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "mypy"), str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    lines = [line for line in done.stdout.splitlines() if "error" in line]

    assert len(lines) == 3, done.stdout  # the two mistakes above, and mypy's count of them
    assert "generator" in lines[0]
    assert 'Missing positional argument "dim"' in lines[1]
