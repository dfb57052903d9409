# SPDX-License-Identifier: Apache-2.0
"""Generated code as a user meets it, in tracebacks, in inspect, on disk; what an op says of itself; the README."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import linecache
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import magi_opschema
import pytest
import torch
from magi_opschema import annotate, magi_register_custom_op, op_def
from torch import Tensor


@dataclass(frozen=True)
class Config:
    factor: float = 2.0


def make_op(name: str, **options: Any) -> Callable[..., Tensor]:
    @magi_register_custom_op(name, infer_output_meta_fn=["x"], **options)
    def scale(x: Tensor, cfg: Config = Config()) -> Tensor:
        raise ZeroDivisionError(cfg.factor)

    return scale


def test_a_traceback_shows_the_lines_of_generated_code(ns: str) -> None:
    scale = make_op(f"{ns}::scale")
    linecache.checkcache()  # as a debugger does before it shows lines
    try:
        scale(torch.ones(1), Config(3.0))
    except ZeroDivisionError:
        text = traceback.format_exc()
    assert re.search(r'File "<magi_opschema exposed .*scale(-\d+)?>", line \d+, in scale\n    _m_output = _m_', text)
    # The first call is checked: the kernel hands it over to the body's flat twin.
    assert re.search(
        r'File "<magi_opschema kernel .*scale(-\d+)?>", line \d+, in scale_kernel\n    return _m_run', text
    )
    assert re.search(
        r'File "<magi_opschema lowered .*scale(-\d+)?>", line \d+, in scale_lowered\n    _m_output = _m_fn', text
    )
    parts = ("<magi_opschema exposed", "<magi_opschema kernel", "<magi_opschema lowered", "raise ZeroDivision")
    assert sorted(parts, key=text.index) == list(parts)


def test_inspect_shows_the_generated_source(ns: str) -> None:
    scale = make_op(f"{ns}::scale")
    definition = op_def(scale)
    assert inspect.getsource(scale) == scale.__source__  # type: ignore[attr-defined]
    assert inspect.getsource(definition.lowered_fn) == definition.lowered_fn.__source__  # type: ignore[attr-defined]
    assert scale._magi_torch_registered_op is definition.torch_op  # type: ignore[attr-defined]


def test_two_ops_of_one_name_have_files_of_their_own(ns: str) -> None:
    def another(name: str) -> Callable[..., Tensor]:
        @magi_register_custom_op(name)
        def scale(x: Tensor, y: Tensor, cfg: Config) -> Tensor:
            return x * 2

        scale.__wrapped__ = None  # type: ignore[attr-defined]
        return scale

    ops = [make_op(f"{ns}::a"), make_op(f"{ns}::b"), another(f"{ns}::c")]
    for op in ops:
        code: Any = op.__code__
        assert "".join(linecache.getlines(code.co_filename)) == op.__source__  # type: ignore[attr-defined]


def test_the_dump_switch_writes_every_generated_function(
    ns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "folder"
    monkeypatch.setenv("MAGI_OPSCHEMA_DUMP", str(folder))
    scale = make_op(f"{ns}::scale")
    with pytest.raises(ZeroDivisionError):  # the kernel is compiled by the first call
        scale(torch.ones(1))
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert {"exposed", "kernel"} <= {name.split("_")[2] for name in texts if name.startswith("magi_opschema_")}
    assert scale.__source__ in texts.values()  # type: ignore[attr-defined]
    assert all(name.isascii() and name.endswith(".py") for name in texts)
    monkeypatch.delenv("MAGI_OPSCHEMA_DUMP")
    make_op(f"{ns}::other")
    assert len(list(folder.iterdir())) == len(texts)


def test_traits_notes_and_tags(ns: str) -> None:
    scale = make_op(
        f"{ns}::scale", is_compute_sensitive=True, is_subgraph_boundary=True, tags=(torch.Tag.flexible_layout,)
    )
    definition = op_def(scale)
    assert definition.traits == {"compute_sensitive", "subgraph_boundary"}
    assert {torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag} <= set(definition.torch_op.tags)
    annotate(scale, "see-through", "1 Triton kernel")
    annotate(scale, "see-through", "2 Triton kernels")
    assert dict(definition.notes) == {"see-through": "2 Triton kernels"}
    lines = str(definition).splitlines()
    assert lines[-3:] == [
        "path       flattened",
        "traits     compute_sensitive, subgraph_boundary",
        "see-through  2 Triton kernels",
    ]
    with pytest.raises(TypeError):
        definition.notes["key"] = "text"  # type: ignore[index]
    assert op_def(getattr(torch.ops, ns).scale) is op_def(getattr(torch.ops, ns).scale.default) is definition
    assert op_def(f"{ns}::scale") is definition


def test_a_name_of_its_own_from_module_and_qualified_name(ns: str) -> None:
    class Holder:
        @staticmethod
        def scale(x: Tensor, cfg: Config) -> Tensor:
            return x * cfg.factor

    Holder.scale.__module__ = f"{ns}.ops"
    op = magi_register_custom_op()(Holder.scale)
    assert op_def(op).name == f"{ns}_ops::test_a_name_of_its_own_from_module_and_qualified_name_Holder_scale"
    assert op(torch.ones(1), Config(3.0)).tolist() == [3.0]


def _calls(fn: Callable[[], object]) -> int:
    """How many Python and C functions *fn* calls."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return count


def test_a_thousand_ops_are_decorated_in_linear_time(ns: str) -> None:
    """The thousandth takes as many steps as the twentieth."""
    for i in range(20):
        make_op(f"{ns}::early{i}")
    early = _calls(lambda: make_op(f"{ns}::early"))
    for i in range(1000):
        make_op(f"{ns}::op{i}")
    late = _calls(lambda: make_op(f"{ns}::late"))
    assert late < early * 1.2, (early, late)


README = Path(__file__).parents[1] / "README.md"


def test_example() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    expected = re.search(r"```\n(signature .*?)```", README.read_text(), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec", dont_inherit=True), {"__name__": "readme"})
    assert expected is not None
    assert printed.getvalue() == expected[1]


@pytest.mark.parametrize("module", ["_ops.decorator", "_lowering.signature", "_ops.catalogue", "_ops.rules"])
def test_docstring_examples(module: str) -> None:
    imported = importlib.import_module(f"magi_opschema.{module}")
    public = {name: getattr(magi_opschema, name) for name in magi_opschema.__all__}
    result = doctest.testmod(imported, extraglobs={**public, **vars(imported)})
    assert result.attempted > 0
    assert result.failed == 0
