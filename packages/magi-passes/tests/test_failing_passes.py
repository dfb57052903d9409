# SPDX-License-Identifier: Apache-2.0
"""A pass that is interrupted, raises, or spoils the graph: what arrives, what it names, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from made_passes import HOOK, Holds, Manager, Spy, product, train
from magi_passes import MagiInductorPass, PassFailedError, PassPipeline, TemporalConvPass, adapt, collect_records
from magi_passes.errors import BrokenGraphError
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx


aten = torch.ops.aten
OPTIONS: dict[str, Callable[[MagiInductorPass], dict[str, Any]]] = {
    "pipeline": lambda one: PassPipeline([one]).inductor_options(),
    "manager": lambda one: {HOOK: Manager(one)},
    "itself": lambda one: {HOOK: one},
}


def _train(options: dict[str, Any]) -> None:
    train(torch.compile(product, options=options))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("in_the_gate", "backward"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("route", OPTIONS)
def test_an_interrupt_arrives_as_itself(
    inductor: Any, route: str, error: type[BaseException], in_the_gate: bool, backward: bool
) -> None:
    kinds = ("backward",) if backward else ("forward",)
    options = OPTIONS[route](Spy(kinds, raises=error, in_the_gate=in_the_gate))
    with collect_records() as records, pytest.raises(error, match="now"):
        _train(options)
    if not backward or route != "manager":
        assert records[-1].reason == f"raised {error.__name__}: now"


@pytest.mark.parametrize("route", OPTIONS)
def test_an_error_names_the_pass(inductor: Any, route: str) -> None:
    with pytest.raises(Exception, match=r"Spy failed on \d+_forward: KeyError: 'now") as caught:
        _train(OPTIONS[route](Spy(raises=KeyError)))
    assert "PassFailedError" in str(caught.value) or isinstance(caught.value, PassFailedError)
    # What torch raises has no cause, so the line of the pass is in the traceback itself.
    assert "raise self.raises" in str(caught.traceback[-1].statement)


def test_an_error_of_a_pass_that_is_called_keeps_its_cause() -> None:
    graph = make_fx(lambda x: x + 1)(torch.ones(3)).graph
    with (
        PassPipeline([]).scope(),
        pytest.raises(PassFailedError, match="^Spy failed on graph: Zero.*: now$") as caught,
    ):
        Spy(("graph", ""), raises=ZeroDivisionError)(graph)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def _product(graph: Graph) -> Any:
    (node,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    return node


def _erase_output(graph: Graph) -> None:
    graph.erase_node(graph.output_node())


def _two_outputs(graph: Graph) -> None:
    graph.output(graph.output_node().args[0])


def _erased_operand(graph: Graph) -> None:
    node = _product(graph)
    user = next(iter(node.users))
    node.users.clear()
    graph.erase_node(node)
    assert node in user.all_input_nodes


def _other_graph(graph: Graph) -> None:
    stranger = type(graph)().placeholder("stranger")
    node = _product(graph)
    node.args = (stranger, stranger)


def _circle(graph: Graph) -> None:
    first = _product(graph)
    with graph.inserting_after(first):
        second = graph.call_function(aten.sin.default, (first,))
    second.meta.update(first.meta)
    first.args = (second, second)


def _reads(path: str) -> Callable[[Graph], None]:
    """What makes a graph read the attribute *path* of its module."""

    def spoil(graph: Graph) -> None:
        node = _product(graph)
        with graph.inserting_before(node):
            constant = graph.create_node("get_attr", path)
        node.args = (constant, constant)

    return spoil


SPOILED: dict[str, tuple[Callable[[Graph], None], str]] = {
    "no output": (_erase_output, "it has 0 output nodes instead of one"),
    "two outputs": (_two_outputs, "it has 2 output nodes instead of one"),
    "an erased operand": (_erased_operand, r"\w+ reads mm, which was erased"),
    "a node of another graph": (_other_graph, "mm reads stranger, which is a node of another graph"),
    "a circle": (_circle, r"(mm|sin) depends on its own result"),
    "an attribute that is not there": (_reads("no_such_constant"), "reads the attribute 'no_such_constant'"),
    "an attribute of an attribute": (
        _reads("forward.__self__.weight"),
        "reads the attribute 'forward.__self__.weight'",
    ),
}


@dataclass(frozen=True)
class Spoils(MagiInductorPass):
    how: str
    hook = HOOK

    def __call__(self, graph: Graph) -> None:
        SPOILED[self.how][0](graph)


@pytest.mark.parametrize("how", SPOILED)
def test_a_broken_graph_names_the_pass(how: str) -> None:
    gm = make_fx(lambda x: (x @ x).sin())(torch.ones(3, 3))
    with pytest.raises(BrokenGraphError, match=f"^Spoils left graph broken: .*{SPOILED[how][1]}.* whole before this"):
        Spoils(how)(gm.graph)


def test_the_pass_before_is_not_mistaken_for_this_one() -> None:
    gm = make_fx(lambda x: (x @ x).sin())(torch.ones(3, 3))
    _erase_output(gm.graph)
    TemporalConvPass(always=True)(gm.graph)
    Holds()(gm.graph)


def _unsorted(graph: Graph) -> None:
    """Put a new node after the node that reads it, which Inductor sorts after its hooks."""
    (node,) = graph.find_nodes(op="call_function", target=aten.sin.default)
    with graph.inserting_after(node):
        new = graph.call_function(aten.neg.default, node.args)
    new.meta.update(node.meta)
    node.args = (new,)


def test_nodes_in_another_order_are_no_flaw(inductor: Any) -> None:
    x = torch.rand(3, 3)
    with torch.no_grad():
        compiled = torch.compile(lambda x: x.sin(), options=PassPipeline([adapt(_unsorted)]).inductor_options())
        torch.testing.assert_close(compiled(x), (-x).sin())


def writes_what_was_decomposed(graph: Graph) -> None:
    """Inductor has no lowering for a silu after the graph was decomposed."""
    for node in graph.find_nodes(op="call_function", target=aten.sin.default):
        node.target = aten.silu.default


@pytest.mark.parametrize("route", ["pipeline", "itself"])
def test_an_error_of_inductor_says_which_passes_ran(inductor: Any, route: str) -> None:
    options = OPTIONS[route](adapt(writes_what_was_decomposed))
    with pytest.raises(Exception, match="silu") as caught:
        torch.compile(lambda x: x.sin() + 1, options=options)(torch.ones(3))

    (note,) = caught.value.__notes__
    assert note.startswith("Passes had changed what was compiled: writes_what_was_decomposed ran on ")
