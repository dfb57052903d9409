# SPDX-License-Identifier: Apache-2.0
"""`magi_register_custom_op`, and the type of what it returns.

Its implementation is loaded at the first decoration, so that importing the name is cheap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import torch


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
    from .define import define, refuse_other_than_name

    refuse_other_than_name(name)

    def decorate(fn: Callable[P, R]) -> RegisteredOp[P, R]:
        exposed = define(
            fn,
            name,
            sys._getframe(1),  # noqa: SLF001
            mutates_args=mutates_args,
            infer_output_meta_fn=infer_output_meta_fn,
            setup_context_fn=setup_context_fn,
            backward_fn=backward_fn,
            traits={"compute_sensitive": is_compute_sensitive, "subgraph_boundary": is_subgraph_boundary},
            tags=tags,
            override=override,
            register_pytree=register_pytree,
        )
        return cast("RegisteredOp[P, R]", exposed)

    return decorate
