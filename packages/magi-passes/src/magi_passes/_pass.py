# SPDX-License-Identifier: Apache-2.0
"""The base class of every pass: what it declares, when it applies, what identifies it in a cache key."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from torch._inductor.custom_graph_pass import CustomGraphPass

from . import _torch_compat
from ._identity import describe, describe_class, describe_fields, digest, is_frozen
from .errors import PassDefinitionError


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph

    from ._context import PassContext
    from ._reason import Reason


class MagiInductorPass(CustomGraphPass):
    """A graph pass that says what it touches. Subclasses are frozen dataclasses.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from magi_passes import MagiInductorPass, PassContext, Reason
        >>> @dataclass(frozen=True)
        ... class Unroll(MagiInductorPass):
        ...     inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)
        ...     tiles: int = 2
        ...
        ...     def is_applicable(self, graph, context):
        ...         return Reason(len(graph.nodes) > 10, f"{len(graph.nodes)} nodes")
        ...
        ...     def __call__(self, graph):
        ...         torch._inductor.config.triton.max_tiles = self.tiles
        >>> Unroll(tiles=2).uuid() == Unroll(tiles=3).uuid()
        False

    Assigning a declared key inside `__call__` is all there is to it: `PassPipeline` puts the old value back when the
    compilation ends, keeps the change out of every other compilation, and lets the user's own setting win.

    Attributes:
        inductor_config_keys_potentially_mutated_by_this_pass: The keys of `torch._inductor.config` that `__call__`
            may assign, nested ones with a dot. Any other change raises `UndeclaredConfigMutationError`.
        uuid_helpers: Functions and classes whose code belongs to the uuid, because `__call__` or `is_applicable`
            use them. The class itself, its bases and its fields are always in.
        hook: The Inductor option that runs the pass. Configuration can be changed from the two post-grad hooks only:
            the others run before the code generation that reads it.
    """

    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = ()
    uuid_helpers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    hook: ClassVar[str] = "post_grad_custom_post_pass"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_declarations(cls)

    def is_applicable(self, graph: Graph, context: PassContext) -> bool | Reason:  # noqa: ARG002
        """Whether to run on *graph*; a `Reason` says why in the record. Must not change anything."""
        return True

    @abstractmethod
    def __call__(self, graph: Graph) -> None:
        """Rewrite *graph* in place, or assign declared configuration keys. Not called when a cache has the result."""

    def uuid(self) -> str:
        """What identifies this pass in Inductor's cache keys.

        Made of the code of the class and its bases, the fields, the code of `uuid_helpers`, and the torch release
        that version gates compare with. Computed once. A pass that embeds the rank of its process appends it:

            def uuid(self): return f"{super().uuid()}-rank{torch.distributed.get_rank()}"

        Raises:
            PassDefinitionError: The class is not a frozen dataclass.
            PassIdentityError: A field, closure or helper holds a value without a stable form.
        """
        known = vars(self).get("_uuid")
        if known is None:
            check_is_frozen(type(self))
            helpers = [describe(helper, f"{type(self).__name__}.uuid_helpers") for helper in self.uuid_helpers]
            parts = (describe_class(type(self)), describe_fields(self), *helpers, _torch_compat.torch_version())
            known = f"{type(self).__name__}-{digest(*parts)}"
            object.__setattr__(self, "_uuid", known)
        return str(known)


def check_is_frozen(cls: type) -> None:
    """Raise `PassDefinitionError` unless *cls* is itself decorated as a frozen dataclass.

    A subclass that adds a field without the decorator would be missing that field in its uuid.
    """
    undecorated = "__dataclass_fields__" not in vars(cls) and any(
        "ClassVar" not in str(annotation) for annotation in inspect.get_annotations(cls).values()
    )
    if undecorated or not is_frozen(cls):
        msg = (
            f"{cls.__qualname__} is not a frozen dataclass, so its parameters would be missing from the cache key. "
            f"Decorate it with @dataclass(frozen=True). ({cls.__module__})"
        )
        raise PassDefinitionError(msg)
    if "__slots__" in vars(cls):
        msg = f"{cls.__qualname__} is a dataclass with slots=True; the base class needs a __dict__. Leave slots out."
        raise PassDefinitionError(msg)


def _check_declarations(cls: type[MagiInductorPass]) -> None:
    keys: Any = cls.inductor_config_keys_potentially_mutated_by_this_pass
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        msg = (
            f"{cls.__qualname__}.inductor_config_keys_potentially_mutated_by_this_pass must be a tuple of strings, "
            f"such as ('triton.max_tiles',); got {keys!r}."
        )
        raise PassDefinitionError(msg)
    if cls.hook not in _torch_compat.HOOKS:
        msg = f"{cls.__qualname__}.hook is {cls.hook!r}; Inductor has {', '.join(_torch_compat.HOOKS)}."
        raise PassDefinitionError(msg)
    if keys and cls.hook in _torch_compat.EARLY_HOOKS:
        msg = (
            f"{cls.__qualname__} declares configuration keys but runs at {cls.hook}, long before the code generation "
            f"that reads them. Run it at {' or '.join(_torch_compat.POST_GRAD_HOOKS)}."
        )
        raise PassDefinitionError(msg)
