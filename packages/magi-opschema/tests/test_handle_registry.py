# SPDX-License-Identifier: Apache-2.0
"""The registry of object handles: one for an object, never given twice, held or not, freed."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from _handled import _GENERIC, Runner, count_graphs, make_op, stale_handle
from magi_opschema import (
    ObjectHandle,
    errors,
    get_object,
    lower_signature,
    magi_register_custom_op,
    register_object,
    release_object,
)
from magi_opschema._handles.handle import REGISTRY
from torch import Tensor, nn


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


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
    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, runner: ObjectHandle[Slotted]) -> Tensor:
        return x * runner.scale

    slotted = Slotted(3.0)
    with pytest.raises(errors.ArgumentError, match=r"a Slotted takes no weak reference.*register_object\(obj\) once"):
        run(x, slotted)
    handle = register_object(slotted)
    torch.testing.assert_close(run(x, slotted), x * 3)
    compiled, _ = count_graphs(run)
    with pytest.raises(Exception, match=r"a Slotted has no place for its handle.*Pass the handle"):
        compiled(x, slotted)
    torch.testing.assert_close(compiled(x, handle), x * 3)
    release_object(handle)


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
    found: list[list[int]] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        found.append([register_object(runner) for runner in runners])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
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
    held, known = len(REGISTRY), len(REGISTRY.by_address)
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
    assert (len(REGISTRY), len(REGISTRY.by_address)) == (held, known)
    assert grown < 1000


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: get_object("7"),  # type: ignore[arg-type]
            "get_object\\(\\) takes the int that register_object\\(\\) returned, and got a str",
        ),
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

    before = len(REGISTRY)
    lower_signature(run)
    assert len(REGISTRY) == before


class Answering:
    """Says yes to every attribute, as a proxy may."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


@pytest.mark.parametrize(
    "make",
    [
        Answering,
        pytest.param(lambda: nn.Linear(1, 1), id="module"),
        pytest.param(lambda: lambda: None, id="function"),
        pytest.param(lambda: Runner, id="class"),
    ],
)
def test_objects_of_other_kinds(ns: str, x: Tensor, make: Callable[[], Any]) -> None:
    obj = make()

    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, anything: ObjectHandle[Any]) -> Tensor:
        assert anything is obj
        return x + 1

    compiled, _ = count_graphs(run)
    handle = register_object(obj)
    torch.testing.assert_close(run(x, obj), x + 1)
    torch.testing.assert_close(compiled(x, handle), x + 1)
    if not isinstance(obj, type):
        torch.testing.assert_close(compiled(x, obj), x + 1)
    release_object(handle)
    torch.testing.assert_close(run(x, obj), x + 1)
