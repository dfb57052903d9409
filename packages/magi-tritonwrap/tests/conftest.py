# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""Ops in a namespace of their own for each test, a driver that needs no GPU, and the pattern catalogue."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._library.custom_ops import CustomOpDef
    from torch._ops import OpOverload


sys.path.insert(0, str(Path(__file__).parent))  # tritonwrap_patterns.py: --import-mode=importlib adds nothing

_NUMBERS = itertools.count()


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
        from magi_tritonwrap import make_see_through

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


@pytest.fixture
def ops() -> Iterator[Ops]:
    registry = Ops(f"tritonwrap_test_{next(_NUMBERS)}")
    yield registry
    registry.library._destroy()


@pytest.fixture
def stub() -> Iterator[None]:
    from magi_tritonwrap.testing import stub_driver

    with stub_driver():
        yield
