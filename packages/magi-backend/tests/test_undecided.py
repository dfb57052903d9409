# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,type-arg"
"""Bodies of which only a run can tell whether they launch: found out at a fake call; results are right either way."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest
import torch
import triton
import triton.language as tl
from magi_backend import magi_register_custom_op
from magi_opschema import ObjectHandle, op_def, register_object
from magi_tritonwrap import (
    NoFakeError,
    OpaqueFallbackWarning,
    UnsupportedKernelError,
    UnsupportedLaunchError,
    find_kernels,
    see_through_report,
)
from magi_tritonwrap.testing import aot_graphs, launches_of, stub_driver
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _stub() -> Iterator[None]:
    with stub_driver():
        yield


@triton.jit
def row_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.store(out + row, tl.sum(tl.load(x + row * n + at, at < n, 0.0)))


def rows(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0])
    row_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=64)
    return out


def plain_rows(x: Tensor) -> Tensor:
    return x.sum(1)


@dataclass(frozen=True)
class Mode:
    scale: float = 1.0


WEAK: dict[str, Any] = {"launching": weakref.ref(rows), "plain": weakref.ref(plain_rows)}


def hidden(which: str) -> Callable[[Tensor], Tensor]:
    """A body that launches, or does not, in a function to which no name in it leads."""

    def body(x: Tensor) -> Tensor:
        result: Tensor = WEAK[which]()(x)
        return result

    return body


def graph_of(op: Any, *inputs: Tensor, dynamic: bool | None = None) -> tuple[torch.fx.GraphModule, tuple[Any, ...]]:
    """The graph of an op alone, and the shape that it has there."""
    (graph,) = aot_graphs(op, *(inputs or (torch.ones(4, 50),)), dynamic=dynamic)
    (returned,) = graph.graph.find_nodes(op="output")
    return graph, tuple(returned.args[0][0].meta["val"].shape)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_launch_that_the_search_misses(dynamic: bool | None, ns: str) -> None:
    body = hidden("launching")
    assert find_kernels(body).kernels == ()
    op = magi_register_custom_op(f"{ns}::rows")(body)
    assert "see-through" not in op_def(op).notes
    graph, shape = graph_of(op, dynamic=dynamic)
    assert len(launches_of(graph)) == 1
    assert len(shape) == 1
    assert dynamic or shape == (4,)
    assert op_def(op).notes["see-through"] == "Triton kernels that are captured at compilation"


def test_no_launch_after_all(ns: str) -> None:
    op = magi_register_custom_op(f"{ns}::rows")(hidden("plain"))
    graph, shape = graph_of(op)
    assert shape == (4,), "the body is its own fake"
    assert op_def(op).torch_op in {node.target for node in graph.graph.nodes}
    assert torch.equal(op(torch.ones(4, 50)), torch.full((4,), 50.0))


def counted(calls: list[torch.Size]) -> Callable[..., Tensor]:
    """A fake of the author's for any of the ops below."""

    def infer(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(x.shape)
        return x.new_empty(x.shape[0])

    return infer


def seen(x: Tensor) -> Tensor:
    return rows(x)


def seen_lowered(x: Tensor, mode: Literal["sum"] = "sum") -> Tensor:
    return rows(x)


def seen_flattened(x: Tensor, cfg: Mode = Mode()) -> Tensor:
    return rows(x)


@pytest.mark.parametrize("as_decorator", [False, True])
@pytest.mark.parametrize("body", [seen, seen_lowered, seen_flattened])
def test_a_fake_of_the_author_replaces_that_of_the_body(body: Callable[..., Any], as_decorator: bool, ns: str) -> None:
    calls: list[torch.Size] = []
    op = magi_register_custom_op(f"{ns}::rows")(body)
    assert op_def(op).path == {seen: "direct", seen_lowered: "lowered", seen_flattened: "flattened"}[body]
    infer = counted(calls)
    assert (op.register_fake()(infer) if as_decorator else op.register_fake(infer)) is infer
    graph, shape = graph_of(op)
    assert len(launches_of(graph)) == 1
    assert shape == (4,)
    with torch._subclasses.FakeTensorMode():
        assert op(torch.empty(6, 50)).shape == (6,)
    assert torch.Size((6, 50)) in calls


@pytest.mark.parametrize("which", ["launching", "plain"])
@pytest.mark.parametrize("is_later", [False, True])
def test_a_fake_of_the_author_where_only_a_run_tells(which: str, is_later: bool, ns: str) -> None:
    calls: list[torch.Size] = []
    infer = None if is_later else counted(calls)
    op = magi_register_custom_op(f"{ns}::rows", infer_output_meta_fn=infer)(hidden(which))
    if is_later:
        op.register_fake(counted(calls))
    graph, shape = graph_of(op)
    assert len(launches_of(graph)) == (which == "launching")
    assert (shape, bool(calls)) == ((4,), True)


def test_a_body_with_effects_is_not_run_to_find_out(ns: str) -> None:
    log: list[int] = []

    def body(x: Tensor) -> Tensor:
        log.append(1)
        print("working on it")  # noqa: T201 - what is tested
        result: Tensor = WEAK["plain"]()(x)
        return result

    op = magi_register_custom_op(f"{ns}::effect")(body)
    with pytest.warns(OpaqueFallbackWarning, match=r"is not run to find out, because .*State them with infer_output"):
        _, shape = graph_of(op)
    assert shape == (4, 50), "what the documentation says of an op that tells nothing else"
    assert log == []
    assert op_def(op).notes["see-through"].startswith("no: it is not run to find out, because ")


def one(x: Tensor) -> Tensor:
    assert x.sum().item() < 1e9
    return WEAK["plain"]()(x)  # type: ignore[no-any-return]


def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if (x > 0).any():
        WEAK["plain"]()(x)
    return x.clone(), y.clone()


def nothing(x: Tensor) -> None:
    WEAK["plain"]()(x[: int(x[0, 0])])


@pytest.mark.parametrize(("body", "count"), [(one, 1), (two, 2), (nothing, 1)])
def test_a_body_that_reads_data_is_stopped(body: Callable[..., Any], count: int, ns: str) -> None:
    op = magi_register_custom_op(f"{ns}::reads")(body)
    with pytest.warns(OpaqueFallbackWarning, match=r"does not run on fake tensors: .*it reads data of a tensor"):
        (graph,) = aot_graphs(lambda *args: (op(*args), args[0] + 1), *[torch.ones(4, 50)] * count, device="cpu")
    assert op_def(op).torch_op in {node.target for node in graph.graph.nodes} or body is nothing


class Runner:
    def double(self, x: Tensor) -> Tensor:
        return x * 2


def test_an_object_behind_a_handle_keeps_the_op_opaque_without_a_word(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::run")
    def run(x: Tensor, runner: ObjectHandle[Runner]) -> Tensor:
        return runner.double(x)

    runner = Runner()
    handle = register_object(runner)
    (graph,) = aot_graphs(lambda x: run(x, cast("Runner", handle)), torch.ones(4, 50), device="cpu")
    assert op_def(run).torch_op in {node.target for node in graph.graph.nodes}


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Tensor


def test_no_fake_can_be_had(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::pair")
    def pair(x: Tensor) -> Pair:
        assert x.sum().item()
        return WEAK["plain"]()(x)  # type: ignore[no-any-return]

    with (
        pytest.warns(OpaqueFallbackWarning),
        pytest.raises(TorchRuntimeError, match=r"pair: its outputs are not known before it runs.*infer_output_meta_fn"),
    ):
        graph_of(pair)
    assert issubclass(NoFakeError, RuntimeError)


def misspelt(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    row_kernel[(1,)](x, out, 50, BLOCK=64, launch_pdq=True)
    return out


def test_launches_that_no_graph_can_carry(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = magi_register_custom_op(f"{ns}::refused", on_unsupported="error")(misspelt)
    with pytest.raises(BackendCompilerFailed, match="UnsupportedLaunchError: .*is launched with launch_pdq=") as caught:
        graph_of(refused)
    assert isinstance(caught.value.inner_exception, UnsupportedLaunchError)
    by_default = magi_register_custom_op(f"{ns}::by_default")(misspelt)
    monkeypatch.setenv("MAGI_COMPILE_ON_UNSUPPORTED", "error")
    per_op = magi_register_custom_op(f"{ns}::per_op", on_unsupported="opaque")(misspelt)
    for opaque in (by_default, per_op):
        with pytest.warns(OpaqueFallbackWarning, match="launch_pdq="):
            graph, _ = graph_of(opaque)
        assert launches_of(graph) == []
        (reason,) = see_through_report(opaque).fallbacks
        assert reason.startswith("Triton kernel 'row_kernel' is launched with launch_pdq=")


@triton.autotune(configs=[triton.Config({"BLOCK": 64}, pre_hook=lambda args: None)], key=[])
@triton.jit
def hooked_kernel(x, out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))


def with_a_hook(x: Tensor) -> Tensor:
    hooked_kernel[(1,)](x, x, 50)
    return x


def test_kernels_that_no_graph_can_carry(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(OpaqueFallbackWarning, match="pre_hook="):
        op = magi_register_custom_op(f"{ns}::by_default")(with_a_hook)
    with pytest.raises(UnsupportedKernelError):
        magi_register_custom_op(f"{ns}::per_op", on_unsupported="error")(with_a_hook)
    monkeypatch.setenv("MAGI_COMPILE_ON_UNSUPPORTED", "error")
    with pytest.raises(UnsupportedKernelError):
        magi_register_custom_op(f"{ns}::by_setting")(with_a_hook)
    assert op_def(op).notes["see-through"].startswith("no: Triton kernel 'hooked_kernel' has a triton.Config with")


def test_the_body_runs_neither_at_decoration_nor_when_it_is_read(ns: str) -> None:
    calls: list[int] = []

    def undecided(x: Tensor) -> Tensor:
        calls.append(1)
        return WEAK["plain"]()(x)  # type: ignore[no-any-return]

    def read_whole(x: Tensor) -> Tensor:
        calls.append(2)
        return torch.sin(x).contiguous()

    magi_register_custom_op(f"{ns}::undecided")(undecided)
    op = magi_register_custom_op(f"{ns}::read_whole")(read_whole)
    graph_of(op)
    assert calls == []


class Average:
    """The running average of what it is called with."""

    def __init__(self) -> None:
        self.value, self.calls = torch.zeros(4), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.value = self.value * 0.5 + x * 0.5
        return x + self.value


@pytest.mark.parametrize("infer", [None, lambda x: x.new_empty(4)], ids=["own", "stated"])
@pytest.mark.parametrize("is_undecided", [True, False])
def test_an_eager_call_runs_the_body_once(infer: Any, is_undecided: bool, ns: str) -> None:
    average = Average()
    held: Callable[[], Any] = weakref.ref(average)

    def undecided(x: Tensor) -> Tensor:
        return held()(x)  # type: ignore[no-any-return]

    def launching(x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            rows(x)
        return average(x)

    op = magi_register_custom_op(f"{ns}::averaged", infer_output_meta_fn=infer)(
        undecided if is_undecided else launching
    )
    assert [op(torch.ones(4))[0].item() for _ in range(3)] == [1.5, 1.75, 1.875]
    assert average.calls == 3


@pytest.mark.parametrize("infer", [None, lambda x: x.new_empty(4)], ids=["own", "stated"])
def test_a_trace_refuses_a_body_that_keeps_what_it_makes(infer: Any, ns: str) -> None:
    average = Average()
    held: Callable[[], Any] = weakref.ref(average)

    def averaging(x: Tensor) -> Tensor:
        return held()(x)  # type: ignore[no-any-return]

    op = magi_register_custom_op(f"{ns}::averaged", infer_output_meta_fn=infer)(averaging)
    with pytest.raises(TorchRuntimeError, match="keeps a Tensor that it makes for its next call"):
        torch.compile(op, backend="aot_eager")(torch.ones(4))


@pytest.mark.parametrize("infer", [None, lambda x: x.new_empty(4)], ids=["own", "stated"])
def test_a_cached_workspace_is_made_by_the_first_real_call(infer: Any, ns: str) -> None:
    workspace = functools.cache(torch.arange)
    held = weakref.ref(workspace)

    def body(x: Tensor) -> Tensor:
        return x + held()(x.shape[0])  # type: ignore[misc]

    op = magi_register_custom_op(f"{ns}::offset", infer_output_meta_fn=infer)(body)
    compiled: Any = torch.compile(op, backend="aot_eager")
    for _ in range(2):
        assert compiled(torch.ones(4)).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert type(workspace(4)) is Tensor
