# SPDX-License-Identifier: Apache-2.0
"""The base class of every pass: what it declares, when it applies, what identifies it in a cache key."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from torch._inductor.custom_graph_pass import CustomGraphPass

from . import _torch_compat
from ._context import PassContext
from ._uuid import uuid_of
from ._value_forms import is_frozen
from .errors import PassDefinitionError


if TYPE_CHECKING:
    from torch.fx import Graph

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
        hook: The Inductor option that runs the pass. Configuration can be changed from the two post-grad hooks only:
            the others run before the code generation that reads it.
    """

    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = ()
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

        Made of the code of the class and its bases, the fields, all code that they reach with the values that it reads,
        and the torch release that version gates compare with. Nothing has to be listed: functions are found by the
        names in the code, through other modules too, up to torch, Triton and the standard library. Code that is found
        only at run time, by a computed name or an entry point, has to stand in a field or an attribute of the class.

        Computed once, and again when any of this was replaced. A pass that embeds the rank of its process appends it:

            def uuid(self): return f"{super().uuid()}-rank{torch.distributed.get_rank()}"

        Raises:
            PassDefinitionError: The class is not a frozen dataclass.
            PassIdentityError: A field can change, or code of yours reads a value without a stable form.
        """
        check_is_frozen(type(self))
        return uuid_of(self, besides=(PassContext,))


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
