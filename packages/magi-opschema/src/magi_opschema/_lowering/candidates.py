# SPDX-License-Identifier: Apache-2.0
"""Which objects can become an op."""

from __future__ import annotations

from magi_opschema._text import location, show_value
from magi_opschema._torch_compat import CustomOpDef, OpOverload, OpOverloadPacket
from magi_opschema.errors import DuplicateOpError, OptionError


TORCH_OP_ATTRIBUTE = "_magi_torch_registered_op"
"""The attribute with the OpOverload of what the decorator returned."""


def refuse_other_than_functions(fn: object) -> None:
    """Raise if *fn* cannot become an op, because it is one already or because it has no signature."""
    if hasattr(fn, TORCH_OP_ATTRIBUTE) or isinstance(fn, (OpOverload, OpOverloadPacket)):
        described = getattr(fn, "__qualname__", None) or str(fn)
        raise DuplicateOpError(
            f"{described} is an op already. Decorate a function once; op_def(op).fn is the plain function."
        )
    if isinstance(fn, CustomOpDef):
        raise DuplicateOpError(f"{fn} was registered by torch.library.custom_op. Take that decorator off.")
    if isinstance(fn, (staticmethod, classmethod)):
        kind = type(fn).__name__
        fix = "Put it above this decorator." if kind == "staticmethod" else "Use a static method: an op has no class."
        raise OptionError(f"{fn.__func__.__qualname__} is a {kind} already. {fix} ({location(fn.__func__)})")
    if not hasattr(fn, "__code__"):
        raise OptionError(
            f"{show_value(fn)} is not a Python function. Wrap it in one whose parameters have annotations."
        )
