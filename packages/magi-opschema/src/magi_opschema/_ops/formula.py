# SPDX-License-Identifier: Apache-2.0
"""The gradient functions that a user gave, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from magi_opschema._autograd.functions import Formula
from magi_opschema._call.structure import gradient_names
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema.errors import OptionError

from .callables import check_callable


def make_formula(
    lowering: SignatureLowering, setup_context_fn: Callable[..., None] | None, backward_fn: Callable[..., Any] | None
) -> Formula | None:
    """The two functions as one value; None if no backward is given.

    Raises:
        OptionError: they do not fit the op, or such an op has no gradient.
    """
    if backward_fn is None:
        if setup_context_fn is not None:
            text = "setup_context_fn saves for a backward_fn, and there is none. Give one."
            raise OptionError(lowering.sentence(text))
        return None
    if lowering.mutated:
        names = ", ".join(f"'{argument.name}'" for argument in lowering.mutated)
        text = f"backward_fn together with mutates_args ({names}): the gradient of an op that writes into its arguments"
        raise OptionError(lowering.sentence(f"{text} is not defined. Return new Tensors instead."))
    if setup_context_fn is not None:
        check_callable(lowering, "setup_context_fn", setup_context_fn, ("ctx", "inputs", "output"))
    check_callable(lowering, "backward_fn", backward_fn, ("ctx", *gradient_names(lowering.returns)))
    return Formula(setup_context_fn, backward_fn)
