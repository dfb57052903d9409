# SPDX-License-Identifier: Apache-2.0
"""A compilation leaves Inductor's configuration as it found it, whatever its passes did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import MagiInductorPass, PassPipeline, Reason, _torch_compat, collect_records, current_context
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code


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


def test_a_key_holds_during_code_generation_and_for_one_graph_only(inductor: Any) -> None:
    def code_of(fn: Any, options: dict[str, Any] | None = None) -> str:
        torch._dynamo.reset()
        return "".join(run_and_get_code(torch.compile(fn, options=options), torch.ones(4, 4))[1])

    alone = code_of(other)
    with_pass = code_of(product, PassPipeline([Spy()]).inductor_options())
    with torch._inductor.utils.fresh_cache():
        after = code_of(other)

    assert "assert_size_stride(" in alone
    assert "assert_size_stride(" not in with_pass.partition("def call(")[2]
    assert alone.partition("def call(")[2] == after.partition("def call(")[2]


def test_forward_changes_do_not_reach_the_backward_graph(inductor: Any) -> None:
    compiled = torch.compile(product, options=PassPipeline([Spy()]).inductor_options())
    torch.autograd.backward(compiled(torch.ones(4, 4, requires_grad=True)).sum())
    assert seen == [("forward", True, None), ("backward", True, None)]


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
