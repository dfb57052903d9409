# SPDX-License-Identifier: Apache-2.0
"""A compilation leaves Inductor's configuration and caches as they were, whoever runs the passes, and what they did.

Passes are run by a pipeline, called by another library's manager, put into a hook by themselves, or called at once. The
managers have the shape of those of vLLM and SGLang; the code is ours.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from made_passes import (
    HOOK,
    RELEASE,
    Foreign,
    Holds,
    Manager,
    Spy,
    at,
    changes_since,
    infer,
    other,
    product,
    seen,
    train,
)
from magi_passes import (
    ConvChooser,
    MagiInductorPass,
    PassContext,
    PassPipeline,
    Reason,
    UnscopedConfigError,
    _torch_compat,
    adapt,
    collect_records,
)
from magi_passes.errors import PassArgumentError, PassArgumentTypeError
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx as compile_fx_bound_early
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx


@dataclass(frozen=True)
class Sneaky(MagiInductorPass):
    key: str = "epilogue_fusion"

    def __call__(self, graph: Graph) -> None:
        if self.key == "in place":
            config.post_grad_fusion_options["mine"] = {}
        else:
            setattr(config, self.key, not getattr(config, self.key))


@pytest.mark.parametrize(("key", "named"), [("epilogue_fusion", "epilogue_fusion"), ("in place", "post_grad_fusion")])
def test_an_undeclared_change_fails_with_the_name_of_the_key(inductor: Any, key: str, named: str) -> None:
    compiled = torch.compile(product, options=PassPipeline([Sneaky(key)]).inductor_options())
    with pytest.raises(Exception, match=f"Sneaky changed Inductor configuration that it does not declare: '{named}"):
        compiled(torch.ones(4, 4))


def _reads_every_key(graph: Graph) -> None:
    for key in _torch_compat.config.config_keys():
        if not key.startswith(("max_autotune_flex", "unsafe_")):
            _torch_compat.config.get_config(key)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reading_every_key_is_not_a_change(inductor: Any) -> None:
    infer(product, PassPipeline([adapt(_reads_every_key)]).inductor_options())


@dataclass(frozen=True)
class Nesting(MagiInductorPass):
    """Compiles another function while its own changes are in place, with a pipeline or with a manager."""

    inductor_config_keys_potentially_mutated_by_this_pass = ("size_asserts",)
    in_a_manager: bool

    def __call__(self, graph: Graph) -> None:
        config.size_asserts = False
        options: Any = {HOOK: Manager(Spy())} if self.in_a_manager else PassPipeline([Spy()]).inductor_options()
        with torch.no_grad():
            gm = torch.fx.symbolic_trace(lambda x: (x.mm(x),))
            compiled: Any = torch._inductor.compile(gm, [torch.ones(3, 3)], options=options)
            seen.append(compiled(torch.ones(3, 3))[0].tolist())
        assert config.size_asserts is False


@pytest.mark.parametrize("in_a_manager", [False, True])
def test_what_a_pass_compiles_starts_from_the_base_without_its_pipeline(inductor: Any, in_a_manager: bool) -> None:
    passes = [Holds(), Nesting(in_a_manager)]
    options: Any = {HOOK: Manager(*passes)} if in_a_manager else PassPipeline(passes).inductor_options()
    with collect_records() as records:
        out = infer(product, options)
    assert torch.equal(out, torch.full((4, 4), 4.0))
    (_, asserts, tiles), result = seen
    assert (asserts, tiles, result) == (True, None, [[3.0] * 3] * 3)
    assert [record.pass_name for record in records] == ["Holds", "Spy", "Nesting"]


def _compile(fn: Any, options: dict[str, Any] | None, *, training: bool = False) -> tuple[int, int, int]:
    """Hits and misses of the AOTAutograd cache, and how many passes ran."""
    torch._dynamo.reset()
    counters.clear()
    with collect_records() as records:
        compiled: Any = torch.compile(fn, options=options)
        train(compiled) if training else compiled(torch.ones(4, 4))
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"], sum(record.ran for record in records)


def test_a_graph_without_passes_hits_whatever_ran_in_between(inductor: Any) -> None:
    _compile(other, None)
    _compile(product, PassPipeline([Spy()]).inductor_options())
    assert _compile(other, None) == (1, 0, 0)


def test_a_setting_of_the_user_that_equals_the_default_misses(inductor: Any) -> None:
    """It keeps the pass from changing the key, so the code differs although no value does."""
    options = PassPipeline([Spy()]).inductor_options()
    _compile(product, options)
    assert _compile(product, {**options, "triton.max_tiles": None}) == (0, 1, 1)


SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
from test_scope import PassPipeline, Spy, _compile, product
print(json.dumps([_compile(product, PassPipeline([Spy()]).inductor_options(), training=True) for _ in range(2)]))
"""


def test_a_warm_cache_hits_in_the_same_and_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = SCRIPT.format(tests=str(Path(__file__).parent))

    def run() -> Any:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    assert run() == [[0, 1, 2], [1, 0, 0]]
    assert run() == [[1, 0, 0], [1, 0, 0]]


@dataclass(frozen=True)
class Asked(MagiInductorPass):
    inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles", "triton.prefer_nd_tiling")

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        return Reason(True, "user keys: " + ", ".join(sorted(context.user_keys)))

    def __call__(self, graph: Graph) -> None:
        config.triton.max_tiles = 3
        config.triton.prefer_nd_tiling = True
        assert (config.triton.max_tiles, config.triton.prefer_nd_tiling) == (3, True)


# It sees the configuration that code generation will see.
LATER = adapt(lambda graph: seen.append((config.triton.max_tiles, config.triton.prefer_nd_tiling)))
PIPELINE = PassPipeline([Asked(), LATER])
OURS = PIPELINE.inductor_options()
MERGED: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "nothing set": (OURS, {}, 3),
    **{f"after, {n}": ({**OURS, "triton.max_tiles": n}, {}, n) for n in (None, 2)},
    **{f"before, {n}": ({"triton.max_tiles": n, **OURS}, {}, n) for n in (None, 2)},
    **{f"base, {n}": (PIPELINE.inductor_options({"triton.max_tiles": n}), {}, n) for n in (None, 2)},
    "a dash": (PIPELINE.inductor_options({"triton.max-tiles": 2}), {}, 2),
    "globally": (OURS, {"triton.max_tiles": 2}, 2),
}


@pytest.mark.parametrize("how", MERGED)
def test_a_setting_of_the_user_wins(inductor: Any, how: str) -> None:
    options, globally, tiles = MERGED[how]
    with inductor.patch(globally), collect_records() as records:
        train(torch.compile(product, options=options))
    assert seen == [(tiles, True)] * 2
    changes = {"triton.prefer_nd_tiling": (False, True)}
    decided = how == "nothing set"
    for record in records[::2]:
        assert record.config_changes == (changes | {"triton.max_tiles": (None, 3)} if decided else changes)
        assert record.reason == "user keys: " + ("" if decided else "triton.max_tiles; your triton.max_tiles stays")


def test_a_backend_that_bound_compile_fx_early_keeps_base_keys(inductor: Any) -> None:
    options = PIPELINE.inductor_options({"triton.max_tiles": None})

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx_bound_early(gm, inputs, config_patches=options)

    torch.compile(product, backend=backend)(torch.ones(4, 4))
    assert seen == [(None, True)]


def test_a_backend_that_took_compile_fx_early_is_told(inductor: Any) -> None:
    earlier = getattr(compile_fx_bound_early, "_magi_passes_original", compile_fx_bound_early)

    def backend(gm: Any, example_inputs: Any) -> Any:
        with PassPipeline([Spy()]).scope():
            return earlier(gm, example_inputs)

    with pytest.warns(UserWarning, match="imported by name before the first pass was made"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))


def test_a_pass_that_compiles_in_a_scope_is_told_nothing(
    inductor: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def backend(gm: Any, example_inputs: Any) -> Any:
        with PassPipeline([ConvChooser(tune=True, cache_dir=str(tmp_path))]).scope():
            return torch._inductor.compile_fx.compile_fx(gm, example_inputs)

    x = torch.ones(1, 2, 6, 4)
    torch.compile(torch.nn.Conv2d(2, 3, 3), backend=backend)(x)
    assert list(tmp_path.iterdir())
    assert not [warning for warning in recwarn if "imported by name" in str(warning.message)]


def test_a_compile_fx_that_another_library_put_in_its_place_is_wrapped_too(
    inductor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = torch._inductor.compile_fx
    for name in ("compile_fx", "_compile_fx_inner"):
        replaced = getattr(module, name)
        own = inspect.unwrap(replaced)
        monkeypatch.setattr(module, name, lambda *args, own=own, **kwargs: own(*args, **kwargs))
    options = PIPELINE.inductor_options()
    torch.compile(product, options=options)(torch.ones(4, 4))
    assert seen


@dataclass(frozen=True)
class Products(MagiInductorPass):
    """Takes products out of a graph with more than one; declares no keys."""

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        count = len(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
        return Reason(count > 1, f"{count} products")

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


ROUTES: dict[str, Callable[[MagiInductorPass], Any]] = {
    "loop": Manager,
    "pipeline in a loop": lambda one: Manager(PassPipeline([one]).as_pass()),
    "function": lambda one: lambda graph: [one(graph)],  # a plain function
    "itself": lambda one: one,
    "pipeline itself": lambda one: PassPipeline([one]).as_pass(),
    "hook itself": lambda one: PassPipeline([one]).inductor_options()[HOOK],
    "manager in a manager": lambda one: Manager(Manager(), Manager(one)),
}
if RELEASE >= (2, 13):
    ROUTES["in a list"] = lambda one: [Manager(), one]
SOME = ("loop", "pipeline in a loop", "itself", "hook itself")


@pytest.mark.parametrize(
    ("route", "installed"), [*((route, "in the options") for route in ROUTES), *((route, "globally") for route in SOME)]
)
def test_a_change_ends_with_the_graph(inductor: Any, route: str, installed: str) -> None:
    hook = {HOOK: ROUTES[route](Spy(kinds=("forward",)))}
    with inductor.patch(hook if installed == "globally" else {}):
        globally = _torch_compat.config.read_overrides()
        compiled: Any = torch.compile(product, options=None if installed == "globally" else hook)
        out = compiled(torch.ones(4, 4, requires_grad=True))
        assert changes_since(globally) == {}
        torch.autograd.backward(out.sum())
        assert changes_since(globally) == {}
    assert seen == [("forward", True, None), ("backward", True, None)]


@pytest.mark.parametrize("route", SOME)
def test_a_change_holds_during_code_generation(inductor: Any, route: str) -> None:
    def code_of(fn: Any, options: dict[str, Any] | None = None) -> str:
        torch._dynamo.reset()
        text = "".join(run_and_get_code(torch.compile(fn, options=options), torch.ones(4, 4))[1])
        return text.partition("def call(")[2]

    assert "assert_size_stride(" in code_of(other)
    assert "assert_size_stride(" not in code_of(product, {HOOK: ROUTES[route](Spy())})
    with fresh_cache():
        assert "assert_size_stride(" in code_of(other)


@pytest.mark.parametrize("route", ROUTES)
def test_the_gate_is_called_and_there_is_a_record(inductor: Any, route: str) -> None:
    options = {HOOK: ROUTES[route](Products())}
    x = torch.ones(3, 3)
    with collect_records() as records, torch.no_grad():
        for model, expected in ((product, x @ x), (other, x)):
            torch._dynamo.reset()
            assert torch.equal(torch.compile(model, options=options)(x), expected)
    asked = [(record.pass_name, record.ran, record.reason) for record in records]
    assert asked == [("Products", False, "1 products"), ("Products", True, "2 products")]
    assert all(record.graph.endswith("_inference") for record in records)
    assert {record.hook for record in records} == {HOOK if "itself" in route or route == "in a list" else ""}


@pytest.mark.parametrize("route", SOME)
def test_a_warm_cache_hits_and_an_edited_pass_misses(inductor: Any, route: str) -> None:
    hits = []
    for kinds in (("inference",), ("inference",), ("forward",), ("inference",)):
        counters.clear()
        infer(product, {HOOK: ROUTES[route](Spy(kinds=kinds))})
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0, 1]
    assert len(seen) == 2


@pytest.mark.parametrize("route", ["loop", "hook itself"])
def test_a_pass_that_the_environment_disables_is_not_served_from_the_cache(
    inductor: Any, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    for disabled in ("", "Spy", "all"):
        monkeypatch.setenv("MAGI_PASSES_DISABLE", disabled)
        with collect_records() as records:
            infer(product, {HOOK: ROUTES[route](Spy())})
        assert [record.ran for record in records] == [not disabled]


@pytest.mark.parametrize("route", SOME)
def test_a_value_that_the_user_chose_stays(inductor: Any, route: str) -> None:
    after: list[Any] = []
    last = Foreign(act=lambda: after.append((config.size_asserts, config.triton.max_tiles)))
    options: dict[str, Any] = {HOOK: Manager(ROUTES[route](Spy()), last), "triton.max_tiles": 2}
    infer(product, options)
    assert after == [(False, 2)]


def test_what_the_manager_itself_sets_is_left_to_it(inductor: Any) -> None:
    """Some never put back what they set; that is theirs to mend, and their users rely on it."""
    before = _torch_compat.config.read_overrides()
    manager = Manager(Spy(), Foreign(act=lambda: setattr(config, "epilogue_fusion", False)))
    infer(product, {HOOK: manager})
    assert changes_since(before) == {"epilogue_fusion": (True, False)}
    _torch_compat.config.restore_overrides(before)


@pytest.mark.parametrize(
    "call",
    [
        Spy(),
        Manager(Spy()),
        PassPipeline([Spy()]).as_pass(),
        PassPipeline([Products(), Spy()]).inductor_options()[HOOK],
    ],
    ids=["pass", "manager", "as_pass", "hook"],
)
def test_without_a_compilation_a_change_is_an_error_that_teaches(inductor: Any, call: Any) -> None:
    graph = make_fx(lambda x: x @ x)(torch.ones(3, 3)).graph
    sentence = (
        r"^Spy may change Inductor's configuration \(size_asserts, triton.max_tiles\), and was called where nothing "
        r"would put it back: .*PassPipeline\(\[Spy\(\.\.\.\)\]\)\.inductor_options\(\).*\.scope\(\):`\.$"
    )
    with pytest.raises(UnscopedConfigError, match=sentence):
        call(graph)
    assert seen == []


@pytest.mark.parametrize("hook", ["pre_grad_custom_pass", "joint_custom_post_pass"])
def test_a_hook_before_the_compilation_of_the_graph_is_too_early(inductor: Any, hook: str) -> None:
    with pytest.raises(Exception, match="Spy may change Inductor's configuration"):
        infer(product, {hook: Manager(Spy())})


def test_without_a_compilation_a_rewrite_calls_its_gate() -> None:
    for count, model in ((1, product), (2, other)):
        graph = make_fx(model)(torch.ones(3, 3)).graph
        with collect_records() as records:
            Products()(graph)
        assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == count % 2
        assert [(record.ran, record.hook) for record in records] == [(count == 2, "")]


@pytest.mark.parametrize(
    ("graph", "advice"),
    [(torch.fx.symbolic_trace(lambda x: x), "Pass its .graph"), (None, "Pass the graph of a Graph")],
)
def test_what_is_not_a_graph(graph: Any, advice: str) -> None:
    with pytest.raises(PassArgumentTypeError, match=f"^Products takes a torch.fx.Graph, not .*{advice}"):
        Products()(graph)


def test_a_pipeline_as_one_pass_runs_its_passes_in_the_order_of_the_hooks(inductor: Any) -> None:
    both = PassPipeline([Spy(), at("post_grad_custom_pre_pass")]).as_pass()
    infer(product, {HOOK: Manager(both)})
    assert seen == ["post_grad_custom_pre_pass", ("inference", True, None)]


def test_passes_for_different_places_are_not_one_pass() -> None:
    with pytest.raises(PassArgumentError, match="Spy is run at joint_custom_pre_pass, and its hook is post_grad"):
        PassPipeline([Spy(), at("joint_custom_pre_pass")]).as_pass()


def _graph_module() -> torch.fx.GraphModule:
    return make_fx(lambda x: (x @ x,))(torch.ones(3, 3))


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch._inductor.compile(_graph_module(), [torch.ones(3, 3)])(torch.ones(3, 3)),
        lambda: torch.compile(product)(torch.ones(3, 3)),
        lambda: torch.compile(product, options={HOOK: Manager()})(torch.ones(3, 3)),
        lambda: Spy()(_graph_module().graph),
    ],
    ids=["compile", "torch.compile", "with another hook", "called"],
)
def test_a_scope_runs_the_pipeline_and_puts_everything_back(inductor: Any, run: Any) -> None:
    with torch.no_grad(), collect_records() as records, PassPipeline([Spy()]).scope():
        run()
    assert [record.pass_name for record in records] == ["Spy"]
    assert len(seen) == 1


def test_a_scope_ends_when_its_block_raises(inductor: Any) -> None:
    graph = make_fx(lambda x: x @ x)(torch.ones(3, 3)).graph
    scope = PassPipeline([Products()]).scope()
    with pytest.raises(KeyError), scope:
        _call_and_raise(Spy(kinds=("",)), graph)
    with pytest.raises(UnscopedConfigError):
        Spy()(graph)


def _call_and_raise(one: MagiInductorPass, graph: Graph) -> None:
    one(graph)
    assert config.triton.max_tiles == 3
    raise KeyError


def test_a_scope_keeps_hooks_that_are_installed_and_reaches_later_backward_graphs(inductor: Any) -> None:
    first = PassPipeline([Spy(kinds=("backward",))])
    with inductor.patch({HOOK: Foreign()}), first.scope():
        out: Any = torch.compile(product)(torch.ones(4, 4, requires_grad=True))
    forward, backward = (("forward", True, None), ("backward", True, None))
    assert seen == ["theirs", forward]
    with collect_records() as records:
        torch.autograd.backward(out.sum())
    assert seen == ["theirs", forward, "theirs", backward]
    assert records == []  # they belong to the call that compiled the forward graph


def test_scopes_nest(inductor: Any) -> None:
    with PassPipeline([Spy(kinds=("inference",))]).scope():
        with PassPipeline([Products()]).scope(), collect_records() as records:
            infer()
        with collect_records() as outer:
            infer(other)
    assert [record.pass_name for record in records] == ["Spy", "Products"]
    assert [record.pass_name for record in outer] == ["Spy"]
