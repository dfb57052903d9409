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

from magi_opschema._codegen.functions import compile_unpack
from magi_opschema._codegen.source import rejection
from magi_opschema._model.lowering import Parameter, SignatureLowering, show_signature
from magi_opschema._model.schema import Argument, takes
from magi_opschema._text import nearest
from magi_opschema._torch_compat import is_dynamo_compiling
from magi_opschema.errors import ArgumentError, OpSchemaError

from .bridge import Bridge


def check_call(
    lowering: SignatureLowering, args: Sequence[object], kwargs: Mapping[str, object], *, is_flat: bool = False
) -> None:
    """Raise an ArgumentError if *args* and *kwargs* do not fit the signature; with *is_flat*, if not the schema."""
    known: Sequence[Parameter | Argument] = lowering.arguments if is_flat else lowering.parameters
    by_position, names = _names(known)
    filled = by_position[: len(args)]
    unused = [name for name in kwargs if name in filled or name not in names]
    missing = [one.name for one in known if not one.has_default and one.name not in {*filled, *kwargs}]
    if unused or missing or len(args) > len(filled):
        shown = f"The schema is {lowering.schema}." if is_flat else _shown(lowering)
        raise ArgumentError(lowering.sentence(f"{_why(known, missing, len(args) - len(filled), unused)} {shown}"))


def refusal_of_calls(lowering: SignatureLowering) -> Callable[..., NoReturn]:
    """The function that the exposed function calls if its call does not fit the signature.

    It takes what each parameter holds, `Parameter.empty` if the caller gave nothing, and the arguments by position and
    by name that belong to none.
    """

    def refuse(values: Sequence[object], extra: Sequence[object], unused: Mapping[str, object]) -> NoReturn:
        known = lowering.parameters
        missing = [one.name for one, value in zip(known, values, strict=True) if value is inspect.Parameter.empty]
        why = _why(known, missing, len(extra), list(unused))
        raise ArgumentError(lowering.sentence(f"{why} {_shown(lowering)}"))

    return refuse


def _names(known: Sequence[Parameter | Argument]) -> tuple[list[str], list[str]]:
    """The names of *known* that can be given by position, and all names."""
    return [one.name for one in known if not one.is_keyword_only], [one.name for one in known]


def _why(known: Sequence[Parameter | Argument], missing: Sequence[str], extra: int, unused: Sequence[str]) -> str:
    by_position, names = _names(known)
    if unused and unused[0] in names:
        return f"the call gives '{unused[0]}' twice, by position and by name."
    if unused:
        # Dynamo traces this, and cannot trace the search for a name.
        hint = "" if is_dynamo_compiling() else nearest(unused[0], names)
        return f"the call names '{unused[0]}', which is not a parameter.{hint}"
    if extra:
        count = len(by_position)
        return f"the call gives {count + extra} arguments by position, expected at most {count}."
    return f"the call lacks {', '.join(repr(name) for name in missing)}."


def _shown(lowering: SignatureLowering) -> str:
    return f"The signature is {show_signature(lowering.name, lowering.signature)}."


_PACKAGE = str(Path(__file__).parents[1])
_OF_ANY_OP = ("Unknown keyword argument", "Argument '")
"""What torch's errors about a call begin with if they do not begin with the op's name."""
_REFUSED = re.compile(r"Expected a value of type '.*?' for argument '(\w+)'")


@dataclass(frozen=True)
class ErrorTranslation:
    """Turns the dispatcher's error about one op's arguments into this package's; every other error is left alone."""

    lowering: SignatureLowering

    def of_flat(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an ArgumentError if *error*, of a call with flat arguments, is about them."""
        known = self.lowering.arguments
        given = dict(zip((argument.name for argument in known), args, strict=False)) | kwargs
        is_certain = False
        if self._is_about_arguments(error):
            found = _REFUSED.search(str(error).partition("\n")[0])
            suspects = [argument for argument in known if found is not None and argument.name == found[1]]
            if not suspects:
                try:
                    check_call(self.lowering, args, kwargs, is_flat=self.lowering.path == "flattened")
                except ArgumentError as misfit:
                    raise misfit from error
            is_certain = any(argument.packing is None for argument in suspects)
        elif _may_be_of_a_repr(error):
            suspects = [argument for argument in known if argument.name in given]
        else:
            return
        for argument in suspects:
            for leaf, value in zip(argument.leaves, self._leaf_values(argument, given), strict=False):
                if is_certain or not takes(leaf.schema_type, value):
                    try:
                        rejection(self.lowering, leaf)(value)
                    except OpSchemaError as refusal:
                        raise refusal from error

    def of_values(self, error: Exception, *values: Any) -> None:
        """Raise an ArgumentError if *error*, of a call with the user's arguments *values*, is about one of these."""
        if self._is_about_arguments(error) or _may_be_of_a_repr(error):
            names = [parameter.name for parameter in self.lowering.parameters]
            self.of_flat(error, Bridge(self.lowering).flatten(**dict(zip(names, values, strict=True))), {})

    def _leaf_values(self, argument: Argument, given: dict[str, Any]) -> Sequence[Any]:
        """The values of the leaves that *argument* holds; none if one that says where they are is not given."""
        if argument.packing is None:
            return (given[argument.name],)
        is_whole = argument.packing.holds_values and len(given) == len(self.lowering.arguments)
        return compile_unpack(self.lowering, argument)(**given) if is_whole else ()

    def _is_about_arguments(self, error: Exception) -> bool:
        """True if *error* was raised by the conversion of arguments, which comes before every kernel."""
        text = str(error)
        return text.startswith((f"{self.lowering.title}() ", *_OF_ANY_OP)) and f"{self.lowering.title}(" in text


def _may_be_of_a_repr(error: Exception) -> bool:
    """True unless *error*, caught where the op was called, comes from a kernel of this package.

    The dispatcher shows the value that it refuses; if the value's `__repr__` fails, the call raises that error. The
    exposed function itself raises an error if it cannot bump the version of a value that is not a Tensor.
    """
    assert error.__traceback__ is not None
    below = error.__traceback__.tb_next
    return below is None or not below.tb_frame.f_code.co_filename.startswith(("<magi_opschema ", _PACKAGE))
