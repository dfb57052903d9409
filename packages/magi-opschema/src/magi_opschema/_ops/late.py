# SPDX-License-Identifier: Apache-2.0
"""The fake and the gradient of an op, given after its definition and before its first use, as in torch.library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from magi_opschema._text import location
from magi_opschema.errors import RuleError

from .catalogue import OpDef, forms_of
from .fake import make_fake
from .formula import make_formula


F = TypeVar("F", bound=Callable[..., Any])


@overload
def register_fake(op: object, fn: F) -> F: ...
@overload
def register_fake(op: object, fn: None = None) -> Callable[[F], F]: ...
def register_fake(op: object, fn: F | None = None) -> Any:
    """Register the fake of *op*, like the option `infer_output_meta_fn`.

    Args:
        op: what the decorator returned, the OpOverload, or the name.
        fn: a function at the op's own signature that returns empty Tensors of the right shape, dtype, device and
            strides; without it, this is a decorator.

    Returns:
        *fn*.

    Raises:
        UnknownOpError: magi-opschema registered no such op.
        OptionError: *fn* does not take the op's arguments.
        RuleError: the op already has a fake of the user, or was called or traced before.
    """
    if fn is None:
        return lambda decorated: register_fake(op, decorated)
    for definition in forms_of(op):
        _give_fake(definition, fn)
    return fn


def _give_fake(definition: OpDef, fn: Callable[..., Any]) -> None:
    slot = definition.registration.fake
    fake = make_fake(definition.lowering, fn)
    if slot.given:
        raise RuleError(definition.lowering.sentence(_second("fake", slot.given, fn)))
    _refuse_used(definition, "fake", fn)
    adopted = slot.adopted(fn)
    slot.give(fake if adopted is fn else make_fake(definition.lowering, adopted), location(fn))


def register_autograd(op: object, backward: F, /, *, setup_context: Callable[..., None] | None = None) -> F:
    """Register the gradient of *op*, like the options `backward_fn` and `setup_context_fn`.

    Args:
        op: what the decorator returned, the OpOverload, or the name.
        backward: `backward(ctx, *grads)` returns one gradient for each parameter.
        setup_context: `setup_context(ctx, inputs, output)` saves on `ctx` what the backward needs.

    Returns:
        *backward*.

    Raises:
        UnknownOpError: magi-opschema registered no such op.
        OptionError: a function does not take these arguments, or the op writes into its arguments.
        RuleError: the op already has a gradient, or was called or traced before.
    """
    for definition in forms_of(op):
        _give_gradient(definition, setup_context, backward)
    return backward


def _give_gradient(definition: OpDef, setup_context: Callable[..., None] | None, backward: Callable[..., Any]) -> None:
    registration = definition.registration
    formula = make_formula(definition.lowering, setup_context, backward)
    if registration.formula is not None:
        earlier = location(registration.formula.backward_fn)
        raise RuleError(definition.lowering.sentence(_second("gradient", earlier, backward)))
    _refuse_used(definition, "gradient", backward)
    registration.give_formula(formula)


def _second(what: str, earlier: str, fn: Callable[..., Any]) -> str:
    return f"it has a {what} already ({earlier}); that of {location(fn)} would be a second. Keep one of them."


def _refuse_used(definition: OpDef, what: str, fn: Callable[..., Any]) -> None:
    if not definition.registration.fake.is_used:
        return
    text = (
        f"the {what} of {location(fn)} comes too late: the op was called or traced before, and what was compiled then"
    )
    fix = "Register it right after the definition, or give it to the decorator"
    raise RuleError(definition.lowering.sentence(f"{text} would not have it. {fix}."))
