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
    from ._handles.declared import see_through_object as see_through_object
    from ._handles.handle import ObjectHandle as ObjectHandle
    from ._handles.handle import get_object as get_object
    from ._handles.handle import register_object as register_object
    from ._handles.handle import release_object as release_object
    from ._model.lowering import SignatureLowering as SignatureLowering
    from ._ops.catalogue import OpDef as OpDef
    from ._ops.catalogue import annotate as annotate
    from ._ops.catalogue import op_def as op_def
    from ._ops.catalogue import opcheck as opcheck
    from ._ops.decorator import RegisteredOp as RegisteredOp
    from ._ops.decorator import magi_register_custom_op as magi_register_custom_op
    from ._ops.rules import register_autocast as register_autocast
    from ._ops.rules import register_kernel as register_kernel
    from ._ops.rules import register_sharding as register_sharding
    from ._ops.rules import register_vmap as register_vmap
    from .errors import OpSchemaError as OpSchemaError

_HOMES = {
    "ObjectHandle": "_handles.handle",
    "OpDef": "_ops.catalogue",
    "OpSchemaError": "errors",
    "RegisteredOp": "_ops.decorator",
    "SignatureLowering": "_model.lowering",
    "annotate": "_ops.catalogue",
    "get_object": "_handles.handle",
    "lower_signature": "_lowering.signature",
    "magi_register_custom_op": "_ops.decorator",
    "op_def": "_ops.catalogue",
    "opcheck": "_ops.catalogue",
    "register_autocast": "_ops.rules",
    "register_kernel": "_ops.rules",
    "register_object": "_handles.handle",
    "register_sharding": "_ops.rules",
    "register_vmap": "_ops.rules",
    "release_object": "_handles.handle",
    "see_through_object": "_handles.declared",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name in {"aten", "errors"}:
        return importlib.import_module(f"{__name__}.{name}")
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "aten", "errors"})
