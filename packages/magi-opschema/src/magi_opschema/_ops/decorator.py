# SPDX-License-Identifier: Apache-2.0
"""`magi_register_custom_op`, and the type of what it returns: check, compute, register, remember.

An op whose objects are taken apart has a second form, for calls that pass a handle instead of the object. So has one
with a torch.Generator, for compiled code:

    mylib::run            (Tensor x, Tensor runner__weight, float runner__scale) -> Tensor
    mylib::run_by_handle  (Tensor x, SymInt runner) -> Tensor

Both have the same body. The second is opaque to every compiler, because a handle shows nothing of its object.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast, overload

import torch

from magi_opschema import _torch_compat as compat
from magi_opschema._call.misfit import ErrorTranslation, refusal_of_calls
from magi_opschema._codegen.functions import compile_exposed
from magi_opschema._environment import refuse_unknown_variables
from magi_opschema._handles import fixed
from magi_opschema._lowering.annotations import Scope, evaluate, scope_of
from magi_opschema._lowering.signature import TORCH_OP_ATTRIBUTE, lower_signature_in, refuse_other_than_functions
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.tree import dotted
from magi_opschema._text import location, show_value, show_with_type
from magi_opschema.errors import DuplicateOpError, HandleError, OpNameError, OptionError

from . import rules
from .catalogue import OPS, OpDef, op_def
from .implementations import Choice, implementation
from .pytrees import register_records
from .registration import Registration, register, registering, replacing, unregister
from .rules import FakeSlot, FakeSpec, make_fake, make_formula, sources_of


P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])


class RegisteredOp(Protocol[P, R_co]):
    """A function that calls a registered op, with the name, doc, signature, hints and pickle of the user's function.

    Attributes:
        torch_op: the OpOverload that graphs hold, and that torch's own functions accept.
        torch_registered_op: the same, by its name in MagiCompiler.
        magi_exposed_op: this function, by its name in MagiCompiler.
    """

    __name__: str
    __qualname__: str
    __module__: str
    __source__: str
    torch_op: torch._ops.OpOverload
    torch_registered_op: torch._ops.OpOverload
    magi_exposed_op: Any

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def register_fake(self, fn: F) -> F: ...
    @overload
    def register_fake(self, fn: None = None) -> Callable[[F], F]: ...

    def register_autograd(self, backward: F, /, *, setup_context: Callable[..., None] | None = None) -> F: ...

    @overload
    def register_kernel(self, device_type: str, fn: F) -> F: ...
    @overload
    def register_kernel(self, device_type: str, fn: None = None) -> Callable[[F], F]: ...

    @overload
    def register_vmap(self, rule: F) -> F: ...
    @overload
    def register_vmap(self, rule: None = None) -> Callable[[F], F]: ...

    def register_autocast(self, device_type: str, dtype: torch.dtype) -> None: ...

    @overload
    def register_sharding(self, rule: F) -> F: ...
    @overload
    def register_sharding(self, rule: None = None) -> Callable[[F], F]: ...

    @overload
    def implementation(
        self,
        fn: F,
        *,
        name: str | None = None,
        priority: int = 0,
        when: Callable[..., bool] | None = None,
        devices: Iterable[str] | None = None,
        dtypes: Iterable[torch.dtype] | None = None,
        capability: tuple[int, int] | None = None,
    ) -> F: ...
    @overload
    def implementation(
        self,
        fn: None = None,
        *,
        name: str | None = None,
        priority: int = 0,
        when: Callable[..., bool] | None = None,
        devices: Iterable[str] | None = None,
        dtypes: Iterable[torch.dtype] | None = None,
        capability: tuple[int, int] | None = None,
    ) -> Callable[[F], F]: ...


def magi_register_custom_op(
    name: str | None = None,
    mutates_args: Iterable[str] = (),
    infer_output_meta_fn: Callable[..., Any] | Sequence[str] | None = None,
    setup_context_fn: Callable[..., None] | None = None,
    backward_fn: Callable[..., Any] | None = None,
    is_compute_sensitive: bool = False,
    is_subgraph_boundary: bool = False,
    *,
    tags: Sequence[torch.Tag] = (),
    override: bool = False,
    register_pytree: bool = True,
) -> Callable[[Callable[P, R]], RegisteredOp[P, R]]:
    """Register a function as a PyTorch custom op; its signature may hold frozen dataclasses, Literals, Enums and more.

    Args:
        name: `namespace::op`; by default it is made of the function's module and qualified name.
        mutates_args: what the body writes into: parameter names (a record means all its Tensor leaves),
            dotted leaf paths, or flat names.
        infer_output_meta_fn: the fake: a function at the op's own signature that returns empty Tensors of the right
            shape, dtype, device and strides; or for each output, the name or path of the input that it looks like; or
            None, for which output i looks like Tensor input i. The first real call is compared with it. A function with
            an attribute `adopt_fake` is a default of a library; like None, it is replaced by `register_fake`, with the
            result of `adopt_fake(fake)`. One with an attribute `runs_body` that is true runs the body on fake tensors,
            and is compared with real calls only where a call was traced.
        setup_context_fn: `setup_context_fn(ctx, inputs, output)`: saves on `ctx` what the backward needs.
            `inputs` are the arguments in the order of the signature; for a record output, `output` is a dict by field.
        backward_fn: `backward_fn(ctx, *grads)` returns one gradient for each parameter: for a record None, a dict by
            field, an instance, or a tuple in field order; for a list None or a list.
        is_compute_sensitive: its outputs should be saved rather than recomputed; a backend reads this.
        is_subgraph_boundary: a backend splits the graph at this op.
        tags: torch.Tag values, besides `pt2_compliant_tag`.
        override: replace an op of this name that this package registered, in a notebook or a reload.
        register_pytree: make the records of the signature nodes of torch's pytrees, so that torch.export, make_fx and
            torch.func see the Tensors in them. A class that is registered already stays as it is.

    Returns:
        A decorator. Its result is called like the function, and has its name, doc, signature, hints and pickle;
        `.torch_op` is the OpOverload, `.register_fake`, `.register_autograd`, `.register_kernel` and so on add to it,
        and `op_def` returns what the function was lowered to.

    Raises:
        SignatureError: the signature has no flat form; every bad place is named.
        OpNameError: the name is not `namespace::op`.
        DuplicateOpError: the name is taken, or the function is an op already.
        OptionError: an option names something that does not exist, or contradicts another option.

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
    traits = {"compute_sensitive": is_compute_sensitive, "subgraph_boundary": is_subgraph_boundary}

    def decorate(fn: Callable[P, R]) -> RegisteredOp[P, R]:
        """Register *fn* as an op. All errors are raised before anything is registered with torch."""
        refuse_unknown_variables()
        refuse_other_than_functions(fn)
        op_name = _op_name(fn, name)
        scope = scope_of(fn, sys._getframe(1))  # noqa: SLF001
        lowering = lower_signature_in(fn, scope, mutates_args, op_name)
        _check_options(lowering, tags, {**traits, "override": override, "register_pytree": register_pytree})
        draws = any(leaf.is_generator for leaf in lowering.leaves)
        # The tag keeps a backward from running the op again.
        all_tags = (*tags, torch.Tag.nondeterministic_seeded) if draws else tags
        marks = frozenset(trait for trait, is_set in traits.items() if is_set)
        choice = Choice(op_name, fn)

        def make(lowering: SignatureLowering, spec: FakeSpec, by_handle: OpDef | None) -> OpDef:
            """Register the op that *lowering* describes, and remember it."""
            formula = make_formula(lowering, setup_context_fn, backward_fn)
            fake = FakeSlot(make_fake(lowering, spec), spec)
            with replacing(_replaced(lowering, override=override)):
                registration = register(lowering, fn, fake, formula, all_tags)
                try:
                    exposed = _expose(registration, fn, scope, by_handle)
                except BaseException:
                    unregister(registration)
                    raise
            for op in registration.torch_ops:
                compat.speak_for_earlier(op)
            title, torch_op = lowering.title, registration.torch_op
            OPS[title] = OpDef(title, fn, torch_op, exposed, lowering, marks, registration, choice, by_handle)
            return OPS[title]

        with registering:
            by_handle = None
            if lowering.takes_apart or draws:
                _replaced(lowering, override=override)
                # A compiler does not see writes of the body into an object.
                mutated = [leaf.name for slot in lowering.mutated for leaf in slot.leaves if not leaf.is_fixed]
                opaque = lower_signature_in(fn, scope, mutated, f"{op_name}_by_handle", is_opaque=True)
                by_handle = make(opaque, fake_by_handle(lowering, infer_output_meta_fn), None)
            try:
                definition = make(lowering, infer_output_meta_fn, by_handle)
            except BaseException:
                if by_handle is not None:
                    del OPS[by_handle.name]
                    unregister(by_handle.registration)
                raise
            if register_pytree:
                register_records(lowering)
        return cast("RegisteredOp[P, R]", definition.exposed_op)

    return decorate


def _refuse_other_than_name(name: object) -> None:
    """Raise for a value that is not an op name, such as the function of a decorator without brackets."""
    if name is None or isinstance(name, str):
        return
    if callable(name):
        fix = "Write @magi_register_custom_op() with brackets, or @magi_register_custom_op('namespace::op')."
        raise OpNameError(f"magi_register_custom_op takes a name, and got a function ({location(name)}). {fix}")
    raise OpNameError(f"the op name {show_with_type(name)} is not a string. Write 'namespace::op'.")


def _op_name(fn: Callable[..., Any], name: str | None) -> str:
    if name is None:
        module, qualname = fn.__module__.replace(".", "_"), fn.__qualname__.replace("<locals>.", "").replace(".", "_")
        name = f"{module}::{qualname}"
    if not _NAME.match(name):
        fix = f"Write 'namespace::{name}'." if re.match(r"\w+\Z", name) else "Write 'namespace::op', two identifiers."
        raise OpNameError(f"{fn.__name__}(): the op name '{name}' is not 'namespace::op'. {fix} ({location(fn)})")
    if taken := compat.reserved_part(*name.split("::")):
        text = f"the op name '{name}' cannot be used: torch keeps '{taken}' for itself. Choose another."
        raise OpNameError(f"{fn.__name__}(): {text} ({location(fn)})")
    return name


def _check_options(lowering: SignatureLowering, tags: object, flags: Mapping[str, object]) -> None:
    if not isinstance(tags, Iterable) or not all(isinstance(tag, torch.Tag) for tag in tags):
        fix = "Write for example tags=(torch.Tag.flexible_layout,)."
        raise OptionError(lowering.sentence(f"tags={show_value(tags)} is not a tuple of torch.Tag values. {fix}"))
    for trait, value in flags.items():
        if not isinstance(value, bool):
            option = trait if trait in {"override", "register_pytree"} else f"is_{trait}"
            raise OptionError(lowering.sentence(f"{option}={show_with_type(value)} is not True or False."))


def _replaced(lowering: SignatureLowering, *, override: bool) -> Registration | None:
    """The registration of an earlier op of this name; None if the name is free."""
    other = OPS.get(lowering.title)
    if other is None:
        if compat.is_registered(lowering.title):
            text = "the op is registered already, by another library."
            fix = (
                "Choose another name, or take that one away: override=True replaces only what magi-opschema registered."
            )
            raise DuplicateOpError(lowering.sentence(f"{text} {fix}"))
        return None
    if not override:
        text = f"the op is registered already, by {other.lowering.name} ({other.lowering.location})."
        fix = "Choose another name, or pass override=True to replace it, as after a reload."
        raise DuplicateOpError(lowering.sentence(f"{text} {fix}"))
    return other.registration


def _expose(
    registration: Registration, fn: Callable[..., Any], scope: Scope, by_handle: OpDef | None
) -> Callable[..., Any]:
    """The function that the decorator returns, with the identity of *fn* and the methods of `RegisteredOp`."""
    lowering, torch_op = registration.lowering, registration.torch_op
    pool = compat.below_adinplaceorview_pool if lowering.mutated else compat.below_autograd_pool
    bound: dict[str, object] = {
        "refuse_call": refusal_of_calls(lowering),
        "torch_op": torch_op,
        "by_handle": None if by_handle is None else by_handle.exposed_op,
        "translate_error": translate_error,
        "call_with_care": torch_op if lowering.mutated else registration.derivative.differentiate,
        "handle": compat.dispatch_handle(torch_op),
        "below_autograd": pool.make,
        "unused_contexts": pool.unused,
        "fixed": fixed,
        "is_grad_enabled": torch.is_grad_enabled,
        **{name: getattr(compat, name) for name in _ASKED},
    }
    exposed: Any = compile_exposed(lowering, bound, f"exposed {fn.__module__}.{fn.__qualname__}")
    exposed.__name__, exposed.__qualname__, exposed.__module__ = fn.__name__, fn.__qualname__, fn.__module__
    exposed.__doc__, exposed.__signature__ = fn.__doc__, lowering.signature
    annotations = {parameter.name: parameter.annotation for parameter in lowering.signature.parameters.values()}
    annotations["return"] = lowering.signature.return_annotation
    exposed.__annotations__ = {name: evaluate(annotation, scope) for name, annotation in annotations.items()}
    exposed.torch_op = torch_op
    exposed.torch_registered_op, exposed.magi_exposed_op = torch_op, exposed  # as MagiCompiler calls them
    setattr(exposed, TORCH_OP_ATTRIBUTE, torch_op)
    for method in (
        rules.register_fake,
        rules.register_autograd,
        rules.register_kernel,
        rules.register_vmap,
        rules.register_autocast,
        rules.register_sharding,
        implementation,
    ):
        setattr(exposed, method.__name__, functools.partial(method, torch_op))
    return cast("Callable[..., Any]", exposed)


def fake_by_handle(lowering: SignatureLowering, spec: FakeSpec) -> FakeSpec:
    """The fake *spec* of an op for its form with handles; raises if an output looks like a part of an object."""
    if callable(spec):
        return spec
    sources = sources_of(lowering, spec)
    inside = [dotted(leaf.path) for leaf in sources if leaf.is_fixed]
    if not inside:
        return [leaf.name for leaf in sources]

    def fake(*_: Any, **__: Any) -> NoReturn:
        text = f"an output looks like '{inside[0]}', and the call passes a handle, which hides it. Pass the object."
        raise HandleError(lowering.sentence(text))

    return fake


def translate_error(error: Exception, torch_op: object, *values: Any) -> None:
    """Raise what *error* means for a call of an op's exposed function with the user's arguments *values*.

    Generated code calls this one function for every op, because compile caches identify a function by its name.
    """
    definition = op_def(torch_op)
    if definition.torch_op is not torch_op:
        return  # another op has its name now, and the error is about the arguments of that one
    ErrorTranslation(definition.lowering).of_values(error, *values)


_ASKED = (
    *("dispatch", "is_dynamo_compiling", "are_transforms_active", "forward_ad", "tracing_state", "increment_version"),
    *("has_torch_function", "has_torch_function_among", "any_requires_grad"),
)
"""The names of `_torch_compat` that an exposed function uses."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*::[A-Za-z_][A-Za-z0-9_]*\Z")
