# SPDX-License-Identifier: Apache-2.0
"""What generated code calls when the dispatcher refuses the arguments of an exposed function."""

from __future__ import annotations

from typing import Any

from magi_opschema._call.translation import ErrorTranslation

from .catalogue import op_def


def translate_error(error: Exception, torch_op: object, *values: Any) -> None:
    """Raise what *error* means for a call of an op's exposed function with the user's arguments *values*.

    Generated code calls this one function for every op, because compile caches identify a function by its name.
    """
    definition = op_def(torch_op)
    if definition.torch_op is not torch_op:
        return  # another op has its name now, and the error is about the arguments of that one
    ErrorTranslation(definition.name, definition.lowering).of_values(error, *values)
