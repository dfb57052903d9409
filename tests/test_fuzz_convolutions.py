# SPDX-License-Identifier: Apache-2.0
"""Convolution nets that hypothesis writes, compiled for a card that is not there, run, and compared with eager.

`nox -s fuzz` runs MAGI_FUZZ_PROGRAMS of them, 500 unless that is set; the fast tests run a few. With MAGI_FUZZ_SECONDS
each share of them begins no other net after that time, and says how many it compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from _card import compared
from _fuzz import SHARES, count_of_a_share, drawn, in_time
from hypothesis import strategies as st
from magi_passes import (
    ChannelMomentsPass,
    ConvChooser,
    ConvPaddingPass,
    MagiInductorPass,
    NDTilingWorkaroundPass,
    Reason,
    TemporalConvPass,
)
from torch import Tensor, nn


pytestmark = pytest.mark.usefixtures("unmeasured_guards")

Layer = tuple[str, dict[str, Any]]
_MOST_ELEMENTS = 3000


@dataclass(frozen=True)
class Net:
    """A net in words; its text makes it again.

    Attributes:
        shapes: of the input of each call, (batch, channels, *space).
        layers: names of methods of `ConvNet`, with arguments.
        dtype: of the input and all parameters.
        training: whether gradients are compared as well, and normalisations use the numbers of the batch.
        dynamic: as in `torch.compile`.
        plan: which passes are forced, a key of `PLANS` in test_fuzz_convolutions.
        channels_last: whether the input is laid out so.
    """

    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[Layer, ...]
    dtype: torch.dtype = torch.float32
    training: bool = False
    dynamic: bool = True
    plan: str = "temporal"
    channels_last: bool = False

    def model(self) -> nn.Module:
        """A new module, with the same parameters each time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return ConvNet(self).to(self.dtype).train(self.training)

    def calls(self) -> list[tuple[Tensor, ...]]:
        """The arguments of each call: an image, and one cache for each layer that takes one."""
        generator = torch.Generator().manual_seed(1)
        last = {4: torch.channels_last, 5: torch.channels_last_3d}

        def image(shape: tuple[int, ...]) -> Tensor:
            made = torch.randn(shape, generator=generator).to(self.dtype)
            return made.to(memory_format=last[len(shape)]) if self.channels_last and len(shape) in last else made

        return [tuple(map(image, (shape, *caches))) for shape, caches in self._caches()]

    def _caches(self) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
        """The shape of each call, with the shapes of its caches, found by a run on no memory."""
        model = ConvNet(self).to("meta")
        found = []
        for shape in self.shapes:
            model.needed = []
            model(torch.empty(shape, device="meta"))
            found.append((shape, model.needed))
        return found


class ConvNet(nn.Module):
    """The module of a `Net`; returns what its last layer makes, then what layers made besides."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self.channels, self.space = net.shapes[0][1], len(net.shapes[0]) - 2
        self.parts = nn.ModuleList()
        self.needed: list[tuple[int, ...]] = []
        for name, how in net.layers:
            self._add(name, how)

    def _add(self, name: str, how: dict[str, Any]) -> None:
        part: nn.Module = nn.Identity()
        channels = self.channels
        if name in ("conv", "cached_conv", "transposed"):
            made = getattr(nn, f"Conv{'Transpose' if name == 'transposed' else ''}{self.space}d")
            out, groups = how["out"], math.gcd(how["groups"], math.gcd(channels, how["out"]))
            rest = {key: value for key, value in how.items() if key not in ("out", "groups", "frames")}
            part, self.channels = made(channels, out, groups=groups, **rest), out
        elif name == "norm":
            kinds: dict[str, Callable[[], nn.Module]] = {
                "group": lambda: nn.GroupNorm(math.gcd(how["groups"], channels), channels),
                "batch": lambda: getattr(nn, f"BatchNorm{self.space}d")(channels),
                "instance": lambda: getattr(nn, f"InstanceNorm{self.space}d")(channels, affine=True),
                "layer": lambda: nn.LayerNorm(channels),
                "rms": nn.Identity,
            }
            part = kinds[how["kind"]]()
        elif name == "residual":
            part = getattr(nn, f"Conv{self.space}d")(channels, channels, how["kernel"], padding=how["kernel"] // 2)
        elif name == "excite":
            part = nn.Sequential(nn.Linear(channels, 2), nn.SiLU(), nn.Linear(2, channels))
        after = {"gate": channels // 2, "shuffle": channels // 4, "unshuffle": channels * 4, "doubled": channels * 2}
        self.channels = after.get(name, self.channels)
        self.parts.append(part)
        self.layers.append((name, how))

    def forward(self, x: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        given = list(caches)
        extra: list[Tensor] = []
        for part, (name, how) in zip(self.parts, self.layers, strict=True):
            if name == "cached_conv":
                x = self._with_cache(x, given, extra, how["frames"])
                x = part(x)
            elif name == "tap":
                extra.append(_TAPS[how["kind"]](x))
            else:
                x = _LAYERS[name](part, x, **how)
        return (x, *extra)

    def _with_cache(self, x: Tensor, given: list[Tensor], extra: list[Tensor], frames: int) -> Tensor:
        """*x* behind the last frames of an earlier call, whose own last frames are given back."""
        if x.device.type == "meta":
            shape = (*x.shape[:2], frames, *x.shape[3:])
            self.needed.append(tuple(shape))
            given.append(torch.empty(shape, device="meta"))
        x = torch.cat([given.pop(0), x], 2)
        extra.append(x[:, :, -frames:])
        return x


def _norm(part: nn.Module, x: Tensor, *, kind: str, **_how: Any) -> Tensor:
    if kind == "layer":
        return part(x.movedim(1, -1)).movedim(-1, 1)  # type: ignore[no-any-return]
    if kind == "rms":
        return x * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5).to(x.dtype)
    return part(x)  # type: ignore[no-any-return]


def _excite(part: nn.Module, x: Tensor) -> Tensor:
    weights = part(x.mean(tuple(range(2, x.dim())))).sigmoid()
    return x * weights.view(*weights.shape, *[1] * (x.dim() - 2))  # type: ignore[no-any-return]


def _pooled(x: Tensor, kind: str, kernel: int, stride: int, padding: int) -> Tensor:
    space = x.dim() - 2
    if kind == "adaptive":
        return getattr(F, f"adaptive_avg_pool{space}d")(x, kernel)  # type: ignore[no-any-return]
    function = getattr(F, f"{kind}_pool{space}d")
    return function(x, kernel, stride, min(padding, kernel // 2))  # type: ignore[no-any-return]


_BY_SPACE = {1: "linear", 2: "bilinear", 3: "trilinear"}


def _resized(x: Tensor, mode: str, factor: float, by_size: bool) -> Tensor:
    mode = _BY_SPACE[x.dim() - 2] if mode == "linear" else mode
    if by_size:
        return F.interpolate(x, size=tuple(n + 1 for n in x.shape[2:]), mode=mode)
    return F.interpolate(x, scale_factor=factor, mode=mode)


def _chunk_gate(x: Tensor) -> Tensor:
    left, right = x[:, : x.shape[1] // 2 * 2].chunk(2, 1)
    return left * right.sigmoid()


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[..., ::2].mul_(0.5)
    return y.add_(x)


_LAYERS: dict[str, Callable[..., Tensor]] = {
    "conv": lambda part, x, **_how: part(x),
    "transposed": lambda part, x, **_how: part(x),
    "norm": _norm,
    "residual": lambda part, x, kernel, act: x + part(getattr(F, act)(x)),
    "excite": _excite,
    "act": lambda _part, x, name: getattr(F, name)(x),
    "pad": lambda _part, x, amounts, mode, value: F.pad(x, amounts[: 2 * (x.dim() - 2)], mode, value),
    "pool": lambda _part, x, **how: _pooled(x, **how),
    "resize": lambda _part, x, **how: _resized(x, **how),
    "shuffle": lambda _part, x: F.pixel_shuffle(x, 2),
    "unshuffle": lambda _part, x: F.pixel_unshuffle(x, 2),
    "gate": lambda _part, x: _chunk_gate(x),
    "doubled": lambda _part, x: torch.cat([x, x.flip(-1)], 1),
    "in_place": lambda _part, x: _in_place(x),
    "cut": lambda _part, x, start, step: x[..., start::step],
    "roll": lambda _part, x, dim, by: x.roll(by, dim),
    "tokens": lambda _part, x: F.silu(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:]),
    "contiguous": lambda _part, x: x.contiguous(),
    "mean": lambda _part, x, dim: x - x.mean(dim, keepdim=True),
}
_TAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "mean": lambda x: x.mean(tuple(range(2, x.dim()))),
    "transposed": lambda x: x.transpose(1, -1),
    "sum": lambda x: x.sum(1),
    "every second": lambda x: x[:, ::2],
}
_ACTIVATIONS = ["relu", "silu", "gelu", "tanh", "sigmoid", "leaky_relu", "hardswish", "mish", "softplus", "elu"]
_SMOOTH = ["silu", "gelu", "tanh", "sigmoid", "mish", "softplus"]
_small = st.integers(1, 3)
_flags = st.booleans()


def _layer(space: int, names: list[str]) -> st.SearchStrategy[Layer]:
    """Any layer over images of *space* dimensions, with activations among *names*."""

    def named(name: str, /, **how: st.SearchStrategy[Any]) -> st.SearchStrategy[Layer]:
        return st.tuples(st.just(name), st.fixed_dictionaries(how))

    each = st.tuples(*[_small] * space)
    modes = st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
    outs, groups = st.sampled_from([2, 3, 4, 6, 8]), st.sampled_from([1, 1, 2, 4, 8])
    every: dict[str, st.SearchStrategy[Any]] = {"out": outs, "groups": groups, "kernel_size": each, "bias": _flags}
    conv = every | {
        "stride": st.tuples(*[st.sampled_from([1, 1, 2])] * space),
        "padding": st.tuples(*[st.integers(0, 2)] * space),
        "dilation": st.tuples(*[st.sampled_from([1, 1, 2])] * space),
        "padding_mode": modes,
    }
    transposed = every | {"stride": st.sampled_from([1, 2]), "padding": st.sampled_from([0, 1])}
    cached = every | {"groups": st.just(1), "frames": st.integers(1, 2)}
    kinds = st.sampled_from(["group", "group", "batch", "instance", "layer", "rms"])
    pads = st.tuples(*[st.integers(0, 2)] * (2 * space))
    pad = {"amounts": pads, "mode": st.just("constant"), "value": st.sampled_from([0.0, 0.0, 1.5])}
    bent = {"amounts": pads, "mode": st.sampled_from(["reflect", "replicate", "circular"]), "value": st.none()}
    ways = st.sampled_from(["avg", "max", "adaptive"])
    pool = {"kind": ways, "kernel": _small, "stride": _small, "padding": st.integers(0, 1)}
    resize = ["nearest", "nearest-exact", "linear", *(["bicubic", "area"] if space == 2 else [])]
    factors = st.sampled_from([2.0, 1.5, 0.5])
    either = [
        *(named("conv", **conv) for _ in range(3)),  # one object counts once, however often it is in the list
        named("transposed", **transposed),
        named("cached_conv", **cached),
        *(named("norm", kind=kinds, groups=st.sampled_from([1, 2, 3, 4])) for _ in range(2)),
        named("act", name=st.sampled_from(names)),
        named("residual", kernel=st.sampled_from([1, 3]), act=st.sampled_from(names)),
        named("pad", **pad),
        named("pad", **bent),
        named("pool", **pool),
        named("resize", mode=st.sampled_from(resize), factor=factors, by_size=_flags),
        *map(named, ("excite", "gate", "doubled", "in_place", "tokens", "contiguous")),
        named("cut", start=st.integers(0, 1), step=st.integers(1, 2)),
        named("roll", dim=st.sampled_from([1, 2, -1]), by=st.sampled_from([1, -1])),
        named("mean", dim=st.sampled_from([1, 2, -1])),
        named("tap", kind=st.sampled_from(sorted(_TAPS))),
        *([named("shuffle"), named("unshuffle")] if space == 2 else []),
    ]
    return st.one_of(either)


@st.composite
def nets(draw: st.DrawFn, plans: list[str]) -> Net:
    """Any net of two to seven layers of which one is a convolution, that runs on each of its inputs."""
    space, channels = draw(st.sampled_from([1, 2, 2, 2, 3, 3])), draw(st.sampled_from([2, 3, 4, 8]))
    longest = {1: 19, 2: 9, 3: 5}[space]
    sizes = st.tuples(st.integers(1, 3), *[st.integers(3, longest)] * space)
    dynamic = draw(st.sampled_from([True, True, True, False]))
    calls = draw(st.lists(sizes, min_size=1 + dynamic, max_size=1 + dynamic, unique=True))
    training = draw(st.sampled_from([False, False, False, False, True]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    # A kink turns a rounding of bfloat16 into another gradient.
    names = _SMOOTH if training and dtype is torch.bfloat16 else _ACTIVATIONS
    shapes = tuple((batch, channels, *rest) for batch, *rest in calls)
    plan, channels_last = draw(st.sampled_from(plans)), draw(st.sampled_from([False, False, True]))
    net = Net(shapes, (), dtype, training, dynamic, plan, channels_last)
    for layer in draw(st.lists(_layer(space, names), min_size=3, max_size=6)):
        if training and dtype is torch.bfloat16 and layer[1].get("kind") == "max":
            continue
        net = with_layer(net, layer) or net
    if not any("conv" in name or name in ("transposed", "residual") for name, _ in net.layers):
        net = with_layer(net, ("residual", {"kernel": 3, "act": "silu"})) or net
    return net


def with_layer(net: Net, layer: Layer) -> Net | None:
    """*net* with another layer; nothing if that does not run on each input, or makes much of it."""
    longer = replace(net, layers=(*net.layers, layer))
    try:
        model = ConvNet(longer).to("meta").train(net.training)
        for shape in net.shapes:
            made, *_ = model(torch.empty(shape, device="meta"))
            if not 0 < made.numel() <= _MOST_ELEMENTS or made.dim() != len(shape):
                return None
    except (AssertionError, RuntimeError, ValueError):
        # torch's own word that the sizes do not go together; the layer is left out.
        return None
    return longer


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


def found_in(given: Iterable[Net]) -> Outcome:
    """What is found in nets."""
    outcome = Outcome()
    for net in given:
        outcome.add(net)
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
    # What the cache is a view of is saved for the backward graph.
    Net(
        ((2, 3, 4, 3),),
        (("cached_conv", {"frames": 1, "groups": 1, "kernel_size": (3, 2), "bias": True, "out": 6}),),
        training=True,
        dynamic=False,
        plan="layout",
    ),
    # The backward of padding that repeats the edge clamps an index: a maximum of a loop variable.
    Net(
        ((3, 2, 5, 6), (1, 2, 3, 3)),
        (("conv", {"out": 8, "groups": 1, "kernel_size": (1, 3), "padding": (2, 0), "padding_mode": "replicate"}),),
        training=True,
    ),
    # The channels are a symbol until the convolution.
    Net(
        ((1, 4, 4, 4, 5), (1, 4, 3, 5, 3)),
        (("gate", {}), ("conv", {"kernel_size": (3, 1, 3), "groups": 8, "out": 4})),
    ),
)


@pytest.mark.parametrize("net", FOUND, ids=["a video", "an image", "two views", "a saved cache", "padding", "groups"])
def test_nets_that_were_wrong(net: Net) -> None:
    outcome = found_in([net])
    assert outcome.stock + outcome.ours == []


def test_some_nets_agree() -> None:
    outcome = found_in(drawn(nets(sorted(PLANS)), 0, 3))
    assert outcome.ours == []
    assert outcome.agree >= 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("share", range(1, SHARES + 1))
def test_nets_agree(
    share: int, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = found_in(in_time(drawn(nets(sorted(PLANS)), share, count_of_a_share(500))))
    with capsys.disabled():
        differ, stock = len(outcome.ours), len(outcome.stock)
        counts = f"\n{outcome.compared()} programs compared, {differ} differ, {stock} stock fails too\n"
        sys.stderr.write("\n\n".join([counts, *outcome.ours]))
    record_property("convolution nets that agree with eager", outcome.agree)
    record_property("convolution nets that stock fails on too", len(outcome.stock))
    assert "\n\n".join(outcome.ours) == ""
    # Nothing was compared where stock fails as well.
    assert len(outcome.stock) <= outcome.compared() // 4, "\n\n".join(outcome.stock)
