# SPDX-License-Identifier: Apache-2.0
"""A pipeline together with other hooks, in every place that runs Inductor, also through names bound before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import MagiInductorPass, PassPipeline, Reason, _torch_compat, collect_records, pass_records
from magi_passes.errors import PassesWouldBeDroppedError
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass


if TYPE_CHECKING:
    from pathlib import Path

    from magi_passes import PassContext
    from torch.fx import Graph


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def _train(compiled: Any, size: int = 4) -> None:
    torch.autograd.backward(compiled(torch.ones(size, size, requires_grad=True)).sum())


ran: list[str] = []


@pytest.fixture(autouse=True)
def _fresh_list() -> None:
    ran.clear()


@dataclass(frozen=True)
class Named(MagiInductorPass):
    inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)
    name: str = "ours"
    tiles: int = 2

    def __call__(self, graph: Graph) -> None:
        ran.append(f"{self.name} saw {config.triton.max_tiles}")
        config.triton.max_tiles = self.tiles


class Foreign(CustomGraphPass):
    """Another library's pass, with a pass manager's usual uuid."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, graph: Graph) -> None:
        ran.append(self.name)

    def uuid(self) -> str:
        return self.name


@dataclass(frozen=True)
class Never(MagiInductorPass):
    def is_applicable(self, graph: Graph, context: PassContext) -> bool:
        return False

    def __call__(self, graph: Graph) -> None:
        raise AssertionError


HOOK = "post_grad_custom_post_pass"


@pytest.mark.parametrize("installed", [Foreign("theirs"), [Foreign("theirs")], (Foreign("theirs"),)])
def test_hooks_in_the_base_options_run_first(inductor: Any, installed: Any) -> None:
    options = PassPipeline([Named()]).inductor_options({HOOK: installed})
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(product, options=options)(torch.ones(4, 4))
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
    assert ran == ["theirs", "ours saw None"]


def test_hooks_installed_globally_after_construction_run_too(inductor: Any) -> None:
    options = PassPipeline([Named()]).inductor_options()
    with inductor.patch({HOOK: Foreign("theirs")}):
        _train(torch.compile(product, options=options))
    assert ran == ["theirs", "ours saw None"] * 2


@pytest.mark.skipif(
    _torch_compat.config.release(torch.__version__) < (2, 13), reason="a hook holds one pass before 2.13"
)
def test_a_pipeline_inside_a_users_own_list(inductor: Any) -> None:
    mine = PassPipeline([Named()]).inductor_options()[HOOK]
    options: dict[str, Any] = {HOOK: [Foreign("before"), mine, Foreign("after")]}
    torch.compile(product, options=options)(torch.ones(4, 4))
    assert ran == ["before", "ours saw None", "after"]
    assert inductor.triton.max_tiles is None


def test_a_pipeline_installed_globally(inductor: Any) -> None:
    options = PassPipeline([Named()]).inductor_options()
    with inductor.patch(options), collect_records() as records:
        torch.compile(product)(torch.ones(4, 4))
        torch._dynamo.reset()
        torch.compile(lambda x: x @ x @ x, options=options)(torch.ones(4, 4))
        assert inductor.triton.max_tiles is None
    assert ran == ["ours saw None", "ours saw None"]
    assert [record.ran for record in records] == [True, True]


def test_two_pipelines_run_one_after_the_other_and_the_last_one_wins(inductor: Any) -> None:
    first = PassPipeline([Named("first", 2)]).inductor_options()
    both = PassPipeline([Named("second", 3)]).inductor_options(first)
    with collect_records() as records:
        torch.compile(product, options=both)(torch.ones(4, 4))
    assert ran == ["first saw None", "second saw 2"]
    assert [record.config_changes["triton.max_tiles"] for record in records] == [(None, 2), (2, 3)]


def test_the_graph_is_observed_around_each_pass_that_runs(inductor: Any) -> None:
    seen: list[tuple[str, int]] = []

    def observe(name: str, graph: Any) -> None:
        seen.append((name, len(graph.nodes)))

    with collect_records(observe), collect_records() as records:
        options = PassPipeline([Named(), Never()]).inductor_options({HOOK: [Foreign("before")]})
        torch.compile(product, options=options)(torch.ones(4, 4))
    nodes = seen[0][1]
    assert seen == [("", nodes), ("Foreign", nodes), ("", nodes), ("Named", nodes)]
    assert [record.pass_name for record in records] == ["Named", "Never"]


def test_two_libraries_compile_side_by_side(inductor: Any) -> None:
    for name, tiles in (("first", 2), ("second", 3), ("first", 2)):
        options = PassPipeline([Named(name, tiles)]).inductor_options()
        torch._dynamo.reset()
        _train(torch.compile(product, options=options))
    # The third one finds what the first one left in the cache.
    assert ran == ["first saw None"] * 2 + ["second saw None"] * 2


def test_a_foreign_pass_without_uuid_turns_the_cache_off_as_it_does_without_us(inductor: Any) -> None:
    options = PassPipeline([Named()]).inductor_options({HOOK: lambda graph: ran.append("plain")})
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(product, options=options)(torch.ones(4, 4))
    assert ran == ["plain", "ours saw None"] * 2


def test_an_inference_aware_pass_hears_of_inference(inductor: Any) -> None:
    custom_graph_pass = pytest.importorskip("torch._inductor.custom_graph_pass")
    if not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"):
        pytest.skip("since torch 2.12")

    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):  # type: ignore[misc, name-defined]
        def __call__(self, graph: Graph, is_inference: bool) -> None:
            ran.append(f"inference {is_inference}")

        def uuid(self) -> str:
            return "aware"

    options = PassPipeline([Named()]).inductor_options({HOOK: Aware()})
    torch.compile(product, options=options)(torch.ones(4, 4))
    torch.compile(product, options=options)(torch.ones(4, 4, requires_grad=True))
    assert [line for line in ran if "inference" in line] == ["inference True", "inference False"]


def test_a_backend_with_a_pipeline_of_its_own(inductor: Any) -> None:
    """It adds its passes, and hands on what the user of the backend asked for."""
    from torch._inductor.compile_fx import compile_fx

    def backend(gm: torch.fx.GraphModule, inputs: list[Any], *, options: dict[str, Any] | None = None) -> Any:
        patches = PassPipeline([Named("backend", 3)]).inductor_options(options)
        return compile_fx(gm, inputs, config_patches=patches)

    users = PassPipeline([Named("user", 2)]).inductor_options()
    out = torch.compile(product, backend=backend, options=users)(torch.ones(4, 4, requires_grad=True))
    torch.autograd.backward(out.sum())
    assert ran == ["user saw None", "backend saw 2"] * 2
    assert inductor.triton.max_tiles is None


def test_standalone_compile(inductor: Any) -> None:
    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        options = {"config_patches": PassPipeline([Named()]).inductor_options()}
        return torch._inductor.standalone_compile(gm, inputs, options=options)

    torch.compile(product, backend=backend)(torch.ones(4, 4))
    assert ran == ["ours saw None"]
    assert inductor.triton.max_tiles is None


def test_all_hooks(inductor: Any) -> None:
    order: list[str] = []

    def at(name: str) -> MagiInductorPass:
        @dataclass(frozen=True)
        class Here(MagiInductorPass):
            hook = name

            def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
                return Reason(True, f"{context.hook} {context.graph}")

            def __call__(self, graph: Graph) -> None:
                pass

        return Here()

    hooks = list(_torch_compat.config.HOOKS)
    with collect_records() as records:
        torch.compile(product, options=PassPipeline([at(h) for h in hooks]).inductor_options())(torch.ones(4, 4))
    order += [record.hook for record in records]
    assert order == hooks


def test_a_subgraph_does_not_decide_the_configuration(inductor: Any) -> None:
    def branches(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, (x,))

    with collect_records() as records:
        torch.compile(branches, options=PassPipeline([Named()]).inductor_options())(torch.ones(4, 4))
    assert [record.ran for record in records] == [False, False, True]
    assert "subgraph" in records[0].reason


@pytest.mark.parametrize("mode", ["SUBPROCESS", "SERIALIZE"])
def test_compiling_where_passes_would_be_lost_is_refused(inductor: Any, monkeypatch: Any, mode: str) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "fx_compile_mode", compile_fx.FxCompileMode[mode])
    compiled = torch.compile(product, options=PassPipeline([Named()]).inductor_options())
    with pytest.raises(Exception, match=f"FX_COMPILE_MODE={mode}.*would silently not run") as caught:
        compiled(torch.ones(4, 4))
    assert isinstance(caught.value.__cause__ or caught.value, PassesWouldBeDroppedError) or "Dropped" in str(caught)
    assert ran == []


@pytest.mark.skipif(
    _torch_compat.config.release(torch.__version__) < (2, 12),
    reason="torch.compile itself fails in threads: a RuntimeError about metrics on torch 2.10, a crash on 2.11",
)
@pytest.mark.parametrize("version", [torch.__version__, "2.11.0"], ids=["context-local", "global"])
def test_eight_threads_compile_at_once(inductor: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Under an old torch's rules too, where a lock keeps one compilation's configuration from the others."""
    monkeypatch.setattr(_torch_compat.config, "torch_version", lambda: version)
    errors: list[BaseException] = []
    leaks: list[Any] = []

    def work(index: int) -> None:
        try:
            size = index + 2
            options = PassPipeline([Named(f"thread {index}", 2 + index % 2)]).inductor_options()
            # "Somebody traces" is one flag for all threads, and torch refuses a call that meets it (eval_frame.py).
            with torch._dynamo.config.patch(force_compile_during_fx_trace=True):
                _train(torch.compile(product, options=options, dynamic=False), size)
            leaks.append(config.triton.max_tiles)
        except Exception as error:  # noqa: BLE001 (shown by the assertion below, in the main thread)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert leaks == [None] * 8
    assert sorted(ran) == sorted(f"thread {index} saw None" for index in range(8) for _ in range(2))


def test_records_are_kept_and_logged(inductor: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "magi_passes")
    count = len(pass_records())
    with collect_records() as outer:
        with collect_records() as inner:
            torch.compile(product, options=PassPipeline([Named()]).inductor_options())(torch.ones(4, 4))
        torch._dynamo.reset()
        torch.compile(product, options=PassPipeline([Named()]).inductor_options())(torch.ones(4, 4))
    assert len(inner) == 1
    assert [(record.ran, record.reason) for record in outer] == [
        (True, "applicable"),
        (False, "not asked: a cache had the compiled graph"),
    ]
    assert pass_records()[count:] == outer
    assert outer[0].graph.endswith("_inference")
    assert outer[0].compile_id == "0/0"
    assert outer[0].seconds > 0
    assert [r.message for r in caplog.records if r.name == "magi_passes"] == [str(record) for record in outer]


def test_the_record_of_a_backward_graph_compiled_later_reaches_the_collector(inductor: Any) -> None:
    with collect_records() as records:
        out = torch.compile(product, options=PassPipeline([Named()]).inductor_options())(
            torch.ones(4, 4, requires_grad=True)
        )
    torch.autograd.backward(out.sum())
    assert [record.graph.partition("_")[2] for record in records] == ["forward", "backward"]


def test_the_structured_trace_has_an_artifact(inductor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts: list[tuple[str, str]] = []
    monkeypatch.setattr(
        _torch_compat.compiling, "trace_artifact", lambda name, payload: artifacts.append((name, payload()))
    )
    torch.compile(product, options=PassPipeline([Named()]).inductor_options())(torch.ones(4, 4))
    ((name, text),) = artifacts
    assert name == "magi_passes"
    assert '"triton.max_tiles": [\n    "None",\n    "2"\n   ]' in text


def test_the_wrappers_are_installed_once_and_do_nothing_without_a_pipeline(
    inductor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import compile_fx

    PassPipeline([]).inductor_options()
    once = compile_fx.compile_fx, compile_fx._compile_fx_inner
    PassPipeline([Named()]).inductor_options()
    assert (compile_fx.compile_fx, compile_fx._compile_fx_inner) == once
    monkeypatch.setattr(_torch_compat.config, "read_overrides", lambda: pytest.fail("no pipeline, nothing to save"))
    torch.compile(product)(torch.ones(4, 4))


PROGRAM = """
import functools
import json
import sys

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

partial = functools.partial(compile_fx)

from magi_passes import MagiInductorPass, PassPipeline, collect_records
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles(MagiInductorPass):
    inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)

    def __call__(self, graph):
        config.triton.max_tiles = 3


options = PassPipeline([Tiles()]).inductor_options()


def inner(gm, inputs, **kwargs):
    return compile_fx_inner(gm, inputs, **kwargs)


ROUTES = {
    "torch.compile": lambda gm, inputs: torch._inductor.compile_fx.compile_fx(gm, inputs, config_patches=options),
    "compile_fx": lambda gm, inputs: compile_fx(gm, inputs, config_patches=options),
    "partial": lambda gm, inputs: partial(gm, inputs, config_patches=options),
    "positional": lambda gm, inputs: compile_fx(gm, inputs, inner, options),
    "inner_compile": lambda gm, inputs: compile_fx(gm, inputs, inner_compile=inner, config_patches=options),
    "torch._inductor.compile": lambda gm, inputs: torch._inductor.compile(gm, inputs, options=options),
    "patched": lambda gm, inputs: config.patch(options)(compile_fx)(gm, inputs),
}
route, training = sys.argv[1:]
for _ in range(2):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x @ x, backend=ROUTES[route])
    with collect_records() as records:
        out = compiled(torch.ones(4, 4, requires_grad=training == "training"))
    if training == "training":
        torch.autograd.backward(out.sum())
    print(json.dumps([[record.graph.split("_")[-1], record.ran, record.reason] for record in records]))
    assert config.triton.max_tiles is None
"""
FROM_CACHE = "not asked: a cache had the compiled graph"


@pytest.mark.parametrize(
    ("route", "training"),
    [
        ("torch.compile", "inference"),
        ("compile_fx", "inference"),
        ("compile_fx", "training"),
        ("positional", "training"),
        *(
            pytest.param(route, training, marks=pytest.mark.slow)
            for route in ("partial", "inner_compile", "torch._inductor.compile")
            for training in ("inference", "training")
        ),
    ],
)
def test_a_cold_compilation_is_recorded_as_such_and_a_warm_one_too(tmp_path: Path, route: str, training: str) -> None:
    cold, warm = _records(tmp_path, route, training)
    kinds = ["forward", "backward"] if training == "training" else ["inference"]
    assert cold == [[kind, True, "applicable"] for kind in kinds]
    assert [record[1:] for record in warm] == [[False, FROM_CACHE]]


@pytest.mark.slow
def test_a_call_that_nobody_sees_leaves_no_false_record(tmp_path: Path) -> None:
    """Neither the options nor the name that is called lead through what wraps `compile_fx`."""
    assert _records(tmp_path, "patched", "inference") == [[["inference", True, "applicable"]], []]


def _records(cache_dir: Path, route: str, training: str) -> list[list[list[object]]]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache_dir)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, route, training],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
