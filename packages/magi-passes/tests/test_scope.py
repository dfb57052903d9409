# SPDX-License-Identifier: Apache-2.0
"""A compilation leaves Inductor's configuration and caches as they were, whatever its passes did and the user set."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from made_passes import HOOK, Holds, Manager, Spy, changes_since, infer, other, product, seen, train
from magi_passes import MagiInductorPass, PassContext, PassPipeline, Reason, _torch_compat, collect_records
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx as compile_fx_bound_early
from torch.fx import Graph


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
    assert changes_since(before) == {}


@dataclass(frozen=True)
class Reader(MagiInductorPass):
    def __call__(self, graph: Graph) -> None:
        for key in _torch_compat.config.config_keys():
            if not key.startswith(("max_autotune_flex", "unsafe_")):
                _torch_compat.config.get_config(key)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reading_every_key_is_not_a_change(inductor: Any) -> None:
    infer(product, PassPipeline([Reader()]).inductor_options())


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


@dataclass(frozen=True)
class Later(MagiInductorPass):
    """Sees the configuration that code generation will see."""

    def __call__(self, graph: Graph) -> None:
        seen.append((config.triton.max_tiles, config.triton.prefer_nd_tiling))


PIPELINE = PassPipeline([Asked(), Later()])
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
