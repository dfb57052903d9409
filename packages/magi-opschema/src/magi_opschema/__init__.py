# SPDX-License-Identifier: Apache-2.0
"""PyTorch custom ops with rich Python signatures, lowered once to a flat torch.library schema.

Public names are resolved at their first use, so `import magi_opschema` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from magi_opschema._lowering.signature import lower_signature as lower_signature

    from . import errors as errors
    from ._handles import ObjectHandle as ObjectHandle
    from ._handles import get_object as get_object
    from ._handles import register_object as register_object
    from ._handles import release_object as release_object
    from ._handles import see_through_object as see_through_object
    from ._model.lowering import SignatureLowering as SignatureLowering
    from ._ops.catalogue import OpDef as OpDef
    from ._ops.catalogue import annotate as annotate
    from ._ops.catalogue import op_def as op_def
    from ._ops.catalogue import opcheck as opcheck
    from ._ops.decorator import RegisteredOp as RegisteredOp
    from ._ops.decorator import magi_register_custom_op as magi_register_custom_op
    from ._ops.implementations import use_implementation as use_implementation
    from ._ops.rules import register_autocast as register_autocast
    from ._ops.rules import register_kernel as register_kernel
    from ._ops.rules import register_sharding as register_sharding
    from ._ops.rules import register_vmap as register_vmap
    from .errors import OpSchemaError as OpSchemaError

    get_runner, register_runner = get_object, register_object

_NAMES = {
    "errors": ("OpSchemaError",),
    "_handles": ("ObjectHandle", "get_object", "register_object", "release_object", "see_through_object"),
    "_lowering.signature": ("lower_signature",),
    "_model.lowering": ("SignatureLowering",),
    "_ops.catalogue": ("OpDef", "annotate", "op_def", "opcheck"),
    "_ops.decorator": ("RegisteredOp", "magi_register_custom_op"),
    "_ops.implementations": ("use_implementation",),
    "_ops.rules": ("register_autocast", "register_kernel", "register_sharding", "register_vmap"),
}
_HOMES = dict(sorted((name, home) for home, names in _NAMES.items() for name in names))

__all__ = list(_HOMES)

_OF_MAGI_COMPILER = {"get_runner": "get_object", "register_runner": "register_object"}


def __getattr__(name: str) -> object:
    ours = _OF_MAGI_COMPILER.get(name, name)
    if ours in _HOMES:
        value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[ours]}"), ours)
        globals()[name] = value
        return value
    if name in {"aten", "errors"}:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "aten", "errors"})
