# SPDX-License-Identifier: Apache-2.0
"""The graph passes of one compilation, chosen by the settings."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from magi_opschema import OpDef
from magi_passes import (
    AttentionMaskPass,
    ConvChooser,
    MagiInductorPass,
    NarrowSizesPass,
    NDTilingWorkaroundPass,
    Reason,
    ZeroPadGuardPass,
)
from magi_passes.errors import PassIdentityError
from torch.fx import Graph, GraphModule

from . import _torch_compat
from ._epilogue import EpilogueFusion
from ._recompute import SelectiveRecompute
from ._records.log import registered
from ._repairs._defect import Defect, known_defects
from ._settings import CompileConfig


logger = logging.getLogger("magi_backend")


@dataclass(frozen=True)
class ActiveRepairs(MagiInductorPass):
    """Puts the names of the active repairs of torch into reports and cache keys; the repairs are in `_repairs`.

    Without it, this backend would find a graph in the cache that stock Inductor has compiled wrong. *repairs* are an
    attribute of the class so that their code is part of its uuid; the pass itself calls none.

    What follows is also here only for the key, since torch's keys have the names of operators and no more of them
    (2.10 to 2.15). Torch leaves arguments that equal their defaults out of a graph, and puts the defaults, and the
    sizes and dtypes that a fake gave, into the generated code: *schemas* has both. The *gradients* are traced into the
    backward. So an edit of one of these would get the earlier code.
    """

    repairs: ClassVar = known_defects()

    names: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()
    gradients: tuple[Callable[..., object], ...] = ()

    def is_applicable(self, graph: Graph, context: object) -> Reason:
        """It never applies, because there is nothing to change in the graph."""
        del graph, context
        return Reason(False, f"repairs of torch {torch.__version__}: {', '.join(self.names) or 'none needed'}")

    def __call__(self, graph: Graph) -> None:
        """Do nothing."""


def gradients_of(definition: OpDef) -> tuple[Callable[..., object], ...]:
    """The functions that differentiate an operator of magi-opschema."""
    formula = definition.registration.formula
    given = () if formula is None else (formula.backward_fn, formula.setup_context_fn)
    return tuple(fn for fn in given if fn is not None)


def _active_repairs(names: tuple[str, ...], gm: GraphModule) -> ActiveRepairs:
    schemas, gradients = _torch_compat.nodes.operator_schemas(gm), list(_torch_compat.nodes.gradient_functions(gm))
    for target in dict.fromkeys(node.target for node in _torch_compat.nodes.nodes_in(gm)):
        if (definition := registered(target)) is not None:
            gradients += gradients_of(definition)
    found = ActiveRepairs(names, schemas, tuple(gradients))
    try:
        found.uuid()
    except PassIdentityError as error:
        logger.info("no cache has this graph in another process, because of a gradient of an operator: %s", error)
        return ActiveRepairs(names, (*schemas, uuid.uuid4().hex))
    return found


def chosen_passes(
    config: CompileConfig, gm: GraphModule, defects: Iterable[Defect], sensitive: tuple[str, ...] = ()
) -> tuple[MagiInductorPass, ...]:
    """The passes for *gm* that the settings allow, in the order in which they run.

    *sensitive* are the names of its compute-sensitive operators.
    """
    names = tuple(defect.name for defect in defects)
    passes: list[MagiInductorPass] = [_active_repairs(names, gm), AttentionMaskPass()]
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
