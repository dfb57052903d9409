# SPDX-License-Identifier: Apache-2.0
"""A pass with a place in Inductor and the keys that it declares, and passes that the environment switches off."""

from __future__ import annotations

import difflib
import inspect
import os
import weakref
from abc import abstractmethod
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from torch._inductor.custom_graph_pass import CustomGraphPass

from magi_passes import _torch_compat
from magi_passes._identity.code import digest
from magi_passes._identity.value_forms import is_frozen
from magi_passes._uuid import uuid_of
from magi_passes.errors import PassDefinitionError, UnknownConfigKeyError, UnknownPassNameError

from .context import PassContext


if TYPE_CHECKING:
    from torch.fx import Graph

    from .context import Reason


DISABLE_VARIABLE = "MAGI_PASSES_DISABLE"
_ALL = "all"
# Weak references to classes, so that a pass of a test or a notebook is forgotten together with its class.
_known: weakref.WeakSet[type] = weakref.WeakSet()


def note_pass(cls: type) -> None:
    """Remember *cls*, the class of a pass, as one that the environment variable may name."""
    _known.add(cls)


def disabled_passes() -> frozenset[str]:
    """The class names in the environment variable MAGI_PASSES_DISABLE, separated by commas; ``all`` is every pass.

    Raises:
        UnknownPassNameError: A name is not the class of a pass that is loaded.
    """
    names = frozenset(name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip())
    if names:
        known = {_ALL, *(cls.__name__ for cls in list(_known))}
        for name in sorted(names - known):
            close = get_close_matches(name, sorted(known), n=1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            msg = (
                f"{DISABLE_VARIABLE} names {name!r}, which is not a pass.{meant} Give the names of classes, separated "
                f"by commas, or 'all'. Loaded are {', '.join(sorted(known - {_ALL}))}."
            )
            raise UnknownPassNameError(msg)
    return names


def is_disabled(graph_pass: object, disabled: frozenset[str]) -> bool:
    """Whether *disabled* has the name of the class of *graph_pass*, or ``all``."""
    return _ALL in disabled or type(graph_pass).__name__ in disabled


class DeclaredPass(CustomGraphPass):
    """What every pass declares. `MagiInductorPass` is the base class of passes."""

    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = ()
    hook: ClassVar[str] = "post_grad_custom_post_pass"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_declarations(cls)

    def is_applicable(self, graph: Graph, context: PassContext) -> bool | Reason:  # noqa: ARG002
        """Whether to run on *graph*. A `Reason` also says why in the record. It must not change anything."""
        return True

    @abstractmethod
    def __call__(self, graph: Graph) -> None:
        """Rewrite *graph* in place, or assign declared configuration keys.

        It is not called if a cache has the result.
        """

    def uuid(self) -> str:
        """What identifies this pass in Inductor's cache keys.

        It is a digest of the code of the class and its bases, the fields, all code that they reach with the values that
        it reads, and the torch release. Nothing has to be listed: functions are found by the names in the code, through
        other modules too, up to torch, Triton and the standard library. Code that is found only at run time, by a
        computed name or an entry point, must be in a field or an attribute of the class.

        It is computed once, and again after any of this was replaced. A pass that depends on the rank of its process
        appends it:

            def uuid(self): return f"{super().uuid()}-rank{torch.distributed.get_rank()}"

        Raises:
            PassDefinitionError: The class is not a frozen dataclass.
            PassIdentityError: A field can change, or code of yours reads a value without a stable form.
            UnknownPassNameError: MAGI_PASSES_DISABLE names a pass that does not exist.
        """
        check_is_frozen(type(self))
        disabled = disabled_passes()
        # Every name counts, also those of other passes, because a pass that chooses among passes reads them too.
        without = f"-without-{digest('disabled', *sorted(disabled))}" if disabled else ""
        return uuid_of(self, besides=(PassContext,)) + without


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


def check_keys_exist(cls: type[DeclaredPass]) -> None:
    """Raise `UnknownConfigKeyError` when *cls* declares a key that the running torch does not have."""
    known = _torch_compat.config.config_keys()
    for key in cls.inductor_config_keys_potentially_mutated_by_this_pass:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=2)
            meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            release = _torch_compat.machine.torch_version()
            msg = f"{cls.__qualname__} declares the Inductor key {key!r}, which torch {release} does not have.{meant}"
            raise UnknownConfigKeyError(msg)


def _check_declarations(cls: type[DeclaredPass]) -> None:
    keys: Any = cls.inductor_config_keys_potentially_mutated_by_this_pass
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        msg = (
            f"{cls.__qualname__}.inductor_config_keys_potentially_mutated_by_this_pass must be a tuple of strings, "
            f"such as ('triton.max_tiles',); got {keys!r}."
        )
        raise PassDefinitionError(msg)
    if cls.hook not in _torch_compat.config.HOOKS:
        msg = f"{cls.__qualname__}.hook is {cls.hook!r}; Inductor has {', '.join(_torch_compat.config.HOOKS)}."
        raise PassDefinitionError(msg)
    if keys and cls.hook in _torch_compat.config.EARLY_HOOKS:
        msg = (
            f"{cls.__qualname__} declares configuration keys but runs at {cls.hook}, long before the code generation "
            f"that reads them. Run it at {' or '.join(_torch_compat.config.POST_GRAD_HOOKS)}."
        )
        raise PassDefinitionError(msg)
