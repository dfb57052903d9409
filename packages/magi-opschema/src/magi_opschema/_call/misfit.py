# SPDX-License-Identifier: Apache-2.0
"""Errors about calls that do not fit the signature.

The function that the decorator returns accepts any call, and detects the misfit itself; Python's own error would name
only the function. Plain values are not checked before a call, because the dispatcher converts each one itself. Only if
it refuses one are the values checked, so a call that succeeds pays nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from magi_opschema._codegen.functions import emit_unpack
from magi_opschema._codegen.refusals import rejections
from magi_opschema._codegen.source import compile_source
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import Argument, takes
from magi_opschema._model.show import show_signature
from magi_opschema._model.tree import Leaf
from magi_opschema._text import nearest
from magi_opschema._torch_compat import is_dynamo_compiling
from magi_opschema.errors import ArgumentError, OpSchemaError

from .bridge import Bridge


NOT_GIVEN = inspect.Parameter.empty
"""What a parameter of generated code holds if the caller gave no argument."""


@dataclass(frozen=True)
class CallForm:
    """The parameters that a call must fit."""

    lowering: SignatureLowering
    by_position: tuple[str, ...]
    by_name: tuple[str, ...]
    """Parameters that are given by name only."""
    required: frozenset[str]
    is_flat: bool

    @staticmethod
    def of_signature(lowering: SignatureLowering) -> CallForm:
        """The form of a call with the user's arguments."""
        return CallForm._of(lowering, lowering.parameters, is_flat=False)

    @staticmethod
    def of_schema(lowering: SignatureLowering) -> CallForm:
        """The form of a call with flat arguments."""
        return CallForm._of(lowering, lowering.arguments, is_flat=True)

    @staticmethod
    def _of(lowering: SignatureLowering, known: Sequence[Any], *, is_flat: bool) -> CallForm:
        return CallForm(
            lowering,
            tuple(one.name for one in known if not one.is_keyword_only),
            tuple(one.name for one in known if one.is_keyword_only),
            frozenset(one.name for one in known if not one.has_default),
            is_flat,
        )

    def check(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raise if a call with *args* and *kwargs* does not fit.

        Raises:
            ArgumentError: the call does not fit.
        """
        filled = self.by_position[: len(args)]
        names = self.by_position + self.by_name
        unused = [name for name in kwargs if name in filled or name not in names]
        missing = [name for name in names if name in self.required and name not in {*filled, *kwargs}]
        if unused or missing or len(args) > len(filled):
            self._refuse(missing, len(args) - len(filled), unused)

    def refuse(self, values: Sequence[object], extra: Sequence[object], unused: Mapping[str, object]) -> NoReturn:
        """Raise for a call. *values* has an entry for each parameter; *extra* and *unused* belong to none."""
        names = self.by_position + self.by_name
        missing = [name for name, value in zip(names, values, strict=True) if value is NOT_GIVEN]
        self._refuse(missing, len(extra), list(unused))

    def _refuse(self, missing: Sequence[str], extra: int, unused: Sequence[str]) -> NoReturn:
        names = self.by_position + self.by_name
        if unused and unused[0] in names:
            text = f"the call gives '{unused[0]}' twice, by position and by name."
        elif unused:
            # Dynamo traces this, and cannot trace the search for a name.
            hint = "" if is_dynamo_compiling() else nearest(unused[0], names)
            text = f"the call names '{unused[0]}', which is not a parameter.{hint}"
        elif extra:
            count = len(self.by_position)
            text = f"the call gives {count + extra} arguments by position, expected at most {count}."
        else:
            text = f"the call lacks {', '.join(repr(name) for name in missing)}."
        raise ArgumentError(self.lowering.sentence(f"{text} {self._shown()}"))

    def _shown(self) -> str:
        if self.is_flat:
            return f"The schema is {self.lowering.schema}."
        return f"The signature is {show_signature(self.lowering.name, self.lowering.signature)}."


def refusal_of_calls(lowering: SignatureLowering) -> Callable[..., NoReturn]:
    """The function that the exposed function calls if its call does not fit the signature."""

    def refuse(values: Sequence[object], extra: Sequence[object], unused: Mapping[str, object]) -> NoReturn:
        CallForm.of_signature(lowering).refuse(values, extra, unused)

    return refuse


_PACKAGE = str(Path(__file__).parents[1])
_OF_ANY_OP = ("Unknown keyword argument", "Argument '")
"""What torch's errors about a call begin with if they do not begin with the op's name."""
_REFUSED = re.compile(r"Expected a value of type '.*?' for argument '(\w+)'")


@dataclass(frozen=True)
class ErrorTranslation:
    """Turns the dispatcher's error about one op's arguments into this package's; every other error is left alone."""

    op_name: str
    lowering: SignatureLowering

    def of_flat(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise what *error* means for a call with flat arguments.

        Raises:
            ArgumentError: one of them has another type than the schema says, or there are too many, few or others.
        """
        names = [known.name for known in self.lowering.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if not self._is_about_arguments(error):
            if _may_be_of_a_repr(error):
                plain = [a for a in self.lowering.arguments if a.packing is None and a.name in given]
                self._refuse_first([a.leaves[0] for a in plain], [given[a.name] for a in plain], error)
            return
        if (argument := self._refused(error)) is None:
            form = CallForm.of_schema if self.lowering.path == "flattened" else CallForm.of_signature
            try:
                form(self.lowering).check(args, kwargs)
            except ArgumentError as misfit:
                raise misfit from error
            return
        if argument.packing is None:
            self._refuse(argument.leaves[0], given[argument.name], error)
        elif argument.packing.holds_values:
            unpack = compile_source(emit_unpack(self.lowering, argument))
            self._refuse_first(argument.leaves, unpack(**given), error)

    def of_values(self, error: Exception, *values: Any) -> None:
        """Raise what *error* means for a call of the exposed function with the user's arguments *values*.

        Raises:
            ArgumentError: one of their leaves has another type than the schema says.
        """
        is_certain = False
        if self._is_about_arguments(error):
            argument = self._refused(error)
            suspects = () if argument is None else argument.leaves
            is_certain = argument is not None and argument.packing is None
        elif _may_be_of_a_repr(error):
            suspects = self.lowering.leaves
        else:
            return
        names = [parameter.name for parameter in self.lowering.parameters]
        taken_apart = Bridge(self.lowering).leaves(**dict(zip(names, values, strict=True)))
        by_name = dict(zip((leaf.name for leaf in self.lowering.leaves), taken_apart, strict=True))
        if is_certain:
            self._refuse(suspects[0], by_name[suspects[0].name], error)
        self._refuse_first(suspects, [by_name[leaf.name] for leaf in suspects], error)

    def _is_about_arguments(self, error: Exception) -> bool:
        """True if *error* was raised by the conversion of arguments, which comes before every kernel."""
        text = str(error)
        return text.startswith((f"{self.op_name}() ", *_OF_ANY_OP)) and f"{self.op_name}(" in text

    def _refused(self, error: Exception) -> Argument | None:
        found = _REFUSED.search(str(error).partition("\n")[0])
        return next((a for a in self.lowering.arguments if found is not None and a.name == found[1]), None)

    def _refuse_first(self, leaves: Sequence[Leaf], values: Sequence[Any], error: Exception) -> None:
        for leaf, value in zip(leaves, values, strict=False):
            if not takes(leaf.schema_type, value):
                self._refuse(leaf, value, error)

    def _refuse(self, leaf: Leaf, value: Any, error: Exception) -> None:
        try:
            rejections(self.lowering.title, self.lowering.location)(leaf)(value)
        except OpSchemaError as refusal:
            raise refusal from error


def _may_be_of_a_repr(error: Exception) -> bool:
    """True unless *error*, caught where the op was called, comes from a kernel of this package.

    The dispatcher shows the value that it refuses; if the value's `__repr__` fails, the call raises that error. The
    exposed function itself raises an error if it cannot bump the version of a value that is not a Tensor.
    """
    assert error.__traceback__ is not None
    below = error.__traceback__.tb_next
    return below is None or not below.tb_frame.f_code.co_filename.startswith(("<magi_opschema ", _PACKAGE))
