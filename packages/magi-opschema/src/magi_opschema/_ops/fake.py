# SPDX-License-Identifier: Apache-2.0
"""The fake and the gradient functions that a user gives, checked.

A fake is a function at the user's signature, or made from names of inputs, or from the order of inputs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from magi_opschema._autograd import Formula
from magi_opschema._call.bridge import gradient_names
from magi_opschema._codegen.functions import compile_refusals, compile_twin
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import as_output, tensors_in
from magi_opschema._model.tree import Leaf, dotted
from magi_opschema._text import location, nearest, show_value, show_with_type
from magi_opschema._torch_compat import storage_id
from magi_opschema.errors import OpSchemaError, OptionError


def check_callable(
    lowering: SignatureLowering,
    option: str,
    fn: object,
    positional: Iterable[str],
    keywords: Iterable[str] = (),
    error: type[OpSchemaError] = OptionError,
) -> None:
    """Raise if *fn*, the value of *option*, is not a function that accepts these arguments.

    Raises:
        OptionError: it is not; or the class *error* if that is given.
    """
    if not callable(fn):
        text = f"{option} is {show_with_type(fn)}, expected a function."
        raise error(lowering.sentence(text))
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


FakeSpec = Callable[..., Any] | Sequence[str] | None


class FakeSlot:
    """The fake of one op, which can be replaced until the op's first use.

    Attributes:
        given: where the user gave it, the name of an option or the place of a function; empty for a default.
        is_used: whether the op was called or traced.
    """

    def __init__(self, fake: Callable[..., Any], spec: FakeSpec) -> None:
        self.is_used = False
        self._fake = fake
        self._adopt: Callable[[Callable[..., Any]], Callable[..., Any]] | None = getattr(spec, "adopt_fake", None)
        self.given = "" if spec is None or self._adopt is not None else "infer_output_meta_fn"

    def adopted(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The fake at the user's signature for *fn*, which the user gives; a default of a library may adopt it."""
        return fn if self._adopt is None else self._adopt(fn)

    def give(self, fake: Callable[..., Any], given: str) -> None:
        """Replace the default by *fake*."""
        self._fake, self.given = fake, given

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fake, and return its outputs without shared memory."""
        self.is_used = True
        output = self._fake(*args, **kwargs)
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

    Args:
        lowering: the op's signature.
        spec: a function at the user's signature; or for each output the parameter or leaf path of the Tensor
            it looks like (shape, dtype, device, and strides as in torch.empty_like); or None, for which output i looks
            like Tensor input i.

    Raises:
        OptionError: *spec* does not fit the signature.
    """
    if callable(spec):
        by_name = [parameter.name for parameter in lowering.parameters if parameter.is_keyword_only]
        by_position = [parameter.name for parameter in lowering.parameters if not parameter.is_keyword_only]
        check_callable(lowering, "infer_output_meta_fn", spec, by_position, by_name)
        # It is compiled at its first use, because many ops of a library are never traced.
        compiled = functools.cache(functools.partial(compile_twin, lowering, spec, "fake"))

        def fake(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return fake
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
    refuse = functools.cache(lambda: compile_refusals(lowering))
    positions = [layout.names.index(leaf.name) for leaf in sources]
    optional = [leaf.is_optional for leaf in lowering.return_leaves]

    def fake(*args: Any, **kwargs: Any) -> Any:
        refuse()(*args, **kwargs)
        flat = layout.fill(args, kwargs)
        return as_output(tuple(_like(flat[i], may_be_none) for i, may_be_none in zip(positions, optional, strict=True)))

    def _like(value: Any, may_be_none: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [torch.empty_like(item) for item in value]
        if value is None and not may_be_none:
            text = "an output looks like a Tensor that this call passes as None. Pass a function"
            raise _wrong(lowering, text)
        return None if value is None else torch.empty_like(value)

    return fake
