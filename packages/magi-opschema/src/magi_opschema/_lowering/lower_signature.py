# SPDX-License-Identifier: Apache-2.0
"""From a function to its `SignatureLowering`, without registering anything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from magi_opschema._model.lowering import SignatureLowering


def lower_signature(fn: Callable[..., Any], *, mutates_args: Iterable[str] = ()) -> SignatureLowering:
    """Lower the signature of *fn* to a flat schema. Nothing is registered.

    Args:
        fn: a function with an annotation for each parameter and for the return value.
        mutates_args: what the op writes into: parameter names (a record means all its Tensor leaves),
            dotted leaf paths (`"cfg.out"`) or flat names (`"cfg__out"`).

    Raises:
        SignatureError: a parameter or the return value has no flat form; all such places are in the message.
        OptionError: *mutates_args* names nothing, or nothing that can be written into; or *fn* is not a function.
        DuplicateOpError: *fn* is an op already.

    Example:
        >>> from torch import Tensor
        >>> def scale(x: Tensor, factor: float = 2.0) -> Tensor: ...
        >>> lower_signature(scale).schema
        'scale(Tensor x, float factor=2.0) -> Tensor'
    """
    from magi_opschema._environment import refuse_unknown_variables

    from .annotations import scope_of
    from .candidates import refuse_other_than_functions
    from .signature import lower_signature_in

    refuse_unknown_variables()
    refuse_other_than_functions(fn)
    return lower_signature_in(fn, scope_of(fn, sys._getframe(1)), mutates_args)  # noqa: SLF001
