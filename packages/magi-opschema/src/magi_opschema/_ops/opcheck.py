# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck at the user's signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from magi_opschema._call.misfit import CallForm
from magi_opschema._text import show_with_type
from magi_opschema.errors import ArgumentError

from .catalogue import op_def


def opcheck(op: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, **options: Any) -> dict[str, str]:
    """Test that *op* is registered correctly, with the arguments that a user would pass.

    Args:
        op: what the decorator returned, the OpOverload, or the name.
        args: positional arguments at the user's signature.
        kwargs: keyword arguments at the user's signature.
        options: passed to torch.library.opcheck, such as `test_utils`, `atol` and `rtol`.

    Returns:
        What torch.library.opcheck returns: "SUCCESS" by the name of each test.

    Raises:
        torch.testing._internal.optests.OpCheckError: a test failed.
        UnknownOpError: magi-opschema registered no such op.
        ArgumentError: the op cannot be called with these arguments.

    Example:
        >>> from torch import Tensor
        >>> @magi_register_custom_op("doc::negate")
        ... def negate(x: Tensor) -> Tensor:
        ...     return -x
        >>> sorted(set(opcheck(negate, (torch.ones(2),)).values()))
        ['SUCCESS']
    """
    definition = op_def(op)
    lowering = definition.lowering
    given: object = kwargs
    if given is not None and not isinstance(given, Mapping):
        text = f"opcheck takes the keyword arguments as a dict, and got {show_with_type(given)}."
        raise ArgumentError(lowering.sentence(text))
    kwargs = dict(kwargs or {})
    if not isinstance(args, (tuple, list)):
        text = f"opcheck takes the arguments as a tuple, and got a {type(args).__name__}. Write opcheck(op, (x,))."
        raise ArgumentError(lowering.sentence(text))
    CallForm.of_signature(lowering).check(args, kwargs)
    if definition.path == "flattened":
        from magi_opschema._call.bridge import Bridge

        args, kwargs = Bridge(lowering).flatten(*args, **kwargs), {}
    return torch.library.opcheck(definition.torch_op, tuple(args), kwargs, **options)
