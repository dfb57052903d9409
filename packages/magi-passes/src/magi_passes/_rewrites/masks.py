# SPDX-License-Identifier: Apache-2.0
"""Masks of attention that are known before there is data: left out, or said by ``is_causal``.

In eager mode, libraries leave a mask out that hides nothing. A captured graph has it: n * n values that are written and
read. With it, attention cannot take the fastest kernel, and takes none at all if the mask was expanded along the keys:
their stride of 0 is what no kernel reads (`sdp_utils.cpp` in aten/src/ATen/native/transformers), so that torch computes
attention by two products in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from magi_passes import _torch_compat
from magi_passes._framework.compilation import PassContext, Reason
from magi_passes._framework.graph_pass import MagiInductorPass
from magi_passes._graph.nodes import captured_value, is_same_shape, operands_of
from magi_passes._graph.positions import Affine, Formula, Formulas


_ATTENTION = (torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
"""As Dynamo captures it, and as torch.export does."""
_ARE_LIKE = ("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")
"""What asks its first tensor for the shape, dtype and device, and not for its numbers."""


@dataclass(frozen=True)
class AttentionMaskPass(MagiInductorPass):
    """Leave masks of `scaled_dot_product_attention` out that hide nothing, and say those by ``is_causal`` that are so.

    A mask is understood if it is computed from sizes alone: by `torch.arange` and comparisons, `tril`, `where` and
    what only moves numbers, for all sizes that the guards admit. Others stay.

    Example:
        >>> import torch
        >>> from magi_passes import AttentionMaskPass, PassPipeline, collect_records
        >>> def attend(x):
        ...     places = torch.arange(x.shape[-2])
        ...     return torch.nn.functional.scaled_dot_product_attention(x, x, x, places <= places[:, None])
        >>> options = PassPipeline([AttentionMaskPass()]).inductor_options()
        >>> with collect_records() as records:
        ...     _ = torch.compile(attend, dynamic=True, options=options)(torch.randn(2, 3, 5, 8))
        >>> records[0].reason
        'of 1 masks of attention, 0 hide nothing and 1 what comes later'
    """

    hook: ClassVar[str] = "pre_grad_custom_pass"

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if some mask hides nothing, or what comes later."""
        masks = _masks(graph)
        nothing, later = (sum(known is is_causal for known in masks.values()) for is_causal in (False, True))
        hide = f"of {len(masks)} masks of attention, {nothing} hide nothing and {later} what comes later"
        return Reason(nothing + later > 0, hide if masks else "no mask of attention")

    def __call__(self, graph: Graph) -> None:
        """Take these masks out of their calls."""
        for node, is_causal in _masks(graph).items():
            if is_causal is None:
                continue
            given = {**operands_of(node), "is_causal": is_causal}
            node.args = tuple(given.pop(name) for name in ("query", "key", "value"))
            node.kwargs = {name: value for name, value in given.items() if name != "attn_mask"}


def _mask_of(node: Node) -> Node | None:
    """The mask of a call of attention that decides nothing but scores; None if *node* is none, or has none."""
    if node.op != "call_function" or node.target not in _ATTENTION:
        return None
    given = operands_of(node)
    mask: Any = given.get("attn_mask")
    if not isinstance(mask, Node) or not hasattr(captured_value(mask), "fake_mode") or given.get("is_causal"):
        return None
    # A mask of more sequences than the queries repeats them in the result, even if it hides nothing.
    is_as_long = is_same_shape(captured_value(node).shape[:-1], captured_value(given["query"]).shape[:-1])
    return mask if is_as_long else None


def _masks(graph: Graph) -> dict[Node, bool | None]:
    """The calls of attention with a mask: False if it hides nothing, True if what comes later and no more, or None."""
    calls = {node: mask for node in graph.nodes if (mask := _mask_of(node)) is not None}
    formulas = _formulas_of(graph, set(calls.values())) if calls else {}
    return {node: _is_causal(formulas.get(mask), captured_value(mask)) for node, mask in calls.items()}


def _is_causal(formula: Formula | None, mask: Tensor) -> bool | None:
    shown, hidden = (0, -math.inf) if mask.is_floating_point() else (1, 0)
    if isinstance(formula, Affine):
        return False if formula.constant == shown else None
    if formula is None or (formula.inside, formula.outside) != (shown, hidden):
        return None
    query, key = mask.dim() - 2, mask.dim() - 1
    is_square = statically_known_true(mask.shape[query] == mask.shape[key])
    return True if is_square and formula.conditions == (Affine(0, {query: 1, key: -1}),) else None


def _formulas_of(graph: Graph, masks: set[Node]) -> dict[Node, Formula]:
    """The formulas of those of *masks* that are computed from sizes alone."""
    compat, formulas, values = _torch_compat.compiling, Formulas(), dict[Node, Any]()
    written = {compat.storage_of(captured_value(node)) for node in compat.written_operands(graph.nodes)}
    for node in _computed_from_sizes(graph, masks):
        value = captured_value(node)
        if isinstance(value, Tensor):
            if compat.storage_of(value) in written:
                return {}
            args, kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda given: values.get(given, captured_value(given))
            )
            with compat.seeing_operators(value, formulas.note):
                target = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
                value = target(*args, **kwargs)
        values[node] = value
    found = {mask: formulas.of(values[mask]) for mask in masks if mask in values}
    return {mask: formula for mask, formula in found.items() if formula is not None}


def _computed_from_sizes(graph: Graph, masks: set[Node]) -> Iterator[Node]:
    """What *masks* are computed from, in order, apart from what depends on the numbers of a tensor that is given.

    What has a size that depends on data would get another one when it is called again.
    """
    needed = set(masks)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    known = set[Node]()
    for node in graph.nodes:
        value, is_call = captured_value(node), node.op in ("call_function", "call_method")
        if isinstance(value, Tensor):
            # A tensor inside `torch.vmap` or `torch.func.grad` is a wrapper, without a mode.
            is_plain = is_call and hasattr(value, "fake_mode") and _torch_compat.compiling.is_plain(node.target)
            is_plain &= not node.meta.get("unbacked_bindings")
            is_like = getattr(node.target, "__name__", node.target) in _ARE_LIKE
            follows = is_plain and known.issuperset(node.all_input_nodes[is_like:])
        else:
            follows = isinstance(value, (int, torch.SymInt, tuple))
        if node in needed and follows:
            known.add(node)
            yield node
