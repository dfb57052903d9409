# SPDX-License-Identifier: Apache-2.0
"""PyTorch custom ops with rich Python signatures, lowered once to a flat torch.library schema.

Public names are resolved at their first use, so that `import magi_opschema` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from . import errors as errors
    from ._decorator import magi_register_custom_op as magi_register_custom_op
    from ._handle_registry import get_object as get_object
    from ._handle_registry import register_object as register_object
    from ._handle_registry import release_object as release_object
    from ._handles import ObjectHandle as ObjectHandle
    from ._lower_signature import lower_signature as lower_signature
    from ._lowering import SignatureLowering as SignatureLowering
    from ._op_def import OpDef as OpDef
    from ._op_def import annotate as annotate
    from ._op_def import op_def as op_def
    from ._opcheck import opcheck as opcheck
    from ._rules import (
        register_autocast as register_autocast,
    )
    from ._rules import (
        register_kernel as register_kernel,
    )
    from ._rules import (
        register_sharding as register_sharding,
    )
    from ._rules import (
        register_vmap as register_vmap,
    )
    from .errors import OpSchemaError as OpSchemaError

_HOMES = {
    "ObjectHandle": "_handles",
    "OpDef": "_op_def",
    "OpSchemaError": "errors",
    "SignatureLowering": "_lowering",
    "annotate": "_op_def",
    "get_object": "_handle_registry",
    "lower_signature": "_lower_signature",
    "magi_register_custom_op": "_decorator",
    "op_def": "_op_def",
    "opcheck": "_opcheck",
    "register_autocast": "_rules",
    "register_kernel": "_rules",
    "register_object": "_handle_registry",
    "register_sharding": "_rules",
    "register_vmap": "_rules",
    "release_object": "_handle_registry",
}

__all__ = [
    "ObjectHandle",
    "OpDef",
    "OpSchemaError",
    "SignatureLowering",
    "annotate",
    "get_object",
    "lower_signature",
    "magi_register_custom_op",
    "op_def",
    "opcheck",
    "register_autocast",
    "register_kernel",
    "register_object",
    "register_sharding",
    "register_vmap",
    "release_object",
]


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
