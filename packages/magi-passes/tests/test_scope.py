# SPDX-License-Identifier: Apache-2.0
"""A compilation leaves Inductor's configuration and caches as they were, whatever its passes did and the user set."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import (
    MagiInductorPass,
    PassPipeline,
    PassRecord,
    Reason,
    _torch_compat,
    collect_records,
    current_context,
)
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.compile_fx import compile_fx as compile_fx_bound_early


if TYPE_CHECKING:
    from magi_passes import PassContext
    from torch.fx import Graph


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def other(x: torch.Tensor) -> torch.Tensor:
    return x @ x @ x


@dataclass(frozen=True)
class Spy(MagiInductorPass):
    """Writes down what every compilation starts from, then changes it."""

    inductor_config_keys_potentially_mutated_by_this_pass = ("size_asserts", "triton.max_tiles")
    raises: bool = False
    raises_on_backward: bool = False

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        seen.append((context.graph.partition("_")[2], config.size_asserts, config.triton.max_tiles))
        return Reason(True, "always")

    def __call__(self, graph: Graph) -> None:
        config.size_asserts = False
        config.triton.max_tiles = 3
        context = current_context()
        assert context is not None
        if self.raises or (self.raises_on_backward and context.is_backward):
            msg = "the pass failed"
            raise RuntimeError(msg)


seen: list[tuple[str, bool, int | None]] = []


@pytest.fixture(autouse=True)
def _fresh_spy() -> None:
    seen.clear()


def _changes_since(before: Any) -> dict[str, tuple[Any, Any]]:
    return _torch_compat.config.config_changes(before, _torch_compat.config.read_overrides())


@pytest.mark.parametrize("training", [False, True])
def test_no_key_differs_after_a_cold_and_a_warm_compilation(inductor: Any, training: bool) -> None:
    before = _torch_compat.config.read_overrides()
    for temperature in ("cold", "warm"):
        torch._dynamo.reset()
        compiled = torch.compile(product, options=PassPipeline([Spy()]).inductor_options())
        out = compiled(torch.ones(4, 4, requires_grad=training))
        assert _changes_since(before) == {}, temperature
        if training:
            torch.autograd.backward(out.sum())
            assert _changes_since(before) == {}, temperature
    kinds = ["forward", "backward"] if training else ["inference"]
    assert seen == [(kind, True, None) for kind in kinds]


@pytest.mark.parametrize("on_backward_only", [False, True])
def test_no_key_differs_after_a_pass_raised(inductor: Any, on_backward_only: bool) -> None:
    failing = Spy(raises=not on_backward_only, raises_on_backward=on_backward_only)
    compiled = torch.compile(product, options=PassPipeline([failing]).inductor_options())
    before = _torch_compat.config.read_overrides()
    with collect_records() as records, pytest.raises(Exception, match="the pass failed"):
        torch.autograd.backward(compiled(torch.ones(4, 4, requires_grad=True)).sum())
    assert _changes_since(before) == {}
    assert [(record.ran, record.reason) for record in records][-1] == (False, "raised RuntimeError: the pass failed")


def test_what_changes_between_construction_and_compilation_counts(inductor: Any) -> None:
    options = PassPipeline([Spy()]).inductor_options()
    with inductor.patch({"triton.max_tiles": 2}):
        torch.compile(product, options=options)(torch.ones(4, 4))
        assert seen == [("inference", True, 2)]
        assert inductor.triton.max_tiles == 2
    assert inductor.triton.max_tiles is None


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
    before = _torch_compat.config.read_overrides()
    compiled = torch.compile(product, options=PassPipeline([Sneaky(key)]).inductor_options())
    with pytest.raises(Exception, match=f"Sneaky changed Inductor configuration that it does not declare: '{named}"):
        compiled(torch.ones(4, 4))
    assert _changes_since(before) == {}


@dataclass(frozen=True)
class Reader(MagiInductorPass):
    def __call__(self, graph: Graph) -> None:
        for key in _torch_compat.config.config_keys():
            if not key.startswith(("max_autotune_flex", "unsafe_")):
                _torch_compat.config.get_config(key)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reading_every_key_is_not_a_change(inductor: Any) -> None:
    torch.compile(product, options=PassPipeline([Reader()]).inductor_options())(torch.ones(4, 4))


@dataclass(frozen=True)
class Nesting(MagiInductorPass):
    """Compiles another function while its own changes are in place."""

    inductor_config_keys_potentially_mutated_by_this_pass = ("size_asserts",)

    def __call__(self, graph: Graph) -> None:
        config.size_asserts = False
        x = torch.ones(3, 3)
        gm = torch.fx.symbolic_trace(lambda x: (x.mm(x),))
        compiled: Any = compile_fx(gm, [x], config_patches=PassPipeline([Spy()]).inductor_options())
        nested.append(compiled(x)[0])
        assert config.size_asserts is False


nested: list[torch.Tensor] = []


def test_a_nested_compilation_starts_from_the_base_configuration(inductor: Any) -> None:
    nested.clear()
    with collect_records() as records:
        out = torch.compile(product, options=PassPipeline([Nesting()]).inductor_options())(torch.ones(4, 4))
    assert torch.equal(out, torch.full((4, 4), 4.0))
    assert [n.tolist() for n in nested] == [torch.full((3, 3), 3.0).tolist()]
    assert [(asserts, tiles) for _, asserts, tiles in seen] == [(True, None)]
    assert [record.pass_name for record in records] == ["Spy", "Nesting"]


@dataclass(frozen=True)
class Idle(MagiInductorPass):
    hook = "post_grad_custom_pre_pass"

    def __call__(self, graph: Graph) -> None:
        pass


def test_a_pipeline_does_not_run_on_what_its_own_passes_compile(inductor: Any) -> None:
    nested.clear()
    with collect_records() as records:
        torch.compile(product, options=PassPipeline([Idle(), Nesting()]).inductor_options())(torch.ones(4, 4))
    assert [record.pass_name for record in records] == ["Idle", "Spy", "Nesting"]


@dataclass(frozen=True)
class Tiles(MagiInductorPass):
    inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)
    tiles: int = 2

    def __call__(self, graph: Graph) -> None:
        config.triton.max_tiles = self.tiles


def _compile(fn: Any, options: dict[str, Any] | None, *, training: bool = False) -> tuple[int, int, int]:
    """Hits and misses of the AOTAutograd cache, and how many passes ran."""
    torch._dynamo.reset()
    counters.clear()
    with collect_records() as records:
        compiled: Any = torch.compile(fn, options=options)
        out = compiled(torch.ones(4, 4, requires_grad=training))
        if training:
            torch.autograd.backward(out.sum())
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"], sum(record.ran for record in records)


@pytest.mark.parametrize("training", [False, True])
def test_a_warm_cache_hits_in_the_same_process(inductor: Any, training: bool) -> None:
    options = PassPipeline([Tiles()]).inductor_options()
    assert _compile(product, options, training=training) == (0, 1, 2 if training else 1)
    assert _compile(product, options, training=training) == (1, 0, 0)
    # A new, equal pipeline is the same pipeline.
    assert _compile(product, PassPipeline([Tiles()]).inductor_options(), training=training) == (1, 0, 0)


def test_a_graph_without_passes_hits_whatever_ran_in_between(inductor: Any) -> None:
    _compile(other, None)
    _compile(product, PassPipeline([Tiles()]).inductor_options())
    assert _compile(other, None) == (1, 0, 0)


def test_a_setting_of_the_user_that_equals_the_default_misses(inductor: Any) -> None:
    """It keeps the pass from changing the key, so the code differs although no value does."""
    options = PassPipeline([Tiles()]).inductor_options()
    _compile(product, options)
    assert _compile(product, {**options, "triton.max_tiles": None}) == (0, 1, 1)


SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
from test_scope import PassPipeline, Tiles, _compile, product
print(json.dumps([_compile(product, PassPipeline([Tiles()]).inductor_options(), training=True) for _ in range(2)]))
"""


def test_a_warm_cache_hits_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        values_inside.append((config.triton.max_tiles, config.triton.prefer_nd_tiling))


@dataclass(frozen=True)
class Later(MagiInductorPass):
    """Sees the configuration that code generation will see."""

    def __call__(self, graph: Graph) -> None:
        values_after.append((config.triton.max_tiles, config.triton.prefer_nd_tiling))


values_inside: list[tuple[Any, Any]] = []
values_after: list[tuple[Any, Any]] = []
PIPELINE = PassPipeline([Asked(), Later()])


@pytest.fixture(autouse=True)
def _fresh_lists() -> None:
    values_inside.clear()
    values_after.clear()


def _first_record(options: dict[str, Any]) -> PassRecord:
    with collect_records() as records:
        torch.compile(lambda x: x @ x, options=options)(torch.ones(4, 4))
    return records[0]


def test_without_a_setting_the_pass_decides(inductor: Any) -> None:
    record = _first_record(PIPELINE.inductor_options())
    assert values_after == [(3, True)]
    assert record.config_changes == {"triton.max_tiles": (None, 3), "triton.prefer_nd_tiling": (False, True)}


@pytest.mark.parametrize(
    "merge",
    [
        lambda options, mine: {**options, **mine},
        lambda options, mine: {**mine, **options},
        lambda options, mine: PIPELINE.inductor_options(mine),
    ],
    ids=["after", "before", "base"],
)
@pytest.mark.parametrize("value", [None, 2])
def test_a_key_in_the_options_wins_in_whatever_order(inductor: Any, merge: Any, value: int | None) -> None:
    record = _first_record(merge(PIPELINE.inductor_options(), {"triton.max_tiles": value}))
    assert values_inside == [(3, True)]
    assert values_after == [(value, True)]
    assert record.reason == "user keys: triton.max_tiles; your triton.max_tiles stays"
    assert record.config_changes == {"triton.prefer_nd_tiling": (False, True)}


def test_a_global_setting_that_differs_from_the_default_wins(inductor: Any) -> None:
    with inductor.patch({"triton.max_tiles": 2}):
        _first_record(PIPELINE.inductor_options())
    assert values_after == [(2, True)]


def test_an_option_of_an_earlier_compilation_does_not_count_later(inductor: Any) -> None:
    _first_record(PIPELINE.inductor_options({"triton.max_tiles": 2}))
    torch._dynamo.reset()
    _first_record(PIPELINE.inductor_options())
    assert values_after == [(2, True), (3, True)]


def test_the_users_key_holds_for_the_backward_graph_too(inductor: Any) -> None:
    options = {**PIPELINE.inductor_options(), "triton.max_tiles": None}
    out = torch.compile(lambda x: x @ x, options=options)(torch.ones(4, 4, requires_grad=True))
    torch.autograd.backward(out.sum())
    assert values_after == [(None, True), (None, True)]


def test_a_dash_in_a_key_is_an_underscore(inductor: Any) -> None:
    _first_record(PIPELINE.inductor_options({"triton.max-tiles": 2}))
    assert values_after == [(2, True)]


def test_a_backend_that_bound_compile_fx_early_keeps_base_keys(inductor: Any) -> None:
    options = PIPELINE.inductor_options({"triton.max_tiles": None})

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx_bound_early(gm, inputs, config_patches=options)

    torch.compile(lambda x: x @ x, backend=backend)(torch.ones(4, 4))
    assert values_after == [(None, True)]
