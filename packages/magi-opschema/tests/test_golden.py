# SPDX-License-Identifier: Apache-2.0
"""Schema, picture and generated code of representative signatures, as a reviewer sees them.

`pytest --accept` writes the files in golden/; the diff is the review.
"""

from __future__ import annotations

import enum
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict

import pytest
import torch
from magi_opschema import magi_register_custom_op, op_def
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
    direct: {},
    lowered: {},
    norm: {"is_compute_sensitive": True},
    nested: {"infer_output_meta_fn": ["block.scales.row"]},
    optional: {},
    keyed: {},
    mixed: {},
    unheld: {"is_subgraph_boundary": True},
    mutating: {"mutates_args": ("scales.row", "outs")},
    record_output: {"infer_output_meta_fn": ["x", "x", "x"]},
    renamed: {},
    packed: {},
}


def text_of(fn: Callable[..., Any], ns: str) -> str:
    """Everything that is generated for *fn*, its namespace left out."""
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


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == {"rows", *(fn.__name__ for fn in OPTIONS)}


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
