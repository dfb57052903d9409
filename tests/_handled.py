# SPDX-License-Identifier: Apache-2.0
"""An op that takes an object by its handle, and the objects, for the tests of handles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from magi_opschema import ObjectHandle, magi_register_custom_op, register_object, release_object
from torch import Tensor


_GENERIC: Any = ObjectHandle


class Runner:
    """Scales; what it holds is out of any schema's reach."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def run(self, x: Tensor) -> Tensor:
        return x * self.scale


K = TypeVar("K")


@dataclass(frozen=True)
class Job(Generic[K]):
    runner: ObjectHandle[K]
    shift: float = 0.0


Op = Callable[..., Tensor]


def make_op(ns: str, name: str = "run") -> Op:
    @magi_register_custom_op(f"{ns}::{name}", infer_output_meta_fn=["x"])
    def run(x: Tensor, runner: ObjectHandle[Runner]) -> Tensor:
        return runner.run(x)

    return run


def count_graphs(fn: Callable[..., Any], *, dynamic: bool | None = None) -> tuple[Callable[..., Any], list[Any]]:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic), graphs


def stale_handle() -> int:
    handle = register_object(Runner())
    release_object(handle)
    return handle
