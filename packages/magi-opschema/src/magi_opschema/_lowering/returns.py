# SPDX-License-Identifier: Apache-2.0
"""Return annotations to trees."""

from __future__ import annotations

import inspect
import types

from magi_opschema._model.tree import Node, Optional, dotted, leaves, nodes
from magi_opschema.errors import Problem

from .annotations import Scope
from .place import Place, Refused
from .types import lower


RETURNABLE = {"Tensor", "Tensor?", "Tensor[]", "SymInt", "float", "bool", "Scalar"}


def lower_returns(annotation: object, scope: Scope) -> Node | None:
    """The tree of a return annotation; None for `-> None`.

    Raises:
        Refused: the annotation is missing, or holds something that an op cannot return.
    """
    if annotation is inspect.Signature.empty:
        fix = "Annotate it, for example -> Tensor, or -> None for an op that only writes into its arguments."
        raise Refused(Problem("", f"the return value has no annotation, and the schema needs its type. {fix}"))
    if annotation is None or annotation is types.NoneType or annotation == "None":
        return None
    place = Place((), scope, "the return value")
    node = lower(annotation, place.below("output"))
    tree = node.node
    for part in nodes(tree):
        if isinstance(part, Optional):
            below = f"where '{dotted(part.path)}' may be None as a whole"
            what = "a record that may be None" if part is tree else below
            why = f"{what}, and an op returns the same number of outputs at every call"
            raise place.refuse(annotation, why, "Return a record of T | None.")
    for leaf in leaves(tree):
        if leaf.schema_type not in RETURNABLE or not leaf.codec.keeps_value:
            why = f"and an op cannot return a {leaf.schema_type.rstrip('?')}"
            raise place.refuse(
                annotation, why, "Return Tensors, numbers, None, or tuples or frozen dataclasses of these."
            )
    return tree
