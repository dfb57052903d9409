# SPDX-License-Identifier: Apache-2.0
"""Functions, records and an Enum for the tests of names and values."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor


X = torch.arange(3.0)


class Mode(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


class Sizes(TypedDict):
    height: int
    width: int


@dataclass(frozen=True)
class Inner:
    scale: float = 1.0
    mode: Mode = Mode.RMS


def compiled(op: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(lambda **values: op(**values) + 1, fullgraph=True, backend="eager")


def make_function(parameters: dict[str, Any], seen: list[Any], name: str = "body") -> Callable[..., Any]:
    """A function whose parameters have these names and annotations; it keeps what it is called with."""
    names = ", ".join(parameters)
    namespace: dict[str, Any] = {"keep_seen": seen}
    exec(f"def {name}({names}):\n    keep_seen.append(({names},))\n    return keep_seen[-1][0] * 2\n", namespace)
    fn: Callable[..., Any] = namespace[name]
    # Python itself writes a name in its NFKC form: µ as μ.
    fn.__annotations__ = {**dict(zip(fn.__code__.co_varnames, parameters.values(), strict=False)), "return": Tensor}
    return fn


def same(left: Any, right: Any) -> bool:
    """Equal, of the same classes all the way down; nan is nan, and -0.0 is not 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)
    if isinstance(left, enum.Enum) and not isinstance(left, enum.Flag):
        return left is right
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, part.name), getattr(right, part.name)) for part in dataclasses.fields(left))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)
