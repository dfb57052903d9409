# SPDX-License-Identifier: Apache-2.0
"""Where an annotation is in a signature, and how one is refused there."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field

from magi_opschema._model.tree import IDENTITY, Codec, Leaf, Path, dotted, flat_name
from magi_opschema._text import show_type
from magi_opschema.errors import Problem

from .annotations import Scope, evaluate


class Refused(Exception):  # noqa: N818  (it never leaves this package)
    """Annotations have no flat form; *problems* say which ones, why, and what to do."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems


@dataclass(frozen=True)
class Place:
    """Where an annotation is in the signature that is lowered."""

    path: Path
    scope: Scope
    subject: str
    """`parameter` or `return value`."""
    is_optional: bool = False
    """Whether it is below a `Record | None`, where every leaf may be None."""
    bound: typing.Mapping[object, object] = field(default_factory=dict)
    """What type variables stand for at this place."""
    outer: tuple[object, ...] = ()
    """The records around it, which must not occur in it again; a generic class may, with another argument."""
    is_fixed: bool = False
    """Whether it is inside an object that is taken apart."""
    is_opaque: bool = False
    """Whether an object is not taken apart here: among the items of a list, and in the opaque form of an op."""

    def below(self, name: str, scope: Scope | None = None) -> Place:
        # This is called for every leaf, and `dataclasses.replace` takes four times as long.
        path, scope = (*self.path, name), scope or self.scope
        inherited = (self.subject, self.is_optional, self.bound, self.outer, self.is_fixed, self.is_opaque)
        return Place(path, scope, *inherited)

    def refuse(self, annotation: object, why: str, fix: str) -> Refused:
        of = f"{self.subject} '{dotted(self.path)}'" if self.path else self.subject
        return Refused(Problem(dotted(self.path), f"{of} has type {show_type(annotation)}, {why}. {fix}"))

    def leaf(self, schema_type: str, codec: Codec = IDENTITY) -> Leaf:
        is_padded = self.is_optional and not schema_type.endswith("?")
        text = f"{schema_type}?" if is_padded else schema_type
        return Leaf(self.path, text, flat_name(self.path), codec, is_padded, self.is_fixed)

    def evaluated(self, annotation: object) -> object:
        """*annotation*, evaluated if it is a string.

        Raises:
            Refused: it cannot be evaluated.
        """
        try:
            return evaluate(annotation, self.scope)
        except Exception as error:  # noqa: BLE001  (a string annotation is an expression, which may raise anything)
            text = annotation if isinstance(annotation, str) else show_type(annotation)
            why = error.msg if isinstance(error, SyntaxError) else error
            sentence = (
                f"the annotation '{text}' of {self.subject} '{dotted(self.path)}' could not be evaluated: {why}. "
                "Import what it names where the op is defined, also at run time, not only under TYPE_CHECKING."
            )
            raise Refused(Problem(dotted(self.path), sentence)) from None
