# SPDX-License-Identifier: Apache-2.0
"""What an arm of a benchmark of compiled models is, by name: eager, stock `torch.compile`, the backend, some passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any

import torch


@dataclass(frozen=True)
class Arm:
    """How a model is compiled, if at all.

    Attributes:
        backend: "eager", "inductor" or "magi".
        dynamic: Whether sizes are symbols, as far as the benchmark makes them so.
        options: The options of the backend.
        passes: The passes of magi-passes by name, where they and no others run.
        channels_last: Whether the weights are channels-last, and cuDNN measures its algorithms.
    """

    name: str
    backend: str
    dynamic: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    passes: tuple[str, ...] = ()
    channels_last: bool = False

    @property
    def is_compiled(self) -> bool:
        return self.backend != "eager"

    @property
    def is_ours(self) -> bool:
        """Whether code of this project compiles it."""
        return self.backend == "magi" or bool(self.passes)

    def compile(self, call: Callable[..., Any], *, dynamic: bool | None) -> Callable[..., Any]:
        """Compile *call*, with symbolic sizes as *dynamic* has it for `torch.compile`."""
        options = dict(self.options)
        if self.passes:
            options |= pipeline_options(self.passes)
        backend: Any = self.backend
        if self.backend == "magi":
            # What torch loads for the name, which it knows only where the package is installed.
            backend = EntryPoint("magi", "magi_backend._entry_point:magi", "torch_dynamo_backends").load()
        compiled: Any = torch.compile(call, backend=backend, dynamic=dynamic, options=options or None)
        return compiled  # type: ignore[no-any-return]


_NAMED = {
    arm.name: arm
    for arm in (
        Arm("eager", "eager"),
        Arm("eager_channels_last", "eager", channels_last=True),
        Arm("stock_static", "inductor"),
        Arm("stock_static_max_autotune", "inductor", options={"max_autotune": True, "coordinate_descent_tuning": True}),
        Arm("stock_dynamic", "inductor", dynamic=True),
        Arm("stock_no_coalesce", "inductor", dynamic=True, options={"triton.coalesce_tiling_analysis": False}),
        Arm("magi_static", "magi"),
        Arm("magi_dynamic", "magi", dynamic=True),
        Arm("magi_tuned", "magi", dynamic=True, options={"magi.tune": True, "magi.tune_seconds": 60}),
    )
}


def arm_named(name: str, *, called: str = "") -> Arm:
    """The arm *name*, or with *called* for the name of its rows.

    ``stock_dynamic:triton.max_tiles=2+triton.prefer_nd_tiling=true`` gives options beside those of the arm.
    ``passes:layout+nd2`` runs just these passes with symbolic sizes, ``passes_static:layout`` with constant ones.
    """
    named, _, rest = name.partition(":")
    if named in ("passes", "passes_static"):
        return Arm(called or name, "inductor", dynamic=named == "passes", passes=tuple(rest.split("+")))
    if named not in _NAMED:
        msg = f"no arm {named!r}; there are {', '.join(_NAMED)}, passes:NAME+NAME and passes_static:NAME+NAME"
        raise ValueError(msg)
    given = (setting.partition("=") for setting in rest.split("+") if setting)
    options = {key: json.loads(value) for key, _, value in given}
    return replace(_NAMED[named], name=called or name, options={**_NAMED[named].options, **options})


def pipeline_options(names: tuple[str, ...]) -> dict[str, Any]:
    """The options of Inductor that run the passes *names*."""
    import magi_passes as mp

    by_name: dict[str, Callable[[], Any]] = {
        "chooser": mp.ConvChooser,
        "tuned_chooser": lambda: mp.ConvChooser(tune=True),
        "zero_pads": mp.ZeroPadGuardPass,
        "padding": mp.ConvPaddingPass,
        "few_channels": mp.FewOutputChannelsPass,
        "wide_heads": mp.WideHeadsPass,
        "temporal": mp.TemporalConvPass,
        "temporal_all_frames": lambda: mp.TemporalConvPass(min_skipped=2.0),
        "layout": mp.ConvLayoutPass,
        "moments": mp.ChannelMomentsPass,
        "nd2": lambda: mp.NDTilingWorkaroundPass(None, 2),
        "nd3": lambda: mp.NDTilingWorkaroundPass(None, 3),
    }
    return dict(mp.PassPipeline([by_name[name]() for name in names]).inductor_options())
