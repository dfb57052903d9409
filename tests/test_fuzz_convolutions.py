# SPDX-License-Identifier: Apache-2.0
"""Convolution nets that hypothesis writes, compiled for a card that is not there, run, and compared with eager.

`nox -s fuzz` runs MAGI_FUZZ_PROGRAMS of them, 500 unless that is set; the fast tests run a few. With MAGI_FUZZ_SECONDS
each share of them begins no other net after that time, and says how many it compared.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from _card import compared
from _conv_nets import Net, nets
from hypothesis import HealthCheck, Phase, given, seed, settings
from magi_passes import (
    ChannelMomentsPass,
    ConvChooser,
    ConvPaddingPass,
    MagiInductorPass,
    NDTilingWorkaroundPass,
    Reason,
    TemporalConvPass,
)


pytestmark = pytest.mark.usefixtures("_fresh_dynamo", "unmeasured_guards")
PROGRAMS = int(os.environ.get("MAGI_FUZZ_PROGRAMS", "500"))
SECONDS = float(os.environ.get("MAGI_FUZZ_SECONDS", "inf"))
# Each is a test of its own, so that they run side by side.
SHARES = 30

# The pass that ConvChooser forces the layout with is not a public name.
_forced_layout = vars(sys.modules[ConvChooser.__module__])["ForceChannelsLastPass"]()
_rewrites = (ConvPaddingPass(), ChannelMomentsPass(always=True))
PLANS: dict[str, tuple[MagiInductorPass, ...]] = {
    "temporal": (
        *_rewrites,
        TemporalConvPass(always=True, native_channels=10**6),
        _forced_layout,
        NDTilingWorkaroundPass(None, 3, static=True),
    ),
    "native": (
        *_rewrites,
        TemporalConvPass(always=True, native_channels=1, min_skipped=2.0),
        _forced_layout,
        NDTilingWorkaroundPass(None, 2, static=True),
    ),
    "layout": (*_rewrites, _forced_layout, NDTilingWorkaroundPass(None, 3, static=True)),
    "tiled": (*_rewrites, NDTilingWorkaroundPass(None, 2, static=True)),
}


@dataclass
class Outcome:
    """What was found in some nets.

    Attributes:
        agree: how many were compiled and agree with eager.
        stock: those in which the backend fails or differs, and stock Inductor as well, in words.
        ours: those in which the backend alone fails or differs, in words.
    """

    agree: int = 0
    stock: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)

    def compared(self) -> int:
        """How many nets there were."""
        return self.agree + len(self.stock) + len(self.ours)

    def add(self, net: Net) -> None:
        """Compile *net* with its plan forced, run it, and compare it with eager."""
        with mock.patch.multiple(
            ConvChooser, is_applicable=lambda *_: Reason(True, "forced"), _planned=lambda *_: PLANS[net.plan]
        ):
            ours = _differences(net, "magi")
        if not ours:
            self.agree += 1
            return
        stock = _differences(net, "inductor")
        (self.stock if stock else self.ours).append("\n".join([repr(net), "magi:", *ours, "stock:", *stock]))


def _differences(net: Net, backend: str) -> list[str]:
    torch.compiler.reset()
    try:
        model, calls = net.model(), net.calls()
        return compared(model, calls, backend=backend, dynamic=net.dynamic, training=net.training)[0]
    except Exception as error:  # noqa: BLE001 - whichever it is, it counts as a difference
        return [f"{type(error).__name__}: {str(error).strip()[:2000]}"]


def found_in(number: int, count: int, seconds: float = math.inf) -> Outcome:
    """What is found in *count* nets that hypothesis writes from the seed *number*, or in those of so many seconds."""
    outcome = Outcome()
    end = time.monotonic() + seconds

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(nets(sorted(PLANS)))
    def each(net: Net) -> None:
        if time.monotonic() < end:
            outcome.add(net)

    each()
    return outcome


_CONV = ("conv", {"out": 4, "groups": 1, "kernel_size": (3, 3), "padding": (1, 1), "bias": True})
_TWO_VIEWS = ("tap", {"kind": "every second"}), ("tap", {"kind": "transposed"})
# Each was once wrong under force_layout_optimization: outputs with gaps between their elements were returned without.
FOUND = (
    Net(
        ((3, 2, 4, 5, 3), (2, 2, 4, 5, 4)),
        (("cached_conv", {"bias": False, "frames": 1, "groups": 1, "kernel_size": (3, 3, 2), "out": 3}), ("gate", {})),
        torch.bfloat16,
        plan="layout",
        channels_last=True,
    ),
    Net(((2, 4, 5, 7), (3, 4, 6, 9)), (_CONV, ("tap", {"kind": "every second"}), _CONV), plan="layout"),
    # The backward graph returns None where the forward graph returns what others are views of.
    Net(((2, 4, 5, 7),), (_CONV, *_TWO_VIEWS, _CONV), training=True, plan="layout"),
)


@pytest.mark.parametrize("net", FOUND, ids=["a video", "an image", "two views"])
def test_nets_that_were_wrong(net: Net) -> None:
    outcome = Outcome()
    outcome.add(net)
    assert outcome.stock + outcome.ours == []


def test_some_nets_agree() -> None:
    outcome = found_in(0, 3)
    assert outcome.ours == []
    assert outcome.agree >= 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("share", range(1, SHARES + 1))
def test_nets_agree(
    share: int, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = found_in(share, -(-PROGRAMS // SHARES), SECONDS)
    with capsys.disabled():
        differ, stock = len(outcome.ours), len(outcome.stock)
        sys.stderr.write(f"\n{outcome.compared()} programs compared, {differ} differ, {stock} stock fails too\n")
    record_property("convolution nets that agree with eager", outcome.agree)
    record_property("convolution nets that stock fails on too", len(outcome.stock))
    assert "\n\n".join(outcome.ours) == ""
    # Nothing was compared where stock fails as well.
    assert len(outcome.stock) <= outcome.compared() // 4, "\n\n".join(outcome.stock)
