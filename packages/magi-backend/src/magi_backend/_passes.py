# SPDX-License-Identifier: Apache-2.0
"""The graph passes of this backend, and those of one compilation, chosen by the settings.

Pointwise operators after a user's Triton kernel are fused into that kernel before its store. Inductor can fuse ``relu``
into the store of the kernel before it, which saves a launch and a write and read of memory, but does not do so by
default (torch >= 2.12). It checks whether the kernel has a single store, and whether the tensor that it writes to was
empty. It does not see that another launch wrote to the same tensor before:

    out = empty(n); first_half[...](x, out); second_half[...](x, out); return out.relu()

It would fuse the relu into the second launch, and then lose the first launch (2.12) or fail (2.13). Nor does it see
that the graph returns the tensor that the kernel wrote as well, as a backward needs: that tensor is then never written,
and the call ends in a NameError (2.13, ``can_fuse`` in torch/_inductor/scheduler.py looks at nodes only). In both cases
nothing in the graph is fused.

What a training graph saves for its backward, and what it recomputes: outputs of operators registered with
``is_compute_sensitive`` are saved, also inside the user's checkpoint. With a memory budget, outputs of matrix products
and of attention are saved too, and memory-bound operators are recomputed until the budget is met.
"""

from __future__ import annotations

import logging
import operator
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from magi_opschema import OpDef
from magi_passes import (
    AttentionMaskPass,
    AttentionPlansPass,
    ConvChooser,
    MagiInductorPass,
    NarrowSizesPass,
    NDTilingWorkaroundPass,
    PassContext,
    Reason,
    WideHeadsPass,
    WrittenAttentionPass,
    ZeroPadGuardPass,
)
from magi_passes.errors import PassIdentityError
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from . import _torch_compat
from ._register import registered
from ._repairs._defect import Defect, known_defects
from ._settings import CompileConfig


logger = logging.getLogger("magi_backend")


def _is_shared(tensor: Node) -> bool:
    """Whether the memory of *tensor* may be written or read by anything else than the launch that writes to it."""
    source, crossed = tensor, False
    while _is_item_or_view(source):
        source, crossed = source.args[0], True  # type: ignore[assignment]
    if not _torch_compat.nodes.is_empty(source):
        # Inductor never fuses into a launch on a tensor with contents, unless these come from a write to an empty
        # tensor.
        return _torch_compat.nodes.is_write(source)
    return crossed or len(source.users) > 1


def _has_epilogue(result: Node) -> bool:
    """Whether a pointwise operator reads only *result*, because Inductor adds no load to a user's kernel."""
    return any(_is_pointwise(user) and _reads_only(result, user) for user in result.users)


def _is_pointwise(node: Node) -> bool:
    """Whether *node* computes each element from the elements at the same position."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _reads_only(result: Node, operator: Node) -> bool:
    """Whether *operator* reads only *result*, constants, and what pointwise operators compute from these."""
    seen, waiting = {result}, list(operator.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        is_constant = node.op == "call_function" and not node.all_input_nodes
        if not is_constant and not _is_pointwise(node):
            return False
        waiting += node.all_input_nodes
    return True


def _is_returned(result: Node) -> bool:
    """Whether the graph returns *result*, or a view of it."""
    return any(user.op == "output" or (_is_item_or_view(user) and _is_returned(user)) for user in result.users)


def _is_item_or_view(node: Node) -> bool:
    """Whether *node* is an item or a view of its first argument."""
    is_view = isinstance(node.target, OpOverload) and node.target.is_view
    return is_view or node.target is operator.getitem


@dataclass(frozen=True)
class EpilogueFusion(MagiInductorPass):
    """Let Inductor fuse pointwise operators into the Triton launches of a graph, if each tensor has one writer."""

    inductor_config_keys_potentially_mutated_by_this_pass = _torch_compat.compiling.epilogue_keys()

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies if a pointwise operator reads only what a launch wrote, and no tensor has two writers."""
        del context
        launches = _torch_compat.nodes.triton_launches(graph)
        if not launches:
            return Reason(False, "no Triton launch")
        for kernel, launch in launches:
            arguments: Any = launch.kwargs["kwargs"]
            for parameter in launch.kwargs["tensors_to_clone"]:  # type: ignore[union-attr]
                if _is_shared(arguments[parameter]):
                    return Reason(False, f"{parameter!r} of {kernel} is not written by that launch alone")
            if any(_has_epilogue(result) and _is_returned(result) for result in launch.users):
                return Reason(False, f"the graph returns what {kernel} wrote as well")
        count = sum(any(map(_has_epilogue, launch.users)) for _, launch in launches)
        if not count:
            return Reason(False, "no pointwise operator reads only what a Triton kernel wrote")
        return Reason(True, f"a pointwise operator reads only what {count} of {len(launches)} Triton launches wrote")

    def __call__(self, graph: Graph) -> None:
        """Turn the fusion on for this graph."""
        del graph
        for key in self.inductor_config_keys_potentially_mutated_by_this_pass:
            setattr(_torch_compat.compiling.configs()[0], key, True)


def outputs(graph: Graph, chosen: Callable[[Node], bool]) -> list[Node]:
    """The outputs of the *chosen* nodes of *graph*; for a tuple, the items that are taken from it."""
    nodes = {node for node in graph.nodes if node.op == "call_function" and chosen(node)}
    # An operator that the compiler sees through is several nodes; only those that other nodes read must be saved.
    leaving = [node for node in nodes if not node.users.keys() <= nodes]
    return [
        item
        for node in leaving
        for item in (node.users if not isinstance(node.meta.get("val"), torch.Tensor) else (node,))
        if isinstance(item.meta.get("val"), torch.Tensor)
    ]


@dataclass(frozen=True)
class SelectiveRecompute(MagiInductorPass):
    """Mark the tensors that the partitioner must save.

    Attributes:
        sensitive: Names of the compute-sensitive operators in the graph. They are part of the cache key, because the
            graph does not show whether an operator was registered as one.
        products: Whether outputs of matrix products, convolutions and attention are saved too.
    """

    hook: ClassVar[str] = "joint_custom_post_pass"

    sensitive: tuple[str, ...] = ()
    products: bool = False

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies if there is a backward and something to save for it."""
        del context
        if not _torch_compat.nodes.has_backward(graph):
            return Reason(False, "there is no backward")
        sensitive, products = self._saved(graph)
        if not sensitive and not products:
            return Reason(False, "no compute-sensitive operator" + (", no product" if self.products else ""))
        return Reason(True, f"{len(sensitive)} compute-sensitive outputs and {len(products)} products are saved")

    def __call__(self, graph: Graph) -> None:
        """Mark these tensors."""
        for node in (node for saved in self._saved(graph) for node in saved):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def _saved(self, graph: Graph) -> tuple[list[Node], list[Node]]:
        """The compute-sensitive outputs of *graph*, and the products outside of the user's own checkpoints.

        A checkpoint decides for itself.
        """

        def is_sensitive(node: Node) -> bool:
            # Of a node in the place of a call that the compiler has replaced, the captured graph has the function.
            _, source = (node.meta.get("source_fn_stack") or [(None, None)])[-1]
            names = {_torch_compat.nodes.operator_name(target) for target in (node.target, source)}
            return not names.isdisjoint(self.sensitive) and not _torch_compat.nodes.in_backward(node)

        def is_free_product(node: Node) -> bool:
            is_free = "recompute" not in node.meta and not _torch_compat.nodes.in_backward(node)
            return is_free and _torch_compat.nodes.is_product(node.target)

        return outputs(graph, is_sensitive), outputs(graph, is_free_product) if self.products else []


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
    formula = definition.registration.derivative.formula
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
    passes: list[MagiInductorPass] = [_active_repairs(names, gm)]
    passes += [WrittenAttentionPass(), AttentionMaskPass(), WideHeadsPass(), AttentionPlansPass()]
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
