# SPDX-License-Identifier: Apache-2.0
"""Several passes as the options of one compilation."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _torch_compat
from ._code import digest
from ._hook import PipelineHook
from ._pass import MagiInductorPass, check_is_frozen
from ._scope import install
from .errors import PassDefinitionError, UnknownConfigKeyError


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


@dataclass(frozen=True, init=False)
class PassPipeline:
    """Passes in the order in which they run, ready for any caller of Inductor.

    Example:
        >>> import torch
        >>> from magi_passes import NDTilingWorkaroundPass, PassPipeline
        >>> pipeline = PassPipeline([NDTilingWorkaroundPass()])
        >>> compiled = torch.compile(lambda x: x + 1, options=pipeline.inductor_options({"max_autotune": False}))

    Args:
        passes: Instances of `MagiInductorPass` subclasses. Each runs at its own `hook`; order matters within a hook.

    Raises:
        PassDefinitionError: One of *passes* is no pass, or its class is not a frozen dataclass.
        UnknownConfigKeyError: A pass declares a key that the running torch does not have.
        PassIdentityError: A pass holds a value that has no stable form.
    """

    passes: tuple[MagiInductorPass, ...]

    def __init__(self, passes: Iterable[MagiInductorPass]) -> None:
        object.__setattr__(self, "passes", tuple(passes))
        for position, candidate in enumerate(self.passes):
            _check(candidate, position)

    def __iter__(self) -> Iterator[MagiInductorPass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def uuid(self) -> str:
        """One digest over the uuids of all passes, in order."""
        return digest(*(p.uuid() for p in self.passes))

    def inductor_options(self, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Options that run this pipeline, for ``torch.compile(options=…)`` or ``compile_fx(config_patches=…)``.

        Nothing but the hooks is set; the configuration is read when a compilation starts, not here.

        Args:
            base: Options to start from. They are kept: hooks in them, also another pipeline's, run first, and no pass
                may change a key that stands in them. Keys added to the result later count as the user's too.

        Returns:
            A new dict; *base* stays as it is.
        """
        install()
        options = {key.replace("-", "_"): value for key, value in (base or {}).items()}
        user_keys = frozenset(options) - frozenset(_torch_compat.HOOKS)
        for name in _torch_compat.HOOKS:
            passes = tuple(p for p in self.passes if p.hook == name)
            if passes:
                options[name] = PipelineHook(name, passes, user_keys).merged_after(options.get(name))
        return options


def _check(candidate: object, position: int) -> None:
    if not isinstance(candidate, MagiInductorPass):
        hint = "Pass an instance, not the class." if isinstance(candidate, type) else "Subclass MagiInductorPass."
        msg = f"PassPipeline: item {position} is {candidate!r}, which is no MagiInductorPass instance. {hint}"
        raise PassDefinitionError(msg)
    check_is_frozen(type(candidate))
    known = _torch_compat.config_keys()
    for key in candidate.inductor_config_keys_potentially_mutated_by_this_pass:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=2)
            meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            msg = (
                f"{type(candidate).__qualname__} declares the Inductor key {key!r}, which torch "
                f"{_torch_compat.torch_version()} does not have.{meant}"
            )
            raise UnknownConfigKeyError(msg)
    candidate.uuid()
