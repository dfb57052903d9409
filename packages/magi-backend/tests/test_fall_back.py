# SPDX-License-Identifier: Apache-2.0
"""What does not compile with our passes, options and repairs is compiled without them, and nobody overlooks it.

Ctrl-C and ``sys.exit`` while this backend works arrive as themselves, and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import magi_backend._compose as compose
import pytest
import torch
from magi_backend import MismatchError, explain, read_report
from magi_backend._records.log import Collector, collecting
from magi_backend._repairs import _defect
from magi_backend._repairs._defect import is_active, known_defects, repaired
from magi_backend.errors import BoundaryOpError
from magi_passes import MagiInductorPass, PassFailedError, PassPipeline, current_context
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import Scheduler


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from magi_backend.records import GraphRecord
    from torch.fx import Graph

WARNING = "was compiled once more without the passes, options and repairs of magi. With them: "
calls: Counter[str] = Counter()


def _is_wanted(graphs: str) -> bool:
    context = current_context()
    assert context is not None
    return graphs in context.graph


@dataclass(frozen=True)
class Failing(MagiInductorPass):
    """Breaks the graph, and raises."""

    graphs: str = ""

    def __call__(self, graph: Graph) -> None:
        if _is_wanted(self.graphs):
            calls["failing"] += 1
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
                node.target = torch.ops.aten.cos.default
            msg = "planted"
            raise IndexError(msg)


@dataclass(frozen=True)
class FailingJoint(Failing):
    hook = "joint_custom_post_pass"


@dataclass(frozen=True)
class Switching(MagiInductorPass):
    """Rewrites the graph to something wrong, and sets an option under which lowering asserts."""

    inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)
    graphs: str = ""

    def __call__(self, graph: Graph) -> None:
        if _is_wanted(self.graphs):
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
                node.target = torch.ops.aten.cos.default
            inductor_config.triton.max_tiles = 3


def of_the_user(graph: Graph) -> None:
    calls["user"] += 1
    msg = "the user's"
    raise LookupError(msg)


@dataclass(frozen=True)
class OfTheUser(MagiInductorPass):
    def __call__(self, graph: Graph) -> None:
        of_the_user(graph)


@pytest.fixture(autouse=True)
def _counted() -> None:
    calls.clear()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[MagiInductorPass], None]:
    """Add a pass to those of the backend."""

    def add(planted: MagiInductorPass) -> None:
        chosen = vars(compose)["chosen_passes"]
        monkeypatch.setattr(compose, "chosen_passes", lambda *args: (*chosen(*args), planted))

    return add


@pytest.fixture
def before_lowering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Call a function before each of Inductor's lowerings, which fails if it raises."""

    def set_up(check: Callable[[], object]) -> None:
        lower = GraphLowering.run

        def run(self: GraphLowering, *args: Any) -> Any:
            check()
            return lower(self, *args)

        monkeypatch.setattr(GraphLowering, "run", run)

    return set_up


@pytest.fixture
def asserting(before_lowering: Any) -> None:
    """Inductor's lowering fails where `Switching` is at work."""

    def check() -> None:
        assert inductor_config.triton.max_tiles != 3, "exponent must be non-negative"

    before_lowering(check)


def chain(x: Tensor) -> Tensor:
    return (x.sin() * 2).sin() + 1


@contextlib.contextmanager
def falling_back(*, times: int) -> Iterator[Collector]:
    with collecting(Collector()) as collector, pytest.warns(UserWarning, match=WARNING) as warned:
        yield collector
    assert len(warned) == times


def lenient(fn: Any, options: Mapping[str, Any] = {}, *, dynamic: bool | None = None) -> Callable[..., Any]:
    return torch.compile(fn, backend="magi", dynamic=dynamic, options={"magi.strict": False, **options})


def graphs_of(collector: Collector) -> list[GraphRecord]:
    return [graph for compilation in collector.compilations() for graph in compilation.graphs]


def gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    fn(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(Failing, "forward"), (Failing, "backward"), (Switching, "forward"), (Switching, "backward"), (FailingJoint, "")],
)
def test_what_our_pass_breaks_is_compiled_without_it(
    make: Any, kind: str, dynamic: bool, plant: Any, asserting: None
) -> None:
    plant(make(kind))
    x = torch.randn(5, 3)
    with falling_back(times=1) as collector:
        compiled = lenient(chain, dynamic=dynamic)
        for _ in range(2):
            torch.testing.assert_close(gradient(compiled, x), gradient(chain, x))
    fallen = [graph for graph in graphs_of(collector) if graph.fell_back]
    kinds = ["backward"] if kind == "backward" else ["forward", "backward"]
    assert [graph.kind for graph in fallen if not graph.error] == kinds
    for graph in fallen:
        assert graph.fell_back is not None
        assert make.__name__ in graph.fell_back.passes
        assert ("planted" in graph.fell_back.error) != (make is Switching)
        assert not graph.passes


NUMBERS = (number for number in range(9))


@dataclass(frozen=True)
class Counting(MagiInductorPass):
    def __call__(self, graph: Graph) -> None:
        next(NUMBERS)


def test_a_pass_of_ours_that_has_no_identity_is_left_out(plant: Any) -> None:
    plant(Counting())
    x = torch.randn(5)
    with pytest.warns(UserWarning, match=f"{WARNING}PassIdentityError: global 'NUMBERS'"):
        result = lenient(chain)(x)
    torch.testing.assert_close(result, chain(x))


def test_a_repair_that_fails(before_lowering: Any) -> None:
    def check() -> None:
        scope = _defect._scope.get()
        assert scope is None or not scope.names, "a repair is active"

    before_lowering(check)
    x = torch.randn(5)
    with pytest.warns(UserWarning, match="a repair is active"):
        result = lenient(chain)(x)
    torch.testing.assert_close(result, chain(x))


@pytest.mark.parametrize("options", [{"magi.strict": True}, {}], ids=["asked for", "the tests are strict"])
def test_strict_raises(options: dict[str, Any], plant: Any) -> None:
    """The tests are, or a pass that fails would only be a warning in some process that a test starts."""
    plant(Failing())
    with pytest.raises(PassFailedError, match="planted"):
        torch.compile(chain, backend="magi", options=options)(torch.randn(5))
    assert calls["failing"] == 1


OF_THE_USER: list[Any] = [
    {"post_grad_custom_post_pass": of_the_user},
    PassPipeline([OfTheUser()]).inductor_options(),
]


@pytest.mark.parametrize("options", OF_THE_USER, ids=["function", "pass"])
def test_a_pass_of_the_users_stays_an_error(options: Any) -> None:
    with pytest.raises(Exception, match="the user's") as raised:
        lenient(chain, options)(torch.randn(5))
    assert calls["user"] == 1
    assert not any(isinstance(note, str) and "magi" in note for note in getattr(raised.value, "__notes__", ()))


def test_a_pass_of_the_users_runs_once_on_what_is_compiled_again(plant: Any) -> None:
    """Even one that changes the captured graph in place."""
    plant(Failing())

    def add_one(graph: Graph) -> None:
        ((result,),) = cast("Any", graph.output_node().args)
        with graph.inserting_after(result):
            more = graph.call_function(torch.add, (result, 1))
        graph.output_node().args = ((more,),)

    x = torch.randn(5)
    with pytest.warns(UserWarning, match=WARNING):
        result = lenient(chain, {"pre_grad_custom_pass": add_one})(x)
    torch.testing.assert_close(result, chain(x) + 1)


def test_where_stock_fails_too_its_error_is_raised(before_lowering: Any, plant: Any) -> None:
    plant(Failing())

    def check() -> None:
        msg = "stock cannot"
        raise NotImplementedError(msg)

    before_lowering(check)
    with pytest.raises(Exception, match="NotImplementedError: stock cannot") as stock:
        torch.compile(chain, backend="inductor")(torch.randn(5))
    torch.compiler.reset()
    with pytest.raises(Exception, match="NotImplementedError: stock cannot") as ours, warnings.catch_warnings():
        lenient(chain)(torch.randn(5))
    assert type(ours.value) is type(stock.value)
    assert "planted" not in "".join(map(str, (ours.value.__cause__, ours.value.__context__)))


def test_a_wrong_setting_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "_compile_by_inductor", lambda *_: pytest.fail("it was compiled"))
    with pytest.raises(BoundaryOpError):
        lenient(chain, {"magi.boundary_ops": ["no::such"]})(torch.randn(5))


def test_nothing_is_kept_in_a_cache(plant: Any, fresh_caches: Path) -> None:
    plant(Failing("backward"))
    for _ in range(2):  # the second process would find what the first one has stored
        with pytest.warns(UserWarning, match=WARNING):
            gradient(lenient(chain), torch.randn(7, 3))
        torch.compiler.reset()
    assert calls["failing"] == 2


def test_pieces_and_single_sizes(plant: Any, ns: str) -> None:
    plant(Failing())
    op = torch.library.custom_op(f"{ns}::cut", lambda x: x * 3, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)

    def split(x: Tensor) -> Tensor:
        return chain(op(chain(x))).neg()  # equal pieces would be compiled once

    options: dict[str, Any] = {"magi.boundary_ops": [f"{ns}::cut"], "magi.hot_sizes": 1, "magi.hot_after": 2}
    with falling_back(times=4) as collector:
        compiled = lenient(split, options, dynamic=True)
        for x in [torch.randn(5), *[torch.randn(6)] * 4]:
            torch.testing.assert_close(compiled(x), split(x))
    fallen = [graph.title for graph in graphs_of(collector) if graph.fell_back]
    assert len(fallen) == 4, fallen  # two pieces for any size, and two for one


def test_every_report_shows_it(plant: Any, tmp_path: Path) -> None:
    plant(Failing())
    compiled = lenient(chain, {"magi.report": str(tmp_path / "run")})
    with pytest.warns(UserWarning, match=WARNING):
        report = explain(compiled)(torch.randn(5))
    run = read_report(tmp_path / "run")
    assert report.agrees
    for text in (str(report), str(run), report.to_html(), run.to_html()):
        assert "fell back: inference was compiled once more without the passes, options" in " ".join(text.split())
    data = json.loads(report.to_json())["compilations"][0]["graphs"][-1]["fell_back"]
    assert data["passes"] == ["Failing"]
    assert "planted" in data["error"]


INTERRUPTS = [KeyboardInterrupt, SystemExit]

# Where one strikes: in the lowering, the scheduler, and the code that is written last.
PLACES = [(GraphLowering, "run"), (Scheduler, "dead_node_elimination"), (GraphLowering, "codegen")]


@pytest.mark.parametrize("kind", INTERRUPTS)
@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_in_a_compilation(kind: type[BaseException], owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*_: Any, **__: Any) -> None:
        raise kind

    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 8, 8)
    # With magi.strict, which is on in these tests, nothing would be compiled once more.
    compiled = torch.compile(model, backend="magi", dynamic=True, options={"magi.strict": False})
    settings = torch._inductor.config.get_config_copy()

    with monkeypatch.context() as patch, collecting(Collector(fresh=True)) as collector, torch.no_grad():
        patch.setattr(owner, name, strike)
        with pytest.raises(kind) as caught:
            compiled(x)

    assert type(caught.value) is kind
    assert torch._inductor.config.get_config_copy() == settings
    assert not any(is_active(defect.name) for defect in known_defects())
    (compilation,) = collector.compilations()
    assert compilation.error.startswith(kind.__name__)
    assert all(graph.error.startswith(kind.__name__) for graph in compilation.graphs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_inside_a_repair(kind: type[BaseException]) -> None:
    class Struck:
        def __lt__(self, other: object) -> bool:
            raise kind

        __gt__ = __lt__

    reported: list[str] = []
    with pytest.raises(kind), repaired(known_defects(), reported.append):
        ir.get_stride_order([Struck(), Struck()])

    assert not any(is_active(defect.name) for defect in known_defects())
    assert reported == []


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_in_check_which_then_checks_the_next_call(kind: type[BaseException], ns: str) -> None:
    state: dict[str, bool] = {"struck": True, "wrong": True}

    @torch.library.custom_op(f"{ns}::lie", mutates_args=())
    def lie(x: Tensor) -> Tensor:
        if state["struck"]:
            raise kind
        # Eager and compiled calls alternate under magi.check.
        state["turn"] = not state.get("turn", False)
        return x + 1 if state["turn"] or not state["wrong"] else x + 2

    @lie.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    options: dict[str, Any] = {"magi.check": True, "magi.progress": False}
    fn = torch.compile(lambda x: lie(x) * 1, backend="magi", options=options)

    with pytest.raises(kind):
        fn(torch.ones(3))
    state["struck"] = False
    for _call in range(2):
        state["turn"] = False
        with pytest.raises(MismatchError, match=r"output.* of the compiled code differs from eager by 1"):
            fn(torch.ones(3))
    state["wrong"] = False
    torch.testing.assert_close(fn(torch.ones(3)), torch.full((3,), 2.0))
