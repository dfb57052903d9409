# SPDX-License-Identifier: Apache-2.0
"""`magi_register_custom_op`: compute, register, return."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch

from ._annotations import location, scope_of
from ._autograd import Formula, gradient_names
from ._callables import check_callable
from ._emit import Writer
from ._fake import FakeSpec, make_fake
from ._functions import emit_exposed
from ._lowering import SignatureLowering
from ._op_def import TORCH_OP_ATTRIBUTE, OpDef, is_known, op_def, remember
from ._registration import register, unregister
from ._reject import rejections
from ._signature import lower_signature_in
from ._source import compile_source
from ._torch_compat import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    any_requires_grad,
    are_transforms_active,
    below_adinplaceorview,
    below_autograd,
    dispatch,
    increment_version,
    is_dynamo_compiling,
    is_registered,
    reserved_part,
)
from .errors import DuplicateOpError, OpNameError, OptionError


P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*::[A-Za-z_][A-Za-z0-9_]*\Z")


def magi_register_custom_op(
    name: str | None = None,
    *,
    mutates_args: Iterable[str] = (),
    infer_output_meta_fn: FakeSpec = None,
    setup_context_fn: Callable[..., None] | None = None,
    backward_fn: Callable[..., Any] | None = None,
    is_compute_sensitive: bool = False,
    is_subgraph_boundary: bool = False,
    tags: Sequence[torch.Tag] = (),
    override: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as a PyTorch custom op; its signature may hold frozen dataclasses, Literals, Enums and more.

    Args:
        name: `namespace::op`; without one it is made of the function's module and qualified name.
        mutates_args: what the body writes into: parameter names (a record means all its Tensor leaves),
            dotted leaf paths, or flat names.
        infer_output_meta_fn: the fake. A function at the op's own signature that returns empty Tensors of the right
            shape, dtype, device and strides; or for each output the name or path of the input that it looks like;
            or None: output i looks like Tensor input i. The first real call is compared with it.
        setup_context_fn: `setup_context_fn(ctx, inputs, output)`: saves on `ctx` what the backward needs.
            `inputs` are the arguments in the order of the signature; of a record output, `output` is a dict by field.
        backward_fn: `backward_fn(ctx, *grads)` returns one gradient for each parameter: for a record None, a dict by
            field, an instance, or a tuple in field order; for a list None or a list.
        is_compute_sensitive: its outputs are worth saving rather than computing again; read by a backend.
        is_subgraph_boundary: a backend splits the graph here.
        tags: torch.Tag values, beside `pt2_compliant_tag`.
        override: replace an op of this name that this package registered, in a notebook or a reload.

    Returns:
        A decorator. What it returns is called as the function is; `op_def` tells what it was lowered to.

    Raises:
        SignatureError: the signature has no flat form; every bad place is named.
        OpNameError: the name is not `namespace::op`.
        DuplicateOpError: the name is taken, or the function is an op already.
        OptionError: an option names what is not there, or contradicts another.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from torch import Tensor
        >>> @dataclass(frozen=True)
        ... class Affine:
        ...     scale: float = 1.0
        ...     shift: float = 0.0
        >>> @magi_register_custom_op("doc::affine")
        ... def affine(x: Tensor, cfg: Affine = Affine()) -> Tensor:
        ...     return x * cfg.scale + cfg.shift
        >>> affine(torch.ones(2), Affine(scale=3.0))
        tensor([3., 3.])
    """
    _refuse_other_than_name(name)
    frame = sys._getframe(1)  # noqa: SLF001
    traits = frozenset(
        trait
        for trait, is_set in (("compute_sensitive", is_compute_sensitive), ("subgraph_boundary", is_subgraph_boundary))
        if is_set
    )

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        _refuse_ops(fn)
        op_name = _op_name(fn, name)
        lowering = lower_signature_in(fn, scope_of(fn, frame), mutates_args)
        formula = _formula(lowering, setup_context_fn, backward_fn)
        _check_tags(lowering, tags)
        fake = make_fake(lowering, infer_output_meta_fn)
        _free_name(op_name, lowering, override=override)
        registration = register(op_name, lowering, fn, fake, formula, tags)
        exposed = _expose(lowering, fn, op_name, registration.torch_op)
        remember(OpDef(op_name, fn, registration.torch_op, exposed, lowering, traits, registration))
        return cast("Callable[P, R]", exposed)

    return decorate


def _refuse_other_than_name(name: object) -> None:
    if name is None or isinstance(name, str):
        return
    if callable(name):
        fix = "Write @magi_register_custom_op() with brackets, or @magi_register_custom_op('namespace::op')."
        raise OpNameError(f"magi_register_custom_op takes a name, and got a function ({location(name)}). {fix}")
    raise OpNameError(f"the op name {name!r} ({type(name).__name__}) is no string. Write 'namespace::op'.")


def _refuse_ops(fn: object) -> None:
    if hasattr(fn, TORCH_OP_ATTRIBUTE) or isinstance(fn, (OpOverload, OpOverloadPacket)):
        described = getattr(fn, "__qualname__", None) or str(fn)
        raise DuplicateOpError(
            f"{described} is an op already. Decorate a function once; op_def(op).fn is the plain function."
        )
    if isinstance(fn, CustomOpDef):
        raise DuplicateOpError(f"{fn} was registered by torch.library.custom_op. Take that decorator off.")
    if not hasattr(fn, "__code__"):
        raise OptionError(f"{fn!r} is no Python function. Wrap it in one whose parameters have annotations.")


def _title(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def _op_name(fn: Callable[..., Any], name: str | None) -> str:
    if name is None:
        module, qualname = fn.__module__.replace(".", "_"), fn.__qualname__.replace("<locals>.", "").replace(".", "_")
        name = f"{module}::{qualname}"
    if not _NAME.match(name):
        fix = f"Write 'namespace::{name}'." if re.match(r"\w+\Z", name) else "Write 'namespace::op', two identifiers."
        raise OpNameError(f"{fn.__name__}(): the op name '{name}' is not 'namespace::op'. {fix} ({location(fn)})")
    if taken := reserved_part(*name.split("::")):
        text = f"the op name '{name}' cannot be used: torch keeps '{taken}' for itself. Choose another."
        raise OpNameError(f"{fn.__name__}(): {text} ({location(fn)})")
    return name


def _formula(
    lowering: SignatureLowering, setup_context_fn: Callable[..., None] | None, backward_fn: Callable[..., Any] | None
) -> Formula | None:
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


def _check_tags(lowering: SignatureLowering, tags: object) -> None:
    if not isinstance(tags, Iterable) or not all(isinstance(tag, torch.Tag) for tag in tags):
        text = f"tags={tags!r} is no tuple of torch.Tag values. Write for example tags=(torch.Tag.flexible_layout,)."
        raise OptionError(lowering.sentence(text))


def _free_name(name: str, lowering: SignatureLowering, *, override: bool) -> None:
    if not is_known(name):
        if is_registered(name):
            text = f"the op '{name}' is registered already, by another library. Choose another name."
            raise DuplicateOpError(lowering.sentence(text))
        return
    other = op_def(name)
    if not override:
        text = f"the op '{name}' is registered already, by {other.lowering.name} ({other.lowering.location})."
        fix = "Choose another name, or pass override=True to replace it, as after a reload."
        raise DuplicateOpError(lowering.sentence(f"{text} {fix}"))
    unregister(other.registration)


def _expose(lowering: SignatureLowering, fn: Callable[..., Any], name: str, torch_op: Any) -> Callable[..., Any]:
    if lowering.path != "flattened":
        return cast("Callable[..., Any]", torch_op)
    calls: dict[str, Callable[..., Any]] = {
        "torch_op": torch_op,
        "dispatch": dispatch(torch_op),
        "is_dynamo_compiling": is_dynamo_compiling,
        "are_transforms_active": are_transforms_active,
        "is_grad_enabled": torch.is_grad_enabled,
        "any_requires_grad": any_requires_grad,
        "increment_version": increment_version,
        "below_autograd": below_adinplaceorview if lowering.mutated else below_autograd,
    }
    to = Writer(lowering.prefix, rejections(lowering.name, lowering.location), is_traced=True)
    exposed = compile_source(emit_exposed(lowering, name, calls, to, f"exposed {_title(fn)}"))
    exposed.__name__, exposed.__qualname__, exposed.__module__ = fn.__name__, fn.__qualname__, fn.__module__
    exposed.__doc__ = fn.__doc__
    exposed.__signature__ = lowering.signature  # type: ignore[attr-defined]
    setattr(exposed, TORCH_OP_ATTRIBUTE, torch_op)
    return exposed
