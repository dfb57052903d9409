# SPDX-License-Identifier: Apache-2.0
"""What a user gives to an op, with the definition or afterwards: fake, gradient, bodies, vmap, autocast, sharding.

A fake is a function at the user's signature, or made from names of inputs, or from the order of inputs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import torch

from magi_opschema._autograd import Formula
from magi_opschema._call.bridge import Bridge, gradient_names
from magi_opschema._codegen.functions import compile_refusals, compile_twin
from magi_opschema._codegen.source import compile_at_first_call
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import as_output, tensors_in
from magi_opschema._model.tree import Leaf, dotted
from magi_opschema._text import location, nearest, show_value, show_with_type
from magi_opschema._torch_compat import dispatch_key_of, storage_id
from magi_opschema.errors import OpSchemaError, OptionError, RuleError

from .catalogue import OpDef, forms_of


F = TypeVar("F", bound=Callable[..., Any])


def check_callable(
    lowering: SignatureLowering,
    option: str,
    fn: object,
    positional: Iterable[str],
    keywords: Iterable[str] = (),
    error: type[OpSchemaError] = OptionError,
) -> None:
    """Raise an *error* if *fn*, the value of *option*, is not a function that accepts these arguments."""
    if not callable(fn):
        raise error(lowering.sentence(f"{option} is {show_with_type(fn)}, expected a function."))
    names, by_name = list(positional), list(keywords)
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(*names, **dict.fromkeys(by_name))
    except TypeError as unfit:
        called = ", ".join([*names, *(f"{name}={name}" for name in by_name)])
        text = f"{option} is called as {option}({called}), which {location(fn)} does not take: {unfit}."
        raise error(lowering.sentence(text)) from None


def make_formula(
    lowering: SignatureLowering, setup_context_fn: Callable[..., None] | None, backward_fn: Callable[..., Any] | None
) -> Formula | None:
    """The two functions as one value; None if no backward is given. It raises an OptionError if they do not fit."""
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


FakeSpec = Callable[..., Any] | Sequence[str] | None


class FakeSlot:
    """The fake of one op, which can be replaced until the op's first use.

    Attributes:
        fake: the fake at the flat signature.
        adopt: what a default of a library makes of a fake that the user gives; None for other fakes.
        runs_body: whether it runs the op's body on fake tensors.
        given: where the user gave it, the name of an option or the place of a function; empty for a default.
        is_used: whether the op was called or traced.
    """

    def __init__(self, fake: Callable[..., Any], spec: FakeSpec) -> None:
        self.is_used = False
        self.fake = fake
        self.adopt: Callable[[Callable[..., Any]], Callable[..., Any]] | None = getattr(spec, "adopt_fake", None)
        self.runs_body = getattr(spec, "runs_body", False)
        self.given = "" if spec is None or self.adopt is not None else "infer_output_meta_fn"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fake, and return its outputs without shared memory."""
        self.is_used = True
        output = self.fake(*args, **kwargs)
        taken = {storage_id(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        return _apart(output, taken)


def _apart(output: Any, taken: set[int]) -> Any:
    """*output* with a new Tensor for each that shares memory with an earlier one.

    A fake may return its argument, or one Tensor twice, to show what outputs look like. A tracer identifies Tensors by
    identity, and would silently mix them up.
    """
    if isinstance(output, (tuple, list)):
        return type(output)([_apart(item, taken) for item in output])
    if not isinstance(output, torch.Tensor):
        return output
    if storage_id(output) in taken:
        if output.layout is not torch.strided:
            return torch.empty_like(output)
        return torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device)
    taken.add(storage_id(output))
    return output


def make_fake(lowering: SignatureLowering, spec: FakeSpec) -> Callable[..., Any]:
    """The fake at the flat signature.

    *spec* is a function at the user's signature; or for each output the parameter or leaf path of the Tensor it looks
    like (shape, dtype, device, and strides as in torch.empty_like); or None, for which output i looks like Tensor
    input i.

    Raises:
        OptionError: *spec* does not fit the signature.
    """
    if callable(spec):
        by_name = [parameter.name for parameter in lowering.parameters if parameter.is_keyword_only]
        by_position = [parameter.name for parameter in lowering.parameters if not parameter.is_keyword_only]
        check_callable(lowering, "infer_output_meta_fn", spec, by_position, by_name)
        # It is compiled at its first use, because many ops of a library are never traced.
        return compile_at_first_call(functools.partial(compile_twin, lowering, spec, "fake"))
    return _like_inputs(lowering, sources_of(lowering, spec))


def sources_of(lowering: SignatureLowering, names: Sequence[str] | None) -> list[Leaf]:
    """The input leaf that each output looks like."""
    outputs = lowering.return_leaves
    for output in outputs:
        if not output.is_tensor:
            text = f"'{dotted(output.path)}' is a {output.schema_type}, which looks like no Tensor input"
            raise _wrong(lowering, f"{text}. Pass a function")
    tensors = [leaf for leaf in lowering.leaves if leaf.is_tensor]
    if names is not None:
        sources = _named(lowering, tensors, names)
    elif len(outputs) > len(tensors):
        text = f"there are {len(outputs)} outputs and {len(tensors)} Tensor inputs, so output i cannot look like input"
        raise _wrong(lowering, f"{text} i. Pass a function, or names")
    else:
        sources = tensors[: len(outputs)]
    for output, source in zip(outputs, sources, strict=True):
        if output.is_list is not source.is_list:
            text = f"'{dotted(output.path)}' and '{dotted(source.path)}' are not both lists"
            raise _wrong(lowering, f"{text}. Pass a function")
    return sources


def _named(lowering: SignatureLowering, tensors: list[Leaf], names: Sequence[object]) -> list[Leaf]:
    if isinstance(names, str):
        raise _wrong(lowering, f"{names!r} is one string. Write a list of names: [{names!r}]")
    if not isinstance(names, Sequence):
        raise _wrong(lowering, f"{show_value(names)} is not a function, list of names or None. Write one of these")
    if len(names) != len(lowering.return_leaves):
        raise _wrong(
            lowering, f"{len(names)} names are given for {len(lowering.return_leaves)} outputs. Give one for each"
        )
    known = {text: leaf for leaf in tensors for text in (dotted(leaf.path), leaf.name)}
    for name in names:
        if not isinstance(name, str) or name not in known:
            text = f"{show_value(name)} is not a Tensor parameter or leaf path.{nearest(name, known)} Name one"
            raise _wrong(lowering, text)
    return [known[name] for name in names if isinstance(name, str)]


def _wrong(lowering: SignatureLowering, text: str) -> OptionError:
    return OptionError(lowering.sentence(f"infer_output_meta_fn: {text}."))


def _like_inputs(lowering: SignatureLowering, sources: list[Leaf]) -> Callable[..., Any]:
    layout = lowering.layout
    refuse = compile_at_first_call(functools.partial(compile_refusals, lowering))
    positions = [layout.names.index(leaf.name) for leaf in sources]
    optional = [leaf.is_optional for leaf in lowering.return_leaves]

    def fake(*args: Any, **kwargs: Any) -> Any:
        refuse(*args, **kwargs)
        flat = layout.fill(args, kwargs)
        return as_output(tuple(_like(flat[i], may_be_none) for i, may_be_none in zip(positions, optional, strict=True)))

    def _like(value: Any, may_be_none: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [torch.empty_like(item) for item in value]
        if value is None and not may_be_none:
            raise _wrong(lowering, "an output looks like a Tensor that this call passes as None. Pass a function")
        return None if value is None else torch.empty_like(value)

    return fake


def register_fake(op: object, fn: Callable[..., Any] | None = None) -> Any:
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
        adopted = fn if slot.adopt is None else slot.adopt(fn)
        slot.fake = fake if slot.adopt is None else make_fake(definition.lowering, adopted)
        slot.runs_body = getattr(adopted, "runs_body", False)
        slot.given = location(fn)
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
        earlier = definition.registration.derivative.formula
        formula = make_formula(definition.lowering, setup_context, backward)
        _refuse_second(definition, "gradient", "" if earlier is None else location(earlier.backward_fn), backward)
        definition.registration.derivative.formula = formula
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
        check_parameters(definition, fn)
        registration, key = definition.registration, _dispatch_key(definition, device_type)
        if key in registration.direct.bodies:
            text = f"it has a body for '{device_type}' already; {fn.__name__} ({location(fn)}) would be a second."
            raise RuleError(definition.lowering.sentence(text))
        registration.add_body(fn, key)
    return fn


def check_parameters(definition: OpDef, fn: Callable[..., Any]) -> None:
    """Raise a RuleError if *fn*, another body of the op, has other parameters."""
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
        called_with = ("info", "in_dims", *definition.lowering.signature.parameters)
        check_callable(definition.lowering, "rule", rule, called_with, error=RuleError)
        definition.registration.derivative.vmap_rule = functools.partial(_flat_vmap, Bridge(definition.lowering), rule)
    return rule


def _flat_vmap(bridge: Bridge, rule: Callable[..., Any], info: Any, in_dims: Any, *flat: Any) -> tuple[Any, Any]:
    output, out_dims = rule(info, bridge.per_parameter(in_dims), *bridge.rebuild(*flat))
    return bridge.flatten_output(output), tuple(bridge.per_output(out_dims, "the vmap rule's out_dims"))


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
