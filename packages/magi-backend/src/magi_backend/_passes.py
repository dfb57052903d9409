# SPDX-License-Identifier: Apache-2.0
"""The graph passes of one compilation, chosen by the settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from magi_passes import ConvChooser, MagiInductorPass, NarrowSizesPass, NDTilingWorkaroundPass, Reason, ZeroPadGuardPass
from torch.fx import Graph, GraphModule

from . import _torch_compat
from ._epilogue import EpilogueFusion
from ._recompute import SelectiveRecompute
from ._repairs._defect import Defect, known_defects
from ._settings import CompileConfig


@dataclass(frozen=True)
class ActiveRepairs(MagiInductorPass):
    """Puts the names of the active repairs of torch into reports and cache keys; the repairs are in `_repairs`.

    Without it, this backend would find a graph in the cache that stock Inductor has compiled wrong. *repairs* are an
    attribute of the class so that their code is part of its uuid; the pass itself calls none.

    The *schemas* of the operators in the graph are also here only for the key. Torch leaves arguments that equal their
    defaults out of a graph and puts the defaults into the generated code, but its keys have neither. So an edited
    default would get the code of the earlier default (torch 2.10 to 2.15).
    """

    repairs: ClassVar = known_defects()

    names: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()

    def is_applicable(self, graph: Graph, context: object) -> Reason:
        """It never applies, because there is nothing to change in the graph."""
        del graph, context
        return Reason(False, f"repairs of torch {torch.__version__}: {', '.join(self.names) or 'none needed'}")

    def __call__(self, graph: Graph) -> None:
        """Do nothing."""


def chosen_passes(
    config: CompileConfig, gm: GraphModule, defects: Iterable[Defect], sensitive: tuple[str, ...] = ()
) -> tuple[MagiInductorPass, ...]:
    """The passes for *gm* that the settings allow, in the order in which they run.

    *sensitive* are the names of its compute-sensitive operators.
    """
    names = tuple(defect.name for defect in defects)
    passes: list[MagiInductorPass] = [ActiveRepairs(names, _torch_compat.nodes.operator_schemas(gm))]
    if sensitive or config.memory_budget is not None:
        passes.append(SelectiveRecompute(sensitive, products=config.memory_budget is not None))
    wanted = config.pass_config
    tiling = wanted.enable_nd_tiling_workaround
    if wanted.enable_temporal_conv or wanted.enable_conv_layout:
        passes.append(ZeroPadGuardPass())
    passes.append(
        ConvChooser(
            tune=config.tune,
            tune_seconds=config.tune_seconds,
            temporal=wanted.enable_temporal_conv,
            layout=wanted.enable_conv_layout,
            nd_tiling=tiling,
            max_tiles=wanted.max_tiles,
        )
    )
    if tiling and not config.tune:
        # This is for graphs that the chooser does not change; the reason is on record.
        passes.append(NDTilingWorkaroundPass(max_tiles=wanted.max_tiles))
    passes.append(NarrowSizesPass())
    if _torch_compat.compiling.epilogue_keys():
        passes.append(EpilogueFusion())
    return tuple(passes)
