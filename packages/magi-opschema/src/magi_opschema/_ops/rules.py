# SPDX-License-Identifier: Apache-2.0
"""What can be added to an op after its definition: fake, gradient, bodies, vmap, autocast, sharding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from magi_opschema._call.bridge import Bridge
from magi_opschema._model.tree import Leaf
from magi_opschema._text import location, show_value, show_with_type
from magi_opschema._torch_compat import dispatch_key_of
from magi_opschema.errors import RuleError

from .catalogue import OpDef, forms_of
from .fake import check_callable, make_fake, make_formula


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
        slot = definition.registration.fake
        fake = make_fake(definition.lowering, fn)
        _refuse_second(definition, "fake", slot.given, fn)
        adopted = slot.adopted(fn)
        slot.give(fake if adopted is fn else make_fake(definition.lowering, adopted), location(fn))
    return fn


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
        earlier = definition.registration.formula
        formula = make_formula(definition.lowering, setup_context, backward)
        _refuse_second(definition, "gradient", "" if earlier is None else location(earlier.backward_fn), backward)
        definition.registration.formula = formula
    return backward


def _refuse_second(definition: OpDef, what: str, earlier: str, fn: Callable[..., Any]) -> None:
    """Raise if the op has *earlier*, or was used, so that *fn* can no longer be its *what*."""
    if earlier:
        text = f"it has a {what} already ({earlier}); that of {location(fn)} would be a second. Keep one of them."
        raise RuleError(definition.lowering.sentence(text))
    if definition.registration.fake.is_used:
        text = f"the {what} of {location(fn)} comes too late: the op was called or traced before, and what was compiled"
        fix = "Register it right after the definition, or give it to the decorator"
        raise RuleError(definition.lowering.sentence(f"{text} then would not have it. {fix}."))


@overload
def register_kernel(op: object, device_type: str, fn: F) -> F: ...
@overload
def register_kernel(op: object, device_type: str, fn: None = None) -> Callable[[F], F]: ...
def register_kernel(op: object, device_type: str, fn: F | None = None) -> Any:
    """Register another body of *op* for one device type, for example plain PyTorch on "cpu" besides Triton on "cuda".

    Args:
        op: what the decorator returned, the OpOverload, or the name.
        device_type: "cpu", "cuda", "xpu", …: the device of the op's Tensor arguments.
        fn: the body, at the op's own signature; without it, this is a decorator.

    Returns:
        *fn*.

    Raises:
        UnknownOpError: magi-opschema registered no such op.
        RuleError: *fn* has other parameters than the op, or there is already a body for this device type.

    Example:
        >>> from torch import Tensor
        >>> @magi_register_custom_op("doc::plus_one")
        ... def plus_one(x: Tensor) -> Tensor:
        ...     raise NotImplementedError("launches a kernel")
        >>> @register_kernel(plus_one, "cpu")
        ... def plus_one_cpu(x: Tensor) -> Tensor:
        ...     return x + 1
        >>> plus_one(torch.zeros(1))
        tensor([1.])
    """
    if fn is None:
        return lambda decorated: register_kernel(op, device_type, decorated)
    for definition in forms_of(op):
        _check_parameters(definition, fn)
        registration, key = definition.registration, _dispatch_key(definition, device_type)
        if key in registration.device_keys:
            text = f"it has a body for '{device_type}' already; {fn.__name__} ({location(fn)}) would be a second."
            raise RuleError(definition.lowering.sentence(text))
        registration.add_body(fn, key)
    return fn


def _check_parameters(definition: OpDef, fn: Callable[..., Any]) -> None:
    if not callable(fn):
        raise RuleError(definition.lowering.sentence(f"the body is {show_with_type(fn)}, expected a function."))
    expected = list(definition.lowering.signature.parameters)
    try:
        given = list(inspect.signature(fn).parameters)
    except ValueError:
        text = f"the body is {show_with_type(fn)}, which does not say what it takes. Wrap it in a function."
        raise RuleError(definition.lowering.sentence(text)) from None
    if expected != given:
        text = f"the body takes ({', '.join(given)}), expected ({', '.join(expected)})"
        raise RuleError(definition.lowering.sentence(f"{text}. Give {location(fn)} the op's signature."))


def _dispatch_key(definition: OpDef, device_type: str) -> str:
    try:
        return dispatch_key_of(device_type)
    except (RuntimeError, TypeError) as error:
        text = f"{show_value(device_type)} is not a device type of torch. Use 'cpu', 'cuda' or another."
        raise RuleError(definition.lowering.sentence(text)) from error


@overload
def register_vmap(op: object, rule: F) -> F: ...
@overload
def register_vmap(op: object, rule: None = None) -> Callable[[F], F]: ...
def register_vmap(op: object, rule: F | None = None) -> Any:
    """Register a rule of *op* for torch.vmap. Without one, the op is called once for each element of the batch.

    Args:
        op: what the decorator returned, the OpOverload, or the name.
        rule: `rule(info, in_dims, *args) -> (output, out_dims)`. *args* are the user's arguments, with the batch
            dimension in their Tensors; *in_dims* has one entry for each parameter, a dict by field for a record,
            None if there is no batch dimension; *out_dims* has the structure of the output, or is one dimension for
            all. `info.batch_size` is the size of the batch. Without it, this is a decorator.

    Returns:
        *rule*.

    Raises:
        UnknownOpError: magi-opschema registered no such op.
        RuleError: *rule* does not take these arguments; at a call, if its *out_dims* do not fit the output.

    Example:
        >>> from torch import Tensor
        >>> @magi_register_custom_op("doc::double")
        ... def double(x: Tensor) -> Tensor:
        ...     return x * 2
        >>> @register_vmap(double)
        ... def double_vmap(info, in_dims, x):
        ...     return double(x), in_dims[0]
        >>> torch.vmap(double)(torch.ones(3, 2)).shape
        torch.Size([3, 2])
    """
    if rule is None:
        return lambda decorated: register_vmap(op, decorated)
    for definition in forms_of(op):
        _give_vmap_rule(definition, rule)
    return rule


def _give_vmap_rule(definition: OpDef, rule: Callable[..., Any]) -> None:
    called_with = ("info", "in_dims", *definition.lowering.signature.parameters)
    check_callable(definition.lowering, "rule", rule, called_with, error=RuleError)
    bridge = Bridge(definition.lowering)

    def flat_rule(info: Any, in_dims: Any, *flat: Any) -> tuple[Any, Any]:
        output, out_dims = rule(info, bridge.per_parameter(in_dims), *bridge.rebuild(*flat))
        return bridge.flatten_output(output), tuple(bridge.per_output(out_dims, "the vmap rule's out_dims"))

    definition.registration.vmap_rule = flat_rule


def register_autocast(op: object, device_type: str, dtype: torch.dtype) -> None:
    """Under `torch.autocast(device_type)`, cast the floating-point Tensors among *op*'s arguments to *dtype*.

    Raises:
        UnknownOpError: magi-opschema registered no such op.
        RuleError: torch has no such device type, or *dtype* is not a floating-point dtype.
    """
    wanted: object = dtype
    for definition in forms_of(op):
        _dispatch_key(definition, device_type)
        if not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
            text = f"autocast casts to {show_value(wanted)}, expected a dtype of floating-point numbers"
            raise RuleError(definition.lowering.sentence(f"{text}, such as torch.bfloat16."))
        definition.registration.add_autocast(device_type, dtype)


@overload
def register_sharding(op: object, rule: F) -> F: ...
@overload
def register_sharding(op: object, rule: None = None) -> Callable[[F], F]: ...
def register_sharding(op: object, rule: F | None = None) -> Any:
    """Register the acceptable shardings of *op*, so that it accepts DTensors.

    Args:
        op: what the decorator returned, the OpOverload, or the name.
        rule: `rule(*args)` returns a list of (output placements, input placements) for one mesh dimension. In *args*
            a DTensorSpec stands for each Tensor. Output placements have the structure of the output; input placements
            one entry for each parameter, a dict by field for a record, None for what is not a Tensor.
            Without it, this is a decorator.

    Returns:
        *rule*.

    Raises:
        UnknownOpError: magi-opschema registered no such op.
        RuleError: *rule* does not take these arguments; at a call, if placements do not fit the signature.
    """
    if rule is None:
        return lambda decorated: register_sharding(op, decorated)
    for definition in forms_of(op):
        _give_sharding_rule(definition, rule)
    return rule


def _give_sharding_rule(definition: OpDef, rule: Callable[..., Any]) -> None:
    from torch.distributed.tensor.experimental import register_sharding as register_with_dtensor

    check_callable(definition.lowering, "rule", rule, definition.lowering.signature.parameters, error=RuleError)
    bridge, layout = Bridge(definition.lowering), definition.lowering.layout
    is_single = isinstance(definition.lowering.returns, Leaf)

    def flat_rule(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        acceptable = rule(*bridge.rebuild(*layout.fill(args, kwargs)))
        return [
            (
                # For an op with one output, torch's own rules return [Shard(0)].
                outputs if is_single and isinstance(outputs, list) else bridge.per_output(outputs, "output placements"),
                bridge.per_argument(inputs, "input placements"),
            )
            for outputs, inputs in acceptable
        ]

    register_with_dtensor(definition.torch_op)(flat_rule)
