# SPDX-License-Identifier: Apache-2.0
"""Bodies that keep Tensors between calls: one of a run on fake tensors has no data, and must not stay behind."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import tritonwrap_patterns as patterns
from graph_questions import Ops, op_stays, operators
from magi_tritonwrap import NoFakeError, OpaqueFallbackWarning, fake_from_body, probe_launches, triton_op
from magi_tritonwrap.testing import aot_graphs
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Slotted:
    __slots__ = ("kept",)


@dataclass
class State:
    kept: Any = None
    by_key: dict[Any, Any] = field(default_factory=dict)
    many: list[Any] = field(default_factory=list)
    slotted: Slotted = field(default_factory=Slotted)


STATE = State()


def in_a_closure() -> Callable[[Tensor], None]:
    kept = torch.zeros(300)

    def keep(made: Tensor) -> None:
        nonlocal kept
        kept = kept + made

    return keep


KEEPERS: dict[str, Callable[[Tensor], None]] = {
    "attribute": lambda made: setattr(STATE, "kept", made),
    "global": lambda made: globals().update(kept_here=made),
    "dictionary": lambda made: STATE.by_key.update({300: (made, 1)}),
    "list": lambda made: STATE.many.append({"made": made}),
    "slot": lambda made: setattr(STATE.slotted, "kept", made),
    "closure": in_a_closure(),
}
KEEPS = (
    r"The body 'keeping\.<locals>\.body' keeps a Tensor that it makes for its next call \(\(300,\), torch\.float32\), "
    r"and ran on fake tensors, which have no data\. Make what keeps it anew\. Pass the Tensor as an argument, make it "
    r"in an eager call before the first trace, or register the op as an opaque custom op\."
)


def keeping(how: str) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        KEEPERS[how](x * 2)
        return patterns.module_level(x)

    return body


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    STATE.__init__()  # type: ignore[misc]
    globals().pop("kept_here", None)


@pytest.mark.parametrize("how", KEEPERS)
def test_a_body_that_keeps_what_it_makes(how: str, ops: Ops) -> None:
    body = keeping(how)
    with FakeTensorMode(), pytest.raises(NoFakeError, match=KEEPS):
        fake_from_body(body)(torch.ones(300))
    with pytest.raises(NoFakeError, match=KEEPS):
        probe_launches(body, (torch.ones(300),), {})


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("raises", [False, True])
def test_a_body_with_a_stated_fake_that_keeps_what_it_makes(raises: bool, ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        result = keeping("attribute")(x)
        assert not raises
        return result

    op = ops.seen("keeps", body)
    with pytest.raises(BackendCompilerFailed, match=r"NoFakeError: The body '.*body' keeps a Tensor"):
        op_stays(op)


class Workspaces:
    """Two of the caches that libraries keep, and a body with them. They are younger than what the tests freeze."""

    def __init__(self) -> None:
        self.one = functools.cache(torch.zeros)
        self.many = functools.lru_cache(maxsize=3)(lambda size: ([torch.zeros(size)], size))

    def body(self, x: Tensor) -> Tensor:
        assert self.one(x.numel()).shape == self.many(x.numel())[0][0].shape
        return patterns.module_level(x)

    def stopped(self, x: Tensor) -> Tensor:
        self.body(x)
        return x.new_empty(int(x.sum()))

    def sizes(self) -> tuple[int, int]:
        return self.one.cache_info().currsize, self.many.cache_info().currsize


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("states_its_fake", [False, True])
def test_a_cache_of_functools_is_emptied_and_the_op_stays_opaque(states_its_fake: bool, ops: Ops) -> None:
    workspaces = Workspaces()

    def body(x: Tensor) -> Tensor:
        return workspaces.body(x)

    fake = torch.empty_like if states_its_fake else fake_from_body(body)
    op = ops.seen("cached", body, fake=fake)
    with pytest.warns(OpaqueFallbackWarning, match=r"it keeps a Tensor that it makes .*; pass it as an argument"):
        assert op_stays(op)
    assert workspaces.sizes() == (0, 0)

    made = workspaces.one(300)
    workspaces.many(300)
    op_stays(op)
    assert workspaces.one(300) is made
    assert workspaces.sizes() == (1, 1)
    assert not isinstance(made, FakeTensor)


def test_a_run_that_stops_leaves_nothing_in_a_cache() -> None:
    workspaces = Workspaces()
    assert "reads data" in probe_launches(workspaces.stopped, (torch.ones(300),), {}).stopped_by
    assert workspaces.sizes() == (0, 0)
    with FakeTensorMode(), pytest.raises(NoFakeError, match="its outputs depend on them"):
        fake_from_body(workspaces.stopped)(torch.ones(300))
    assert workspaces.sizes() == (0, 0)


@dataclass
class Record:
    inner: list[State]


def in_a_cycle(x: Tensor) -> Tensor:
    made = [x * 2]
    made.append(made)  # type: ignore[arg-type]
    return x.clone()


def in_place(x: Tensor) -> Tensor:
    STATE.kept = x
    return x.add_(1)


NOTHING_KEPT: dict[str, Callable[[Tensor], Any]] = {
    "cycle": in_a_cycle,
    "view": lambda x: (x * 2)[1:],
    "record": lambda x: Record([State(by_key={"a": x * 2})]),
    "argument": in_place,
}


@pytest.mark.parametrize("name", NOTHING_KEPT)
def test_what_is_not_kept(name: str) -> None:
    with FakeTensorMode():
        fake_from_body(NOTHING_KEPT[name])(torch.ones(300))


def test_an_error_of_the_body_says_where() -> None:
    def refuses(x: Tensor) -> Tensor:
        made = [x * 2]
        raise ValueError(len(made))

    with FakeTensorMode(), pytest.raises(ValueError, match="1") as caught:
        fake_from_body(refuses)(torch.ones(300))
    assert "in refuses" in "".join(traceback.format_exception(caught.value))


TABLE = torch.arange(4.0)


def looks_up(x: Tensor) -> Tensor:
    return patterns.module_level(x) + TABLE.to(x.device).sum()


@pytest.mark.usefixtures("stub")
def test_a_table_of_the_module(ops: Ops) -> None:
    op = triton_op(f"{ops.namespace}::table", looks_up, mutates_args=(), schema="(Tensor x) -> Tensor")
    why = rf"it uses a Tensor that is not an argument \({__file__}:\d+\); pass it as one"
    with pytest.warns(OpaqueFallbackWarning, match=why):
        (graph,) = aot_graphs(op, torch.ones(300), device="cpu")
    assert str(op._opoverload) in operators(graph)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        assert fake_from_body(looks_up)(torch.ones(300)).shape == (300,)
        assert not mode.allow_non_fake_inputs
