# SPDX-License-Identifier: Apache-2.0
"""Object handles: what callers pass and bodies and fakes get, each error, one graph for many objects, the registry."""

from __future__ import annotations

import abc
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import pytest
import torch
from _signatures import count_graphs
from magi_opschema import (
    ObjectHandle,
    errors,
    get_object,
    lower_signature,
    magi_register_custom_op,
    op_def,
    opcheck,
    register_object,
    release_object,
)
from magi_opschema._handles import REGISTRY
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv


_GENERIC: Any = ObjectHandle


class Runner:
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


def make_op(ns: str, name: str = "run", annotation: Any = Runner, **options: Any) -> Op:
    @magi_register_custom_op(f"{ns}::{name}", **{"infer_output_meta_fn": ["x"], **options})
    def run(x: Tensor, runner: ObjectHandle[annotation]) -> Tensor:
        return runner.run(x)  # type: ignore[no-any-return]

    return run


def stale_handle() -> int:
    handle = register_object(Runner())
    release_object(handle)
    return handle


class Base(abc.ABC):
    @abc.abstractmethod
    def run(self, x: Tensor) -> Tensor: ...


class Derived(Base):
    def run(self, x: Tensor) -> Tensor:
        return x * 2.0


@runtime_checkable
class Runs(Protocol):
    def run(self, x: Tensor) -> Tensor: ...


class Pair(NamedTuple):
    runner: ObjectHandle[Runner]
    x: Tensor


def test_object_and_handle_reach_the_same_body(ns: str, x: Tensor) -> None:
    run, runner = make_op(ns), Runner(3.0)
    handle = register_object(runner)
    assert isinstance(handle, int)
    for passed in (runner, handle, int(handle)):
        torch.testing.assert_close(run(x, passed), x * 3)
    assert op_def(run).lowering.schema == "run(Tensor x, SymInt runner) -> Tensor"
    torch.testing.assert_close(op_def(run).torch_op(x, handle), x * 3)
    torch.testing.assert_close(op_def(run).lowered_fn(x, handle), x * 3)
    before = len(REGISTRY._references)
    torch.testing.assert_close(run(x, Runner(5.0)), x * 5)  # without a registration
    gc.collect()
    assert len(REGISTRY._references) == before


@pytest.mark.parametrize("by_handle", [False, True])
def test_every_place_of_a_signature(ns: str, x: Tensor, by_handle: bool) -> None:
    @magi_register_custom_op(f"{ns}::all", infer_output_meta_fn=["x"])
    def every(
        x: Tensor,
        job: Job[Runner],
        pair: Pair,
        many: list[ObjectHandle[Runner]],
        some: tuple[ObjectHandle[Runner], ...] = (),
        maybe: ObjectHandle[Runner] | None = None,
        job_or_none: Job[Runner] | None = None,
        *,
        named: ObjectHandle[Runner],
    ) -> Tensor:
        assert isinstance(some, tuple)
        total = job.runner.scale + pair.runner.scale + sum(r.scale for r in (*many, *some)) + named.scale + job.shift
        total += maybe.scale if maybe else 0
        total += job_or_none.runner.scale if job_or_none else 0
        return x * total

    runners = [Runner(10.0**i) for i in range(8)]
    passed: list[Any] = [register_object(runner) if by_handle else runner for runner in runners]
    a, b, c, d, e, f, g, h = passed
    result = every(x, Job(a), Pair(b, x), [c, d], (e,), f, Job(g), named=h)
    torch.testing.assert_close(result, x * 11111111.0)
    torch.testing.assert_close(every(x, Job(a, 1.0), Pair(a, x), [], named=a), x * 4)


class Answering:
    """Says yes to every attribute, as a proxy may."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Base, Derived()),
        (Runs, Runner()),
        (Runner | Derived, Derived()),
        (Any, Runner()),
        (Job[int], Job(1)),
        (Any, Answering()),
        (Any, nn.Linear(1, 1)),
        (Any, lambda: None),
        (Any, Runner),
    ],
)
def test_what_a_handle_may_be_of(ns: str, x: Tensor, annotation: Any, value: Any) -> None:
    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, runner: ObjectHandle[annotation]) -> Tensor:
        assert runner is value
        return x + 1

    handle = register_object(value)
    compiled, graphs = count_graphs(run)
    torch.testing.assert_close(run(x, value), x + 1)
    if not isinstance(value, type):
        torch.testing.assert_close(compiled(x, value), x + 1)
        assert len(graphs) == 1
    torch.testing.assert_close(compiled(x, handle), x + 1)
    release_object(handle)
    torch.testing.assert_close(run(x, value), x + 1)


def test_a_default_object_stays_out_of_the_schema(ns: str, x: Tensor) -> None:
    default = Runner(4.0)

    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, runner: ObjectHandle[Runner] = default) -> Tensor:
        return runner.run(x)

    assert op_def(run).lowering.schema == "run(Tensor x, SymInt runner) -> Tensor"
    torch.testing.assert_close(run(x), x * 4)


def test_opcheck(ns: str, x: Tensor) -> None:
    assert set(opcheck(make_op(ns), (x, Runner())).values()) == {"SUCCESS"}


def test_a_fake_that_uses_the_object_gets_an_error(ns: str, x: Tensor) -> None:
    def fake(x: Tensor, runner: Runner) -> Tensor:
        return x.new_empty(int(runner.scale))

    run = make_op(ns, infer_output_meta_fn=fake)
    sentence = "'scale' was read from a Runner where the op is described, not run"
    with pytest.raises(errors.FakeMismatchError, match=sentence):
        run(x, Runner())


def test_a_stand_in_is_passed_on_to_other_ops(ns: str, x: Tensor) -> None:
    inner = make_op(ns, "inner")

    def fake(x: Tensor, jobs: Job[Runner]) -> Tensor:
        assert repr(jobs.runner) == "<stand-in for a Runner>"
        return inner(x, jobs.runner)

    @magi_register_custom_op(f"{ns}::outer", infer_output_meta_fn=fake)
    def outer(x: Tensor, jobs: Job[Runner]) -> Tensor:
        return jobs.runner.run(x)

    job = Job(Runner(3.0))
    torch.testing.assert_close(outer(x, job), x * 3)
    torch.testing.assert_close(torch.compile(outer, backend="aot_eager", fullgraph=True)(x, job), x * 3)


def test_gradients_go_through_a_second_op(ns: str, x: Tensor) -> None:
    run_backward = make_op(ns, "run_backward")

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.runner = inputs[1]

    def backward(ctx: Any, grad: Tensor) -> Any:
        return run_backward(grad, ctx.runner), None

    run = make_op(ns, setup_context_fn=save, backward_fn=backward)
    runners = [Runner(float(i)) for i in range(1, 12)]
    for runner in runners:
        register_object(runner, weak=True)
    compiled, graphs = count_graphs(lambda x, runner: run(x, runner).sin())
    for runner in runners:
        for fn in (lambda x, runner: run(x, runner).sin(), compiled):
            leaf = x.clone().requires_grad_()
            fn(leaf, runner).sum().backward()
            torch.testing.assert_close(leaf.grad, torch.cos(x * runner.scale) * runner.scale)
    assert len(graphs) == 1
    torch.testing.assert_close(
        torch.func.grad(lambda x: run(x, runners[1]).sum())(x), torch.full_like(x, runners[1].scale)
    )


@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        ("text", errors.ArgumentError, "'runner' is a str, expected a Runner, or the handle that register_object"),
        (None, errors.ArgumentError, "'runner' is a NoneType, expected a Runner"),
        (Derived(), errors.ArgumentError, "'runner' is a Derived, expected a Runner"),
        (7, errors.HandleError, "'runner' names no Runner: 7 is not a handle of this process"),
        (-1, errors.HandleError, "-1 is not a handle of this process.*not in a spawned worker, another rank"),
        (stale_handle, errors.HandleError, "is a stale handle: its Runner was released or collected. Keep the Runner"),
        (lambda: register_object(Derived()), errors.ArgumentError, "is the handle of a Derived, expected a Runner"),
    ],
)
def test_wrong_values(ns: str, x: Tensor, value: Any, error: type[Exception], sentence: str) -> None:
    run = make_op(ns)
    passed = value() if callable(value) else value
    with pytest.raises(error, match=sentence) as raised:
        run(x, passed)
    assert str(raised.value).startswith(f"{ns}::run: 'runner'")
    assert "test_handles.py:" in str(raised.value)


class Layer(nn.Module):
    def __init__(self, run: Op, scale: float, place: str) -> None:
        super().__init__()
        self.run, self.place, self.width = run, place, 3
        self.runner = Runner(scale)
        handle = register_object(self.runner, weak=True)
        self.passed: Any = {"object": self.runner, "handle": handle, "field": None}[place]
        self.job = Job(self.runner)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.job.runner if self.place == "field" else self.passed) + 1


@pytest.mark.parametrize("place", ["object", "handle", "field"])
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_32_layers_share_one_graph_and_stand_in_one(ns: str, x: Tensor, place: str, dynamic: bool | None) -> None:
    run = make_op(ns)
    layers = [Layer(run, float(i), place) for i in range(32)]
    compiled, graphs = count_graphs(lambda layer, x: layer(x), dynamic=dynamic)
    for i, layer in enumerate(layers):
        torch.testing.assert_close(compiled(layer, x), x * i + 1)
    assert len(graphs) == 1
    stack = nn.Sequential(*layers)
    compiled, graphs = count_graphs(stack, dynamic=dynamic)
    torch.testing.assert_close(compiled(x), stack(x))
    assert len(graphs) == 1


def test_handle_and_object_in_one_place(ns: str, x: Tensor) -> None:
    compiled, graphs = count_graphs(make_op(ns))
    first, second = Runner(2.0), Runner(3.0)
    handles = [register_object(first), register_object(second)]
    for passed, scale in ((handles[0], 2), (first, 2), (handles[1], 3), (second, 3), (int(handles[0]), 2)):
        torch.testing.assert_close(compiled(x, passed), x * scale)
    assert len(graphs) == 3
    for handle in handles:
        release_object(handle)


def test_an_object_registered_while_traced_needs_its_own_graph(ns: str, x: Tensor) -> None:
    compiled, graphs = count_graphs(make_op(ns))
    for scale in (2.0, 3.0):
        runner = Runner(scale)
        torch.testing.assert_close(compiled(x, runner), x * scale)
        torch.testing.assert_close(compiled(x, runner), x * scale)
    assert len(graphs) == 2


def test_an_object_made_in_compiled_code(ns: str, x: Tensor) -> None:
    run = make_op(ns)
    with pytest.raises(Exception, match="made inside a compiled function has no handle"):
        torch.compile(lambda x: run(x, Runner(2.0)), backend="eager", fullgraph=True)(x)


def test_a_body_that_is_traced_says_so(ns: str, x: Tensor) -> None:
    symbol = ShapeEnv().create_unbacked_symint()
    with pytest.raises(errors.HandleError, match="stands for any Runner while the op is traced"):
        op_def(make_op(ns)).lowered_fn(x, symbol)


def test_stale_in_a_compiled_graph(ns: str, x: Tensor) -> None:
    compiled, _ = count_graphs(make_op(ns))
    with pytest.raises(errors.HandleError, match=f"{ns}::run: 'runner' names no Runner: .* is a stale handle"):
        compiled(x, stale_handle())


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def run(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda obj: pickle.loads(pickle.dumps(obj))])
def test_a_copy_is_another_object(ns: str, x: Tensor, copied: Callable[[Runner], Runner]) -> None:
    run, runner = make_op(ns), Runner(3.0)
    compiled, _ = count_graphs(run)
    torch.testing.assert_close(compiled(x, runner), x * 3)
    other = copied(runner)
    other.scale = 5.0
    torch.testing.assert_close(compiled(x, other), x * 5)
    torch.testing.assert_close(run(x, copied(other)), x * 5)
    torch.testing.assert_close(compiled(x, runner), x * 3)
    assert register_object(other) != register_object(runner)
    assert get_object(copied(register_object(runner))) is runner  # type: ignore[arg-type]


def test_a_released_object_gets_a_new_handle(ns: str, x: Tensor) -> None:
    run, runner = make_op(ns), Runner(3.0)
    compiled, _ = count_graphs(run)
    first = register_object(runner)
    compiled(x, runner)
    release_object(first)
    torch.testing.assert_close(compiled(x, runner), x * 3)
    assert get_object(register_object(runner)) is runner
    assert register_object(runner) != first


def test_an_object_without_place_for_its_handle(ns: str, x: Tensor) -> None:
    run = make_op(ns, annotation=Slotted)
    slotted = Slotted(3.0)
    with pytest.raises(errors.ArgumentError, match=r"a Slotted takes no weak reference.*register_object\(obj\) once"):
        run(x, slotted)
    handle = register_object(slotted)
    torch.testing.assert_close(run(x, slotted), x * 3)
    compiled, _ = count_graphs(run)
    torch.testing.assert_close(compiled(x, handle), x * 3)
    release_object(handle)


def test_an_object_without_place_for_its_handle_in_compiled_code(ns: str, x: Tensor) -> None:
    """Each has a graph of its own, which a later object at the same address must not enter."""
    compiled, graphs = count_graphs(make_op(ns, annotation=Slotted))
    first, second = Slotted(3.0), Slotted(5.0)
    for slotted in (first, second, first, second):
        torch.testing.assert_close(compiled(x, slotted), x * slotted.scale)
    assert len(graphs) == 2
    del first, second, slotted
    for scale in (7.0, 9.0):
        torch.testing.assert_close(compiled(x, Slotted(scale)), x * scale)


def test_handles_are_never_given_twice() -> None:
    handles = set()
    for _ in range(1000):
        handle = register_object(Runner())
        release_object(handle)
        handles.add(int(handle))
    assert len(handles) == 1000
    assert all(0 < handle < 2**63 for handle in handles)


def test_a_full_epoch_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Runner()
    before = register_object(first)
    monkeypatch.setattr(REGISTRY, "_numbers", iter(()))
    after = register_object(Runner())
    assert before >> 40 != after >> 40
    assert get_object(before) is first
    release_object(before)
    release_object(after)


def test_strong_weak_and_both() -> None:
    strong, weak, both = Runner(), Runner(), Runner()
    handles = [register_object(strong), register_object(weak, weak=True), register_object(both, weak=True)]
    assert register_object(both) == handles[2]
    assert register_object(strong, weak=True) == handles[0]
    references = [weakref.ref(obj) for obj in (strong, weak, both)]
    del strong, weak, both
    gc.collect()
    assert [reference() is not None for reference in references] == [True, False, True]
    with pytest.raises(errors.HandleError, match="a stale handle: its Runner was released or collected"):
        get_object(handles[1])
    for handle in (handles[0], handles[2]):
        release_object(handle)
    assert [reference() for reference in references] == [None, None, None]


def test_a_handle_keeps_no_cycle() -> None:
    gc.disable()
    try:
        runner = Runner()
        register_object(runner, weak=True)
        reference = weakref.ref(runner)
        del runner
        assert reference() is None
    finally:
        gc.enable()


def test_threads_agree_on_the_handle() -> None:
    runners = [Runner() for _ in range(200)]
    barrier = threading.Barrier(8)

    def work(_: int) -> list[int]:
        barrier.wait()
        return [register_object(runner) for runner in runners]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert all(handles == found[0] for handles in found)
    assert len(set(found[0])) == 200
    for handle in found[0]:
        release_object(handle)


def _cycle(times: int) -> None:
    for _ in range(times):
        release_object(register_object(Runner()))
        register_object(Runner(), weak=True)


@pytest.mark.parametrize("times", [2_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_cycles_leak_nothing(times: int) -> None:
    import tracemalloc

    _cycle(100)
    gc.collect()
    held, known = len(REGISTRY._references), len(REGISTRY.by_address)
    # tracemalloc makes the million slow; live memory after the cycles is what counts.
    _cycle(times - 1000)
    tracemalloc.start()
    _cycle(1000)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    _cycle(1000)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert (len(REGISTRY._references), len(REGISTRY.by_address)) == (held, known)
    assert grown < 1000


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: get_object("7"), r"get_object\(\) takes the int that register_object\(\) returned, and got a str"),  # type: ignore[arg-type]
        (lambda: get_object(7), "get_object\\(\\): 7 is not a handle of this process"),
        (lambda: release_object(stale_handle()), "release_object\\(\\): .* is a stale handle: its Runner"),
        (lambda: register_object(7), "7 cannot have a handle: a schema takes an int or None as it is"),
        (lambda: register_object(None), "None cannot have a handle"),
        (lambda: register_object([1], weak=True), "a list takes no weak reference, so it must be held until"),
        (lambda: _GENERIC(3), "ObjectHandle\\[T\\] is an annotation"),
    ],
)
def test_registry_errors(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(errors.OpSchemaError, match=sentence):
        call()


def test_lowering_registers_no_object() -> None:
    @dataclass(frozen=True)
    class Config:
        runner: ObjectHandle[Runner] = field(default_factory=Runner)

    def run(x: Tensor, config: Config) -> Tensor:
        raise NotImplementedError

    before = len(REGISTRY._references)
    lower_signature(run)
    assert len(REGISTRY._references) == before
