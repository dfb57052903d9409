# SPDX-License-Identifier: Apache-2.0
"""What the user set explicitly, no pass changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import MagiInductorPass, PassPipeline, PassRecord, Reason, collect_records
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx as compile_fx_bound_early


if TYPE_CHECKING:
    from magi_passes import PassContext
    from torch.fx import Graph


@dataclass(frozen=True)
class Tiles(MagiInductorPass):
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
PIPELINE = PassPipeline([Tiles(), Later()])


@pytest.fixture(autouse=True)
def _fresh_lists() -> None:
    values_inside.clear()
    values_after.clear()


def _compile(options: dict[str, Any]) -> PassRecord:
    with collect_records() as records:
        torch.compile(lambda x: x @ x, options=options)(torch.ones(4, 4))
    return records[0]


def test_without_a_setting_the_pass_decides(inductor: Any) -> None:
    record = _compile(PIPELINE.inductor_options())
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
    record = _compile(merge(PIPELINE.inductor_options(), {"triton.max_tiles": value}))
    assert values_inside == [(3, True)]
    assert values_after == [(value, True)]
    assert record.reason == "user keys: triton.max_tiles; your triton.max_tiles stays"
    assert record.config_changes == {"triton.prefer_nd_tiling": (False, True)}


def test_a_global_setting_that_differs_from_the_default_wins(inductor: Any) -> None:
    with inductor.patch({"triton.max_tiles": 2}):
        _compile(PIPELINE.inductor_options())
    assert values_after == [(2, True)]


def test_an_option_of_an_earlier_compilation_does_not_count_later(inductor: Any) -> None:
    _compile(PIPELINE.inductor_options({"triton.max_tiles": 2}))
    torch._dynamo.reset()
    _compile(PIPELINE.inductor_options())
    assert values_after == [(2, True), (3, True)]


def test_the_users_key_holds_for_the_backward_graph_too(inductor: Any) -> None:
    options = {**PIPELINE.inductor_options(), "triton.max_tiles": None}
    out = torch.compile(lambda x: x @ x, options=options)(torch.ones(4, 4, requires_grad=True))
    torch.autograd.backward(out.sum())
    assert values_after == [(None, True), (None, True)]


def test_a_dash_in_a_key_is_an_underscore(inductor: Any) -> None:
    _compile(PIPELINE.inductor_options({"triton.max-tiles": 2}))
    assert values_after == [(2, True)]


def test_a_backend_that_bound_compile_fx_early_keeps_base_keys(inductor: Any) -> None:
    options = PIPELINE.inductor_options({"triton.max_tiles": None})

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx_bound_early(gm, inputs, config_patches=options)

    torch.compile(lambda x: x @ x, backend=backend)(torch.ones(4, 4))
    assert values_after == [(None, True)]
