# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""Ops of a test, and what it asks of the graph that a call of one becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from magi_tritonwrap import make_see_through
from magi_tritonwrap.testing import GraphLaunch, aot_graphs, launches_of
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload


class Ops:
    """Registers operators by hand, as a schema package would, in one namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.library = torch.library.Library(namespace, "FRAGMENT")

    def define(
        self, name: str, body: Callable[..., Any], schema: str = "(Tensor x) -> Tensor", *, fake: Any = None
    ) -> OpOverload:
        """Define and implement an op; its fake is like the first argument unless given."""
        self.library.define(name + schema)
        self.library.impl(name, body, "CompositeExplicitAutograd")
        like_first = lambda *args: torch.empty_like(args[0])  # noqa: E731
        torch.library.register_fake(f"{self.namespace}::{name}", fake or like_first, lib=self.library)
        op: OpOverload = getattr(getattr(torch.ops, self.namespace), name).default
        return op

    def seen(self, name: str, body: Callable[..., Any], *args: Any, **kwargs: Any) -> OpOverload:
        """An op as `define` makes it, which the compiler sees through."""
        op = self.define(name, body, *args, **kwargs)
        make_see_through(op, body)
        return op

    def custom_op(self, name: str, body: Callable[..., Any]) -> CustomOpDef:
        """An op of torch's own decorator, from a Tensor to another one like it."""
        schema = "(Tensor x) -> Tensor"
        op = torch.library.custom_op(f"{self.namespace}::{name}", body, mutates_args=(), schema=schema)
        op.register_fake(torch.empty_like)
        return op

    def again(self) -> None:
        """Destroy the library with its ops, and begin another one of the same name."""
        self.library._destroy()
        self.library = torch.library.Library(self.namespace, "FRAGMENT")


def launches(fn: Any, *inputs: Any, **how: Any) -> list[GraphLaunch]:
    """The launches in the one graph of ``fn(*inputs)``."""
    (graph,) = aot_graphs(fn, *inputs, **how)
    return launches_of(graph)


def launch_count(op: Any, *inputs: Any, dynamic: bool | None = None) -> int:
    (graph,) = aot_graphs(lambda *args: op(*args) + 1, *(inputs or (torch.ones(300),)), dynamic=dynamic)
    assert str(op) not in operators(graph)
    return len(launches_of(graph))


def launch_of(op: Any, *inputs: Any, dynamic: bool | None = None) -> GraphLaunch:
    """The one launch in the graph of a call."""
    (launch,) = launches(op, *(inputs or (torch.ones(300),)), dynamic=dynamic)
    return launch


def op_stays(op: Any, *inputs: Any) -> bool:
    (graph,) = aot_graphs(lambda *args: op(*args) + 1, *(inputs or (torch.ones(300),)))
    return str(op) in operators(graph)


def operators(graph: torch.fx.GraphModule) -> set[str]:
    """The names of the operators that a graph calls. An operator that is registered again has several OpOverloads."""
    return {str(node.target) for node in graph.graph.nodes}
