# SPDX-License-Identifier: Apache-2.0
"""Which sizes have a CUDA graph, over a stand-in for the recorder; tests/test_gpu_graphs.py has torch's."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, cast
from unittest import mock

import pytest
import torch
from magi_backend import explain, wait
from magi_backend._hot import captured
from magi_backend._hot import table as tables
from magi_backend._hot.ranks import Exchange
from magi_backend._hot.recordings import Part, RecordingTable
from magi_backend._hot.table import SHARE
from magi_backend._torch_compat import recording
from magi_backend._torch_compat.recording import Recordable, Recording, wrapping_recordable
from magi_backend._torch_compat.state import compile_lock
from torch import Tensor


class Device:
    """A clock, and functions that take time on it: a call without a graph, a warm-up, a recording, and a replay."""

    def __init__(
        self, patch: pytest.MonkeyPatch, most: int, *, replay: float = 0.25, dropping: float = 0.0, fails_at: int = 0
    ) -> None:
        self.now, self.plain, self.replay, self.first_replay = 0.0, 1.0, replay, replay
        self.dropping, self.fails_at = dropping, fails_at
        self.said: list[str] = []
        self.in_use = False
        self.changes = 0
        patch.setattr(tables, "perf_counter", lambda: self.now)
        patch.setattr(recording, "is_usable", lambda: True)
        self.table = RecordingTable(most, "a model forward", self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def part(self, sizes: str = "") -> Callable[[list[Any]], Any]:
        """A compiled function of ``[n, x]`` with the symbol s0 for n; with *sizes*, of ``[x]``."""

        def model(inputs: list[Any]) -> str:
            self.now += self.plain
            self.said.append(f"plain {inputs[0]}")
            return f"result {inputs[0]}"

        names = ("arg1",) if sizes else ("arg0", "arg1")
        tape: Any = lambda: Tape(self, sizes)  # noqa: E731
        it = Recordable(model, is_backward=False, inputs=names, mutated=(), record=tape, device=0)
        return self.table.added(Part(it, model, {"arg0": "s0"}, sizes))

    @property
    def recorded(self) -> list[int]:
        """The sizes that have a graph, in the order in which they were recorded."""
        return [key[1] for key in self.table._hot()]


def device_and_part(patch: pytest.MonkeyPatch, most: int, **how: Any) -> tuple[Device, Callable[[list[Any]], Any]]:
    """A device, and a function of any size on it."""
    device = Device(patch, most, **how)
    return device, device.part()


class Tape:
    """Stands in for a recording."""

    def __init__(self, device: Device, sizes: str) -> None:
        self.device, self.sizes, self.calls, self.dropped = device, sizes, 0, False

    def was_captured(self) -> bool:
        return self.calls >= 2

    def __call__(self, inputs: list[Any]) -> str:
        assert not self.dropped
        self.calls += 1
        device = self.device
        device.now += {1: 2 * device.plain, 2: 20.0, 3: device.first_replay}.get(self.calls, device.replay)
        device.said.append(f"{ {1: 'warm-up', 2: 'record'}.get(self.calls, 'replay') } {inputs[0]}")
        result = f"result {inputs[0]}"
        inputs.clear()
        if self.calls == device.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        return result

    def drop(self) -> bool:
        self.device.now += self.device.dropping
        self.dropped = not self.device.in_use
        self.device.said.append("dropped" if self.dropped else "in use")
        return self.dropped


def test_a_size_is_recorded_from_its_third_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 2)

    for _ in range(6):
        assert call([4, "x"]) == "result 4"
    assert call([5, "x"]) == "result 5"

    assert device.said == ["plain 4", "plain 4", "warm-up 4", "record 4", "replay 4", "replay 4", "plain 5"]
    outcome = device.table.outcome()
    assert [(use.sizes, use.calls, use.hits, use.has_code) for use in outcome.uses] == [
        ((("s0", 4),), 6, 4, True),
        ((("s0", 5),), 1, 0, False),
    ]


def test_what_exchanges_with_other_ranks_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 2)
    device.table = RecordingTable(2, "a model forward", device._changed, Exchange(group="0"))
    call = device.part()

    for _ in range(6):
        call([4, "x"])

    assert device.said == ["plain 4"] * 6
    assert "must be recorded by all in the same call" in device.table.outcome().advice


def test_no_more_sizes_have_a_graph_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 2)

    for size in (4, 5, 6, 7) * 5:
        call([size, "x"])

    assert device.recorded == [4, 5]
    assert "dropped" not in device.said
    assert "more sizes come back than magi.graphs=2 keeps. Raise it." in device.table.outcome().advice


def test_a_size_that_has_paid_takes_the_place_of_the_least_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 2)
    for size in (4, 5) * 6 + (4,) * 500:
        call([size, "x"])

    calls = 0
    while device.recorded != [4, 6] and calls < 1000:
        call([6, "x"])
        call([4, "x"])
        calls += 1

    assert device.said.count("dropped") == 1
    assert 20 <= calls <= 60, "a recording costs 20, and a call gains 0.75"


def _calls_until_recorded(device: Device, call: Callable[[list[Any]], Any], size: int) -> int:
    calls = 0
    while size not in device.recorded and calls < 100_000:
        call([size, "x"])
        calls += 1
    return calls


@pytest.mark.parametrize("most", [1, 2])
def test_sizes_that_come_for_good_get_graphs_one_after_another(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, most)
    for size in (2, 3) * 200:
        call([size, "x"])

    for size in (4, 5, 6, 7, 2):
        assert 20 <= _calls_until_recorded(device, call, size) <= 60, "a recording costs 20, and a call gains 0.75"
        for _ in range(100):
            call([size, "x"])


def test_the_first_replay_does_not_say_what_a_graph_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 1)
    device.first_replay = 0.99
    for _ in range(500):
        call([4, "x"])

    assert _calls_until_recorded(device, call, 6) <= 60


def test_graphs_that_gain_nothing_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 1, replay=1.05)
    for _ in range(20_000):
        call([4, "x"])
    assert device.recorded == [4]

    assert _calls_until_recorded(device, call, 6) <= 2500, "of each call a hundredth is counted as gain, for 22"


ORDERS: dict[str, Callable[[], Iterator[int]]] = {
    "in turns": lambda: cycle(range(2, 11)),
    "more in turns than are remembered": lambda: cycle(range(2, 200)),
    "three at a time": lambda: (size for first in cycle(range(2, 83)) for size in [first] * 3),
    "four at a time": lambda: (size for first in cycle(range(2, 83)) for size in [first] * 4),
    "a hundred at a time": lambda: (size for first in cycle(range(2, 83)) for size in [first] * 100),
    "never the same": lambda: iter(range(2, 10**6)),
    "by chance": lambda: (random.Random(seed).randint(1, 64) for seed in range(10**6)),
}


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize("replay", [0.25, 1.0, 1.5])
@pytest.mark.parametrize("dropping", [0.0, 5.0])
@pytest.mark.parametrize("order", ORDERS)
def test_no_order_costs_more_than_it_may(
    order: str, dropping: float, replay: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 10_000
    device, call = device_and_part(monkeypatch, most, replay=replay, dropping=dropping)

    for _, size in zip(range(calls), ORDERS[order](), strict=False):
        call([size, "x"])

    said = [each.partition(" ")[0] for each in device.said]
    first = 20.0 * min(most, said.count("record")) + 2.0 * min(most, said.count("warm-up"))
    timed = most * tables.MOST_RUNS * replay
    assert device.now <= (1 + SHARE) * calls * device.plain + first + timed
    assert len(device.recorded) <= most


def test_outputs_that_are_in_use_delay_a_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 1, replay=2.0)
    device.in_use = True
    for _ in range(12):
        call([4, "x"])  # a graph that is slower is dropped
    assert device.said.count("in use") >= 1
    assert "dropped" not in device.said

    device.in_use = False
    call([4, "x"])

    assert device.said.count("dropped") == 1


def test_a_hot_size_takes_over_the_graph_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 2)
    for size in (4, 5) * 6:
        call([size, "x"])
    del device.said[:]

    of_five = device.part("s0=5")
    for _ in range(4):
        assert of_five(["x"]) == "result x"

    assert device.said[:3] == ["dropped", "warm-up x", "record x"]
    assert [device.table.named(key) for key in device.table._hot()] == [(("s0", 4),), (("s0", 5),)]


def test_graphs_of_code_that_is_gone_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 2)
    call, of_five = device.part(), device.part("s0=5")
    for _ in range(6):
        of_five(["x"])
    del of_five
    gc.collect()
    assert "dropped" not in device.said, "not before a call, because another one may be going on"

    call([4, "x"])

    assert device.said.count("dropped") == 1
    assert [use.sizes for use in device.table.outcome().uses] == [(("s0", 4),)]


def test_a_thread_without_trees_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 2)
    monkeypatch.setattr(recording, "is_usable", lambda: False)

    for _ in range(5):
        call([4, "x"])

    assert device.said == ["plain 4"] * 5


def test_what_a_thread_without_trees_calls_replays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 2)
    call, gone = device.part(), device.part("s0=5")
    for _ in range(10):
        call([4, "x"])
        gone(["x"])
    del gone, device.said[:]
    gc.collect()
    monkeypatch.setattr(recording, "is_usable", lambda: False)

    assert call([4, "x"]) == "result 4"

    assert device.said == ["plain 4"], "neither replayed, as another thread may, nor taken out of trees that it lacks"


@contextlib.contextmanager
def another_thread_compiles() -> Iterator[None]:
    begun, over = threading.Event(), threading.Event()

    def compiles() -> None:
        with compile_lock():
            begun.set()
            over.wait()

    thread = threading.Thread(target=compiles)
    thread.start()
    begun.wait()
    yield
    over.set()
    thread.join()


def the_caller_captures() -> Any:
    return mock.patch.object(captured, "is_stream_captured", return_value=True)


@pytest.mark.parametrize("meanwhile", [another_thread_compiles, the_caller_captures])
def test_nothing_is_recorded_meanwhile(meanwhile: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 1)
    for _ in range(3):
        call([4, "x"])
    with meanwhile():
        call([4, "x"])
    call([4, "x"])

    assert device.said == ["plain 4", "plain 4", "warm-up 4", "plain 4", "record 4"]


def test_a_capture_that_fails_is_a_call_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, call = device_and_part(monkeypatch, 4, fails_at=2)

    for size in (4, 5, 6, 7):
        for _ in range(6):
            assert call([size, "x"]) == f"result {size}"

    assert device.recorded == []
    assert device.said.count("dropped") == tables.MOST_FAILURES
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning == (
        "a model forward: no CUDA graph could be made for the sizes s0=4, which run without a CUDA graph: "
        "RuntimeError: operation not permitted when stream is capturing"
    )
    outcome = device.table.outcome()
    assert outcome.uses[0].note == "RuntimeError: operation not permitted when stream is capturing"
    assert outcome.symbolic == "no CUDA graph could be made for 3 sizes"


def test_a_warm_up_that_fails_raises_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = device_and_part(monkeypatch, 1, fails_at=1)
    call([4, "x"])
    call([4, "x"])

    with pytest.raises(RuntimeError, match="not permitted"):
        call([4, "x"])
    device.fails_at = 0

    for _ in range(100):
        assert call([4, "x"]) == "result 4"
    assert device.said[-101:] == ["dropped", *["plain 4"] * 100]
    assert _calls_until_recorded(device, call, 5) < 10


def test_the_only_recording_is_kept_until_the_next_one_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's manager, and with it the pool, live as long as one recording does."""
    device, call = device_and_part(monkeypatch, 1)
    for _ in range(100):
        call([4, "x"])
    (size,) = device.table._hot().values()
    first = weakref.ref(cast("Any", size.run))
    del size

    _calls_until_recorded(device, call, 5)
    assert first() is not None
    assert first().dropped  # type: ignore[union-attr]
    for _ in range(100):
        call([5, "x"])
    _calls_until_recorded(device, call, 6)

    assert first() is None


def test_what_torch_has_forgotten_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    managers = [types.SimpleNamespace(graph="a graph")]
    monkeypatch.setattr(recording, "_manager_of", lambda device: managers[-1])
    made: list[int] = []

    def cudagraphify(model: Any) -> Any:
        made.append(len(managers))
        return model

    ours = Recording(lambda inputs: inputs, cudagraphify, 0)
    assert ours([1]) == ours([1]) == [1]
    managers[0].graph = None
    managers.append(types.SimpleNamespace(graph="another graph"))
    assert ours([1]) == ours([1]) == [1]

    assert made == [1, 2]


def _node(number: int, **children: list[Any]) -> Any:
    by_function = {int(name[1:]): nodes for name, nodes in children.items()}
    function = types.SimpleNamespace(id=number)
    return types.SimpleNamespace(
        wrapped_function=function, children=by_function, graph="a graph", remove_node_cached_tensors=lambda: None
    )


def test_a_recording_is_taken_out_of_the_trees_with_what_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ended = Recording(lambda inputs: inputs, lambda model: model, 0), list[int]()
    last = _node(3)
    ours, ours_below, other = _node(1, f3=[last]), _node(1), _node(2)
    other.children[1] = [ours_below]
    other._path_from_root = [other]
    manager = types.SimpleNamespace(
        roots={1: [ours], 2: [other]},
        ids_to_funcs={1: types.SimpleNamespace(model=made._model), 2: types.SimpleNamespace(model=print)},
        ids_to_stack_traces={1: [], 2: []},
        id_to_mode={1: "mode", 2: "mode"},
        id_to_compile_id={1: None, 2: None},
        num_rerecord={None: {1: 3}},
        warmed_up_functions={1, 2},
        warned_functions=set(),
        warned_mutation={1},
        current_node=ours,
        in_recording=False,
        in_warmup=False,
        try_end_curr_execution=lambda: ended.append(1),
    )
    ours._path_from_root = [ours]
    from torch._inductor import cudagraph_trees

    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda device, create_if_none_exists: manager)

    assert not made.drop(), "it is the current node, and cannot end"
    assert ended == [1]
    assert manager.roots[1] == [ours]
    manager.current_node = other
    assert made.drop()
    assert ended == [1], "what others have returned stays"

    assert manager.roots == {2: [other]}
    assert other.children == {}
    assert [node.graph for node in (ours, ours_below, last, other)] == [None, None, None, "a graph"]
    assert manager.ids_to_funcs.keys() == manager.id_to_mode.keys() == manager.ids_to_stack_traces.keys() == {2}
    assert manager.warmed_up_functions == {2}
    assert manager.num_rerecord == {None: {}}
    assert made.drop(), "there is nothing left"


def test_only_compilations_that_ask_for_it_are_wrapped() -> None:
    from torch._inductor import compile_fx

    wrapped: list[Recordable] = []

    def wrap(it: Recordable) -> Callable[[list[Any]], Any]:
        wrapped.append(it)
        return it.model

    def model(inputs: list[Any]) -> Any:
        return inputs

    arguments: dict[str, Any] = {
        "device_index": 0,
        "stack_traces": [],
        "is_backward": True,
        "is_inference": False,
        "placeholders": [types.SimpleNamespace(name="arg0_1")],
    }
    with wrapping_recordable(wrap):
        assert compile_fx.cudagraphify(model, **arguments) is model
    assert compile_fx.cudagraphify(model, **arguments) is not model

    assert [(it.is_backward, it.inputs, it.device) for it in wrapped] == [(True, ("arg0_1",), 0)]
    assert isinstance(wrapped[0].record(), Recording)


def test_the_report_says_what_cannot_be_recorded() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    report = explain(double, options={"magi.graphs": 2}, dynamic=True)(torch.randn(3))

    assert report.compilations[0].graphs[0].unrecorded == "it has no CUDA device"
    assert "no CUDA graph of inference: it has no CUDA device" in str(report)
    report = explain(double, dynamic=True)(torch.randn(3))
    assert report.compilations[0].graphs[0].unrecorded == ""


def test_forward_backward_and_hot_code_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own way to a recording, on a CPU: only what needs the device is replaced."""
    from torch._inductor import cudagraph_trees, cudagraph_utils, output_code

    runs: list[bool] = []

    def run_without_device(model: Any, *_: Any, is_backward: bool, **__: Any) -> Any:
        def run(inputs: list[Any]) -> Any:
            runs.append(is_backward)
            return model(inputs)

        return run

    post_compile = output_code.CompiledFxGraph.post_compile

    def as_on_device(self: Any, *args: Any) -> None:
        self.device_idxs = {0}
        post_compile(self, *args)

    monkeypatch.setattr(cudagraph_utils, "check_lowering_disable_cudagraph", lambda *_, **__: None)
    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", run_without_device)
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda *_, **__: None)
    monkeypatch.setattr(output_code.CompiledFxGraph, "post_compile", as_on_device)
    monkeypatch.setattr(recording, "is_usable", lambda: True)
    monkeypatch.setattr(RecordingTable, "_has_paid", lambda self, size: False)
    weight = torch.randn(3, 3, requires_grad=True)
    options: dict[str, Any] = {"magi.graphs": 2, "magi.hot_sizes": 1, "magi.hot_after": 6, "graph_partition": False}
    explained = explain(lambda x, weight: torch.sin(x @ weight).sum(), dynamic=True, options=options)

    for count in (4, 5, 6) * 6:
        report = explained(torch.randn(count, 3), weight)

    forward, backward = report.compilations[0].recordings
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert {*runs} == {False, True}
    for each in (forward, backward):
        with_graph = [use for use in each.sizes.uses if use.has_code]
        assert len(with_graph) == 2
        assert {use.sizes[0][1] for use in with_graph} == {4, 5}
        assert {name for use in each.sizes.uses for name, _ in use.sizes} == {
            symbol
            for symbol, _ in report.compilations[0].sizes.symbols  # type: ignore[union-attr]
        }
    assert any(use.has_code and "made" not in use.note for use in report.compilations[0].sizes.uses)  # type: ignore[union-attr]
    assert "CUDA graphs, forward" in str(report)


def test_the_thread_that_calls_has_the_trees_where_another_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(recording, "know_thread", lambda: threads.append(threading.current_thread()))
    options: dict[str, Any] = {"magi.graphs": 2, "magi.first_call": "eager"}
    compiled = torch.compile(lambda x: x * 2, backend="magi", dynamic=True, options=options)

    compiled(torch.randn(3))

    assert threads == [threading.current_thread()]
    assert wait()


def test_a_backward_that_cannot_be_recorded_needs_no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for the one that the forward has made, which has recorded nothing yet."""
    from torch._inductor import cudagraph_trees, output_code

    told: list[str] = []
    manager = types.SimpleNamespace(set_to_running_backward=lambda: told.append("backward"))
    managers: list[Any] = [None]
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda *_, **__: managers[-1])
    monkeypatch.setattr(recording, "is_usable", lambda: True)
    graph: Any = types.SimpleNamespace(current_callable=lambda inputs: inputs, fx_kwargs={"is_backward": True})

    with wrapping_recordable(lambda it: it.model):
        output_code.maybe_handle_backward_generation(graph, types.SimpleNamespace(value=0))  # type: ignore[arg-type]

    assert graph.current_callable([1]) == [1]
    assert told == []
    managers.append(manager)
    assert graph.current_callable([1]) == [1]
    assert told == ["backward"]
