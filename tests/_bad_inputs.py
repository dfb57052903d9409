# SPDX-License-Identifier: Apache-2.0
"""Signatures and classes that the tests of errors share."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor


def shown(value: object) -> str:
    """A test id: the same in every process, so without addresses."""
    return re.sub(r" at 0x[0-9a-f]+| id='\d+'", "", str(value))[:60]


T = TypeVar("T")
X = torch.arange(3.0)


class Mode(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True)
class Inner:
    scale: float = 1.0
    mode: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T


def located(fn: Callable[..., Any]) -> str:
    """The end of every error about *fn*: file and line of its `def`."""
    return f"({Path(fn.__code__.co_filename).name}:{fn.__code__.co_firstlineno})"


def with_annotation(annotation: object) -> Callable[..., Any]:
    def body(x: Tensor, value: Any) -> Tensor:
        return x * 2

    body.__annotations__["value"] = annotation
    return body


def returning(annotation: object) -> Callable[..., Any]:
    def body(x: Tensor) -> Any:
        return x * 2

    del body.__annotations__["return"]
    if annotation is not inspect.Signature.empty:
        body.__annotations__["return"] = annotation
    return body


def plain(x: Tensor) -> Tensor:
    return x * 2


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3
