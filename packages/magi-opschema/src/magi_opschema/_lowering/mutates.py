# SPDX-License-Identifier: Apache-2.0
"""`mutates_args`: from names at the user's signature to the Tensor leaves that they mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from magi_opschema._model.tree import Leaf, dotted, flat_name, leaves, nodes
from magi_opschema._text import nearest, show_value
from magi_opschema.errors import OptionError


if TYPE_CHECKING:
    from magi_opschema._model.lowering import SignatureTrees


def mutated_leaves(trees: SignatureTrees, mutates_args: object) -> set[str]:
    """The names of the leaves that *mutates_args* means.

    Raises:
        OptionError: a name is unknown, or names nothing that an op can write into.
    """
    if isinstance(mutates_args, str):
        text = f"mutates_args={mutates_args!r} is one string. Write a tuple of names: ({mutates_args!r},)."
        raise OptionError(trees.sentence(text))
    if not isinstance(mutates_args, Iterable):
        text = (
            f"mutates_args={show_value(mutates_args)} is not a tuple of names. Leave it out if nothing is written into."
        )
        raise OptionError(trees.sentence(text))
    mutated: set[str] = set()
    names = list(mutates_args)
    tensors_by_name = _tensors_by_name(trees) if names else {}
    for name in names:
        for leaf in _meant(name, tensors_by_name, trees):
            _refuse_optional_list(leaf, trees)
            mutated.add(leaf.name)
    return mutated


def _tensors_by_name(trees: SignatureTrees) -> dict[str, list[Leaf]]:
    """The Tensors of each node, by its dotted path and by its flat name."""
    found: dict[str, list[Leaf]] = {}
    for parameter in trees.parameters:
        for node in nodes(parameter.node):
            found[dotted(node.path)] = found[flat_name(node.path)] = [leaf for leaf in leaves(node) if leaf.is_tensor]
    return found


def _meant(name: object, tensors_by_name: dict[str, list[Leaf]], trees: SignatureTrees) -> Sequence[Leaf]:
    if not isinstance(name, str) or name not in tensors_by_name:
        text = f"mutates_args names {show_value(name)}, which is not a parameter, leaf path or flat name."
        raise OptionError(trees.sentence(text + nearest(name, tensors_by_name)))
    if not tensors_by_name[name]:
        text = f"mutates_args names '{name}', which holds no Tensor, and an op can write into Tensors only."
        raise OptionError(trees.sentence(text))
    return tensors_by_name[name]


def _refuse_optional_list(leaf: Leaf, trees: SignatureTrees) -> None:
    if leaf.schema_type == "Tensor[]?":
        text = f"mutates_args names '{dotted(leaf.path)}', a list of Tensors that may be None, which torch cannot"
        fix = "functionalize (pytorch #144072). Use list[Tensor], empty for None."
        raise OptionError(trees.sentence(f"{text} {fix}"))
