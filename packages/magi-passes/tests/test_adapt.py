# SPDX-License-Identifier: Apache-2.0
"""A function, or an object with nothing but `__call__`, is a pass, and its cache key is made of what decides."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from magi_passes import MagiInductorPass, NDTilingWorkaroundPass, PassContext, PassPipeline, Reason, adapt
from magi_passes import collect_records as collected
from magi_passes.errors import PassArgumentTypeError, PassDefinitionError, PassIdentityError, UnknownConfigKeyError
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph


aten = torch.ops.aten


def to_cosines(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.sin.default):
        node.target = aten.cos.default


def to(target: Any, graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.sin.default):
        node.target = target


class Cosines:
    def __init__(self, turned_on: bool = True) -> None:
        self.turned_on = turned_on
        self.calls = 0

    def __call__(self, graph: Graph) -> None:
        self.calls += 1
        if self.turned_on and self.calls == 1:  # an object is made anew for each call
            to_cosines(graph)


class Slotted:
    __slots__ = ("name",)

    def __init__(self) -> None:
        self.name = "cos"

    def __call__(self, graph: Graph) -> None:
        to(getattr(aten, self.name).default, graph)


class Keyed(CustomGraphPass):
    def __init__(self, key: str | None) -> None:
        self.key = key

    def __call__(self, graph: Graph) -> None:
        to_cosines(graph)

    def uuid(self) -> Any:
        return self.key


class Forced(MagiInductorPass):
    """Not a frozen dataclass, with a switch and a key, as passes of MagiCompiler are."""

    inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)

    def __init__(self, force_on: bool = False) -> None:
        self.force_on = force_on

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        return Reason(self.force_on, "as it was told")

    def __call__(self, graph: Graph) -> None:
        torch._inductor.config.triton.max_tiles = 2
        to_cosines(graph)


@pytest.mark.parametrize(
    "body",
    [to_cosines, functools.partial(to, aten.cos.default), Cosines(), Slotted(), Keyed("1"), Keyed(None), Forced(True)],
    ids=["function", "partial", "object", "slots", "own uuid", "no uuid", "not frozen"],
)
def test_it_runs_in_each_compilation(body: Callable[[Graph], object]) -> None:
    options = PassPipeline([adapt(body)]).inductor_options({"fx_graph_cache": False})
    x = torch.randn(3)
    for _ in range(2):
        torch.compiler.reset()
        with collected() as records:
            made = torch.compile(lambda x: x.sin(), options=options)(x)
        torch.testing.assert_close(made, x.cos())
        assert [record.ran for record in records] == [True]
    assert torch._inductor.config.triton.max_tiles is None


def test_the_key_is_made_of_the_code_and_of_what_the_object_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(body: Any) -> Any:
        return adapt(body).uuid()

    pairs = [(Cosines(), Cosines(False)), (Keyed("1"), Keyed("2")), (Forced(), Forced(True))]
    partials = functools.partial(to, aten.cos.default), functools.partial(to, aten.tan.default)
    for one, other in (*pairs, partials):
        assert key(one) == key(one)
        assert key(one) != key(other)
    assert key(Keyed(None)) is None

    before = key(Cosines()), key(to_cosines)
    monkeypatch.setattr(Cosines, "__call__", lambda self, graph: None)
    assert key(Cosines()) != before[0]
    assert key(to_cosines) == before[1]


def test_it_says_what_the_key_is_made_of() -> None:
    code = f"the code of {__name__}.Cosines and all that it reaches"
    release = torch.__version__
    assert str(adapt(Cosines(False))) == (
        f"{__name__}.Cosines; its cache key is made of {code}, calls=0, turned_on=False and torch {release}"
    )
    assert str(adapt(Keyed("1"))).endswith(f", key='1', its own uuid() and torch {release}")
    assert "args=(<OpOverload" in str(adapt(functools.partial(to, aten.cos.default)))


def test_a_pass_of_this_package_stays_as_it_is() -> None:
    ours = NDTilingWorkaroundPass()
    assert adapt(ours) is ours


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: adapt(cast("Any", Cosines)), PassArgumentTypeError, "is a class; pass an instance."),
        (lambda: adapt(cast("Any", 3)), PassArgumentTypeError, "adapt: 3 is nothing that can be called with a graph."),
        (lambda: adapt(cast("Any", lambda: None)), PassArgumentTypeError, "with a graph alone: too many"),
        (lambda: adapt(cast("Any", lambda graph, k: None)), PassArgumentTypeError, "a required argument: 'k'"),
        (lambda: adapt(to_cosines, config_keys="max_tiles"), PassDefinitionError, "must be a tuple of strings"),
        (lambda: adapt(Cosines().__call__), PassArgumentTypeError, "is a method, whose state no cache key can hold."),
        (lambda: adapt(operator.methodcaller("lint")), PassArgumentTypeError, "Pass a function, or an object whose"),
        (lambda: adapt(Keyed(cast("Any", ["a"]))).uuid(), PassIdentityError, "Keyed.state is a list"),
        (lambda: adapt(to_cosines, hook="post_grad"), PassDefinitionError, "to_cosines.hook is 'post_grad'"),
        (
            lambda: PassPipeline([adapt(to_cosines, config_keys=["triton.max_tile"])]),
            UnknownConfigKeyError,
            "Did you mean 'triton.max_tiles'",
        ),
    ],
)
def test_what_is_no_pass(make: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says.replace("(", r"\(").replace(".", r"\.")):
        make()
