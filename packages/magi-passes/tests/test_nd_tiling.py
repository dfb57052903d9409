# SPDX-License-Identifier: Apache-2.0
"""When NDTilingWorkaroundPass fires, and what it sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import NDTilingWorkaroundPass, PassContext, PassPipeline, collect_records
from torch.fx.experimental.proxy_tensor import make_fx


if TYPE_CHECKING:
    from torch.fx import Graph


def _graph(*, dynamic: bool = True, conv: bool = True) -> Graph:
    def decode(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, w).relu() if conv else (x + w.sum()).relu()

    mode: Any = "symbolic" if dynamic else "fake"
    return make_fx(decode, tracing_mode=mode)(torch.ones(1, 3, 8, 9), torch.ones(4, 3, 3, 3)).graph


OLD = PassContext(torch_version="2.10.1+cu128")
WORKAROUND = NDTilingWorkaroundPass()


@pytest.mark.parametrize(
    ("version", "max_torch", "applies"),
    [
        ("2.9.0", "2.11", True),
        ("2.10.1+cu128", "2.11", True),
        ("2.11.0", "2.11", False),
        ("2.11.0a0+git1234", "2.11", False),
        ("2.13.0", "2.11", False),
        ("2.13.0", "2.14", True),
        ("3.0.0", "2.11", False),
        ("2.13.0", None, True),
    ],
)
def test_it_fires_on_older_torch_only(version: str, max_torch: str | None, applies: bool) -> None:
    verdict = NDTilingWorkaroundPass(max_torch=max_torch).is_applicable(_graph(), PassContext(torch_version=version))
    assert verdict.applies is applies
    assert applies or verdict.text == f"torch {version} is not older than {max_torch}"


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        ({}, "dynamic, 1 convolutions in"),
        ({"dynamic": False}, "static: no placeholder carries a free symbol"),
        ({"conv": False}, "not convolution-heavy: 0 convolutions in"),
    ],
)
def test_it_fires_on_dynamic_convolutional_graphs_only(graph: dict[str, bool], reason: str) -> None:
    verdict = WORKAROUND.is_applicable(_graph(**graph), OLD)
    assert verdict.applies is (graph == {})
    assert reason in verdict.text


def test_few_convolutions_among_many_nodes_are_not_heavy() -> None:
    assert not NDTilingWorkaroundPass(nodes_per_conv=2).is_applicable(_graph(), OLD)


def test_it_stays_out_when_the_user_decided() -> None:
    context = PassContext(torch_version="2.10.0", user_keys=frozenset({"triton.prefer_nd_tiling"}))
    assert WORKAROUND.is_applicable(_graph(), context).text == "you set triton.prefer_nd_tiling=False"


@pytest.mark.parametrize("arguments", [{"max_tiles": 1}, {"max_tiles": 4}, {"max_torch": "new"}])
def test_nonsense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_tiles=|is not a torch release"):
        NDTilingWorkaroundPass(**arguments)


@pytest.mark.parametrize("switched", ["on", "by option", "by environment"])
def test_end_to_end(inductor: Any, monkeypatch: pytest.MonkeyPatch, switched: str) -> None:
    options = PassPipeline([NDTilingWorkaroundPass(max_torch=None)]).inductor_options()
    if switched == "by option":
        options["triton.prefer_nd_tiling"] = False
    if switched == "by environment":
        monkeypatch.setenv("MAGI_PASSES_DISABLE", "NDTilingWorkaroundPass")
    weight = torch.ones(4, 3, 3, 3)
    with collect_records() as records:
        torch.compile(lambda x: torch.conv2d(x, weight), dynamic=True, options=options)(torch.ones(1, 3, 8, 9))
    (record,) = records
    if switched == "on":
        assert record.config_changes == {
            "triton.prefer_nd_tiling": (False, True),
            "triton.max_tiles": (None, 3),
            "triton.tile_reductions": (False, True),
        }
    else:
        reasons = {"by option": "you set triton.prefer_nd_tiling=False", "by environment": "MAGI_PASSES_DISABLE"}
        assert not record.ran
        assert reasons[switched] in record.reason
    assert inductor.triton.prefer_nd_tiling is False
