# SPDX-License-Identifier: Apache-2.0
"""A pipeline together with other hooks, in every place that runs Inductor, also through names bound before.

And a function, or an object with nothing but `__call__`, that is a pass: its cache key is made of what decides.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch._inductor.compile_fx as module
from made_passes import HOOK, RELEASE, Foreign, Spy, at, infer, other, product, seen, train
from magi_passes import (
    MagiInductorPass,
    NDTilingWorkaroundPass,
    PassContext,
    PassPipeline,
    Reason,
    _torch_compat,
    adapt,
    collect_records,
    pass_records,
)
from magi_passes.errors import (
    PassArgumentError,
    PassArgumentTypeError,
    PassDefinitionError,
    PassesWouldBeDroppedError,
    PassIdentityError,
    UnknownConfigKeyError,
)
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph


OURS, FORWARD, BACKWARD = ((kind, True, None) for kind in ("inference", "forward", "backward"))
OPTIONS = PassPipeline([Spy()]).inductor_options()


@pytest.mark.parametrize("installed", [Foreign(), [Foreign()], (Foreign(),)])
def test_hooks_in_the_base_options_run_first(inductor: Any, installed: Any) -> None:
    options = PassPipeline([Spy()]).inductor_options({HOOK: installed})
    for hits in (0, 1):
        counters.clear()
        infer(product, options)
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
    assert seen == ["theirs", OURS]


def test_hooks_installed_globally_after_construction_run_too(inductor: Any) -> None:
    with inductor.patch({HOOK: Foreign()}):
        train(torch.compile(product, options=OPTIONS))
    assert seen == ["theirs", FORWARD, "theirs", BACKWARD]


@pytest.mark.parametrize("given", [Spy(), PassPipeline([Spy()]).as_pass(), OPTIONS[HOOK]])
@pytest.mark.parametrize("name", ["pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass"])
def test_a_pass_at_a_hook_with_graphs_of_another_form_is_an_error(inductor: Any, name: str, given: Any) -> None:
    sentence = (
        rf"Spy is run at {name}, and its hook is {HOOK}, where .* set hook = '{name}' in its class. \(made_passes\)"
    )
    with pytest.raises(BackendCompilerFailed, match=sentence) as caught:
        infer(product, {name: given})
    assert isinstance(caught.value.inner_exception, PassArgumentError)
    with inductor.patch({name: given}), pytest.raises(BackendCompilerFailed, match=sentence):
        infer()
    assert seen == []


def test_the_two_hooks_after_gradients_have_graphs_of_one_form(inductor: Any) -> None:
    infer(product, {"post_grad_custom_pre_pass": Spy()})
    assert seen == [OURS]


@pytest.mark.skipif(RELEASE < (2, 13), reason="a hook holds one pass before 2.13")
def test_a_pipeline_inside_a_users_own_list(inductor: Any) -> None:
    options: dict[str, Any] = {HOOK: [Foreign("before"), OPTIONS[HOOK], Foreign("after")]}
    infer(product, options)
    assert seen == ["before", OURS, "after"]


def test_a_pipeline_installed_globally(inductor: Any) -> None:
    with inductor.patch(OPTIONS), collect_records() as records:
        infer()
        infer(other, OPTIONS)
        assert inductor.triton.max_tiles is None
    assert seen == [OURS, OURS]
    assert [record.ran for record in records] == [True, True]


def test_two_pipelines_run_one_after_the_other_and_the_last_one_wins(inductor: Any) -> None:
    both = PassPipeline([Spy()]).inductor_options(PassPipeline([Spy(tiles=2)]).inductor_options())
    with collect_records() as records:
        infer(product, both)
    assert seen == [OURS, ("inference", False, 2)]
    assert [record.config_changes["triton.max_tiles"] for record in records] == [(None, 2), (2, 3)]


def test_the_graph_is_observed_around_each_pass_that_runs(inductor: Any) -> None:
    observed: list[tuple[str, int]] = []
    with collect_records(lambda name, graph: observed.append((name, len(graph.nodes)))), collect_records() as records:
        options = PassPipeline([Spy(), Spy(kinds=())]).inductor_options({HOOK: [Foreign()]})
        infer(product, options)
    nodes = observed[0][1]
    assert observed == [("", nodes), ("Foreign", nodes), ("", nodes), ("Spy", nodes)]
    assert [record.ran for record in records] == [True, False]


def test_a_foreign_pass_without_uuid_turns_the_cache_off_as_it_does_without_us(inductor: Any) -> None:
    options = PassPipeline([Spy()]).inductor_options({HOOK: lambda graph: seen.append("plain")})
    for _ in range(2):
        infer(product, options)
    assert seen == ["plain", OURS] * 2


@pytest.mark.skipif(RELEASE < (2, 12), reason="since torch 2.12")
def test_an_inference_aware_pass_hears_of_inference(inductor: Any) -> None:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass

    class Aware(CustomInferenceAwareGraphPass):
        def __call__(self, graph: Graph, is_inference: bool) -> None:  # type: ignore[override]
            seen.append(is_inference)

        def uuid(self) -> str:
            return "aware"

    options = PassPipeline([Spy()]).inductor_options({HOOK: Aware()})
    infer(product, options)
    torch.compile(product, options=options)(torch.ones(4, 4, requires_grad=True))
    assert seen == [True, OURS, False, FORWARD]


def test_standalone_compile(inductor: Any) -> None:
    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return torch._inductor.standalone_compile(gm, inputs, options={"config_patches": OPTIONS})

    torch.compile(product, backend=backend)(torch.ones(4, 4))
    assert seen == [OURS]
    assert inductor.triton.max_tiles is None


def test_all_hooks(inductor: Any) -> None:
    hooks = list(_torch_compat.config.HOOKS)
    with collect_records() as records:
        infer(product, PassPipeline(map(at, hooks)).inductor_options())
    assert seen == [record.hook for record in records] == hooks


def test_a_subgraph_does_not_decide_the_configuration(inductor: Any) -> None:
    def branches(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, (x,))

    with collect_records() as records:
        infer(branches, OPTIONS)
    assert [record.ran for record in records] == [False, False, True]
    assert "subgraph" in records[0].reason


@pytest.mark.parametrize("mode", ["SUBPROCESS", "SERIALIZE"])
def test_compiling_where_passes_would_be_lost_is_refused(inductor: Any, monkeypatch: Any, mode: str) -> None:
    monkeypatch.setattr(module, "fx_compile_mode", module.FxCompileMode[mode])
    compiled = torch.compile(product, options=OPTIONS)
    with pytest.raises(Exception, match=f"FX_COMPILE_MODE={mode}.*would silently not run") as caught:
        compiled(torch.ones(4, 4))
    assert isinstance(caught.value.__cause__ or caught.value, PassesWouldBeDroppedError) or "Dropped" in str(caught)
    assert seen == []


@pytest.mark.skipif(
    RELEASE < (2, 12),
    reason="torch.compile itself fails in threads: a RuntimeError about metrics on torch 2.10, a crash on 2.11",
)
@pytest.mark.parametrize("version", [torch.__version__, "2.11.0"], ids=["context-local", "global"])
def test_eight_threads_compile_at_once(inductor: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Under an old torch's rules too, where a lock keeps one compilation's configuration from the others."""
    monkeypatch.setattr(_torch_compat.config, "torch_version", lambda: version)

    def work(index: int) -> object:
        options = PassPipeline([Spy(tiles=2 + index % 2)]).inductor_options()
        # "Somebody traces" is one flag for all threads, and torch refuses a call that meets it (eval_frame.py).
        with torch._dynamo.config.patch(force_compile_during_fx_trace=True):
            train(torch.compile(product, options=options, dynamic=False), size=index + 2)
        return config.triton.max_tiles

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [None] * 8
    assert sorted(seen) == [BACKWARD] * 8 + [FORWARD] * 8


def test_records_are_kept_and_logged(inductor: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "magi_passes")
    count = len(pass_records())
    with collect_records() as outer:
        with collect_records() as inner:
            infer(product, OPTIONS)
        infer(product, OPTIONS)
    assert len(inner) == 1
    assert [(record.ran, record.reason) for record in outer] == [
        (True, "by kind"),
        (False, "not asked: a cache had the compiled graph"),
    ]
    assert pass_records()[count:] == outer
    assert outer[0].graph.endswith("_inference")
    assert outer[0].compile_id == "0/0"
    assert outer[0].seconds > 0
    assert [r.message for r in caplog.records if r.name == "magi_passes"] == [str(record) for record in outer]


def test_the_structured_trace_has_an_artifact(inductor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts: list[tuple[str, str]] = []
    monkeypatch.setattr(
        _torch_compat.compiling, "trace_artifact", lambda name, payload: artifacts.append((name, payload()))
    )
    infer(product, OPTIONS)
    ((name, text),) = artifacts
    assert name == "magi_passes"
    assert '"triton.max_tiles": [\n    "None",\n    "3"\n   ]' in text


def test_the_wrappers_are_installed_once_and_do_nothing_without_a_pipeline(
    inductor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    PassPipeline([]).inductor_options()
    once = module.compile_fx, module._compile_fx_inner
    PassPipeline([Spy()]).inductor_options()
    assert (module.compile_fx, module._compile_fx_inner) == once
    monkeypatch.setattr(_torch_compat.config, "read_overrides", lambda: pytest.fail("no pipeline, nothing to save"))
    infer()


def _inner(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
    return compile_fx_inner(gm, inputs, **kwargs)


EARLY = inspect.unwrap(compile_fx)  # as who imported it before the first pass was made has it
ROUTES: dict[str, Callable[[Any, Any], Any]] = {
    "compile_fx": lambda gm, inputs: module.compile_fx(gm, inputs, config_patches=OPTIONS),
    "bound early": lambda gm, inputs: EARLY(gm, inputs, config_patches=OPTIONS),
    "positional": lambda gm, inputs: EARLY(gm, inputs, _inner, OPTIONS),
    "inner_compile": lambda gm, inputs: EARLY(gm, inputs, inner_compile=_inner, config_patches=OPTIONS),
    "torch._inductor.compile": lambda gm, inputs: torch._inductor.compile(gm, inputs, options=OPTIONS),
}


def _records(backend: Callable[[Any, Any], Any], training: bool) -> list[tuple[object, ...]]:
    torch._dynamo.reset()
    with collect_records() as records:
        out: Any = torch.compile(product, backend=backend)(torch.ones(4, 4, requires_grad=training))
    if training:
        torch.autograd.backward(out.sum())
    return [(record.graph.split("_")[-1], record.ran, record.reason) for record in records]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_cold_compilation_is_recorded_as_such_and_a_warm_one_too(
    inductor: Any, route: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["forward", "backward"] if training else ["inference"]
    assert _records(ROUTES[route], training) == [(kind, True, "by kind") for kind in kinds]
    ((_, *warm),) = _records(ROUTES[route], training)
    assert warm == [False, "not asked: a cache had the compiled graph"]
    monkeypatch.setenv("MAGI_PASSES_DISABLE", "all")
    for _ in range(2):  # compiled, and from the cache
        assert {reason for *_, reason in _records(ROUTES[route], training)} == {"switched off by MAGI_PASSES_DISABLE"}


def test_a_call_that_nobody_sees_leaves_no_false_record(inductor: Any) -> None:
    """Neither the options nor the name that is called lead through what wraps `compile_fx`."""
    patched = config.patch(OPTIONS)(EARLY)
    assert _records(patched, training=False) == [("inference", True, "by kind")]
    assert _records(patched, training=False) == []


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
        with collect_records() as records:
            made = torch.compile(lambda x: x.sin(), options=options)(x)
        torch.testing.assert_close(made, x.cos())
        assert [record.ran for record in records] == [True]
    assert torch._inductor.config.triton.max_tiles is None


def test_the_key_is_made_of_the_code_and_of_what_the_object_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(body: Any) -> Any:
        return adapt(body).uuid()

    pairs = [(Cosines(), Cosines(False)), (Keyed("1"), Keyed("2")), (Forced(), Forced(True))]
    partials = functools.partial(to, aten.cos.default), functools.partial(to, aten.tan.default)
    for one, another in (*pairs, partials):
        assert key(one) == key(one)
        assert key(one) != key(another)
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
