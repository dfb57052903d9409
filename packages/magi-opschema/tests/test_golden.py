# SPDX-License-Identifier: Apache-2.0
"""Generated code as a reviewer sees it, in golden files, and as a user meets it; what an op says of itself.

`pytest --accept` writes the files in golden/; the diff is the review.
"""

from __future__ import annotations

import cProfile
import enum
import inspect
import linecache
import math
import os
import re
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict

import pytest
import torch
from magi_opschema import annotate, magi_register_custom_op, op_def
from torch import Tensor


GOLDEN = Path(__file__).parent / "golden"
Tokens = NewType("Tokens", int)


class Mode(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


class Level(enum.Enum):
    LOW = object()
    HIGH = (1, object())


@dataclass(frozen=True)
class NormCfg:
    eps: float = 1e-6
    mode: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True)
class Scales:
    row: Tensor
    column: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    norm: NormCfg = NormCfg()
    scales: Scales
    level: Level = Level.LOW
    shape: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Checked:
    size: int
    area: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "area", self.size * self.size)


class Point(NamedTuple):
    x: float
    y: float = math.inf


Keyed = TypedDict("Keyed", {"class": int, "a key": float})


@dataclass(frozen=True)
class Stats:
    mean: Tensor
    spread: tuple[Tensor, Tensor]


MANY_FIELDS = [
    ("w", Tensor),
    *((f"f{i}", float) for i in range(62)),
    ("a", Mode),
    *((name, int | None) for name in "bcd"),
]
Many = make_dataclass("Many", MANY_FIELDS, frozen=True)


def direct(x: Tensor, sizes: list[int], scale: float = 2.0, *, out_dtype: torch.dtype | None = None) -> Tensor:
    return x * scale


def lowered(x: Tensor, mode: Literal["rms", "layer"], tokens: Tokens, axis: Annotated[int, "dim"] = 0) -> Tensor:
    return x


def norm(x: Tensor, weight: Tensor, cfg: NormCfg = NormCfg()) -> Tensor:
    return x


def nested(x: Tensor, block: Block, point: Point = Point(1.0), *, mode: Mode = Mode.RMS) -> Tensor:  # noqa: B008
    return x


def optional(x: Tensor, cfg: NormCfg | None = None, masks: list[Tensor | None] | None = None) -> Tensor:
    return x


def keyed(key: Keyed, checked: Checked, x: Tensor) -> Tensor:
    return x


def mixed(
    x: Tensor,
    pick: Literal["a", 1, True] = True,
    modes: tuple[Mode, ...] = (),
    parts: list[complex] = [],  # noqa: B006
) -> Tensor:
    return x


def unheld(x: Tensor, limit: float = math.inf, text: str = 'a "quoted"\nline', names: list[str] = ["a"]) -> Tensor:  # noqa: B006
    return x


def mutating(scales: Scales, outs: list[Tensor], x: Tensor) -> None:
    return None


def record_output(x: Tensor, cfg: NormCfg) -> Stats:
    return Stats(x, (x, x))


def renamed(self: Tensor, größe: int, output: NormCfg) -> tuple[Tensor]:  # noqa: PLC2401
    return (self,)


def packed(x: Tensor, cfg: Many) -> Tensor:  # type: ignore[valid-type]
    return x


OPTIONS: dict[Callable[..., Any], dict[str, Any]] = {
    **{fn: {} for fn in (direct, lowered, optional, keyed, mixed, renamed, packed)},
    norm: {"is_compute_sensitive": True},
    nested: {"infer_output_meta_fn": ["block.scales.row"]},
    unheld: {"is_subgraph_boundary": True},
    mutating: {"mutates_args": ("scales.row", "outs")},
    record_output: {"infer_output_meta_fn": ["x", "x", "x"]},
}


def text_of(fn: Callable[..., Any], ns: str) -> str:
    definition = op_def(magi_register_custom_op(f"{ns}::{fn.__name__}_op", **OPTIONS[fn])(fn))
    exposed = getattr(definition.exposed_op, "__source__", "the op itself\n")
    lowered_source = getattr(definition.lowered_fn, "__source__", "the function itself\n")
    sections = {
        "schema": f"{definition.torch_op._schema}\n",
        "op_def": f"{definition}\n",
        "exposed": exposed,
        "lowered": lowered_source,
    }
    return "\n".join(f"=== {title}\n{text}" for title, text in sections.items()).replace(ns, "mylib")


@pytest.mark.parametrize("fn", OPTIONS, ids=lambda fn: fn.__name__)
def test_golden(ns: str, fn: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    path, text = GOLDEN / f"{fn.__name__}.txt", text_of(fn, ns)
    if request.config.getoption("--accept"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_another_process_gives_the_same_text(ns: str) -> None:
    """No text depends on the order of a set, on an address, or on what was decorated before."""
    program = f"""
        import runpy
        module = runpy.run_path({str(Path(__file__))!r})
        for fn in reversed(list(module["OPTIONS"])):
            print(module["text_of"](fn, "elsewhere"))
    """
    environment = {**os.environ, "PYTHONHASHSEED": "4321", "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, env=environment, check=True, timeout=300
    )
    assert run.stdout.decode() == "".join(f"{text_of(fn, ns)}\n" for fn in reversed(list(OPTIONS)))


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
    # The first call is checked: the kernel hands it over to the body's flat twin.
    lines = {
        "exposed": ("scale", "_m_output = _m_"),
        "kernel": ("scale_kernel", "return _m_run"),
        "lowered": ("scale_lowered", "_m_output = _m_fn"),
    }
    for kind, (name, line) in lines.items():
        frame = rf'File "<magi_opschema {kind} .*scale(-\d+)?>", line \d+, in {name}\n    {line}'
        assert re.search(frame, text), kind
    parts = [*(f"<magi_opschema {kind}" for kind in lines), "raise ZeroDivision"]
    assert sorted(parts, key=text.index) == parts


def test_inspect_shows_the_generated_source_of_each_op_of_a_name(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::c")
    def scale(x: Tensor, y: Tensor, cfg: Config) -> Tensor:
        return x * 2

    for op in (make_op(f"{ns}::a"), make_op(f"{ns}::b"), scale):
        for fn in (op, op_def(op).lowered_fn):
            shown: Any = fn
            assert inspect.getsource(fn) == shown.__source__
    assert scale._magi_torch_registered_op is scale.torch_op  # type: ignore[attr-defined]


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
    profile = cProfile.Profile()
    profile.runcall(fn)
    return sum(entry.callcount for entry in profile.getstats())


def test_a_thousand_ops_are_decorated_in_linear_time(ns: str) -> None:
    for i in range(20):
        make_op(f"{ns}::early{i}")
    early = _calls(lambda: make_op(f"{ns}::early"))
    for i in range(1000):
        make_op(f"{ns}::op{i}")
    late = _calls(lambda: make_op(f"{ns}::late"))
    assert late < early * 1.2, (early, late)
