# SPDX-License-Identifier: Apache-2.0
"""Translates the dispatcher's error about the arguments of a call into one about the user's signature.

Plain values are not checked before a call, because the dispatcher converts each one itself. Only if it refuses one are
the values checked, so a call that succeeds pays nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi_opschema._codegen.functions import emit_unpack
from magi_opschema._codegen.reject import rejections
from magi_opschema._codegen.source import compile_source
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import Argument, takes
from magi_opschema._model.tree import Leaf
from magi_opschema.errors import ArgumentError, OpSchemaError

from .bridge import Bridge
from .misfit import CallForm


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
