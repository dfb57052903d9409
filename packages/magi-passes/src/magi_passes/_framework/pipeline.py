# SPDX-License-Identifier: Apache-2.0
"""Several passes as the options of one compilation, as one pass, or as the setting of a block of code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass

from magi_passes import _torch_compat
from magi_passes._identity.code import digest
from magi_passes.errors import PassArgumentError, PassArgumentTypeError, PassDefinitionError

from .compilation import within
from .declared import check_is_frozen, check_keys_exist, nearest
from .graph_pass import MagiInductorPass, PipelineHook, install, outside_of_current, parts_of


@dataclass(frozen=True, init=False)
class PassPipeline:
    """Passes in the order in which they run, for any caller of Inductor.

    Example:
        >>> import torch
        >>> from magi_passes import NDTilingWorkaroundPass, PassPipeline
        >>> pipeline = PassPipeline([NDTilingWorkaroundPass()])
        >>> compiled = torch.compile(lambda x: x + 1, options=pipeline.inductor_options({"max_autotune": False}))

    Args:
        passes: Instances of `MagiInductorPass` subclasses. Each runs at its own `hook`; order matters within a hook.

    Raises:
        PassDefinitionError: One of *passes* is not a pass, or its class is not a frozen dataclass.
        PassArgumentTypeError: *passes* is a single pass, a string or not iterable.
        UnknownConfigKeyError: A pass declares a key that the running torch does not have.
        PassIdentityError: A pass holds a value that has no stable form.
        UnknownPassNameError: MAGI_PASSES_DISABLE names a pass that does not exist.
    """

    passes: tuple[MagiInductorPass, ...]

    def __init__(self, passes: Iterable[MagiInductorPass]) -> None:
        listed = _listed(passes)
        object.__setattr__(self, "passes", listed)
        for position, candidate in enumerate(listed):
            if not isinstance(candidate, MagiInductorPass):
                as_function = "Subclass MagiInductorPass, or give a function of a graph to adapt()."
                hint = "Pass an instance, not the class." if isinstance(candidate, type) else as_function
                raise PassDefinitionError(
                    f"PassPipeline: item {position} is {candidate!r}, which is not a MagiInductorPass instance. {hint}"
                )
            check_is_frozen(type(candidate))
            check_keys_exist(type(candidate))
            candidate.uuid()

    def __iter__(self) -> Iterator[MagiInductorPass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def uuid(self) -> str:
        """One digest over the uuids of all passes, in order."""
        return digest(*(p.uuid() for p in self.passes))

    def inductor_options(self, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Options that run this pipeline, for ``torch.compile(options=…)`` or ``compile_fx(config_patches=…)``.

        Only the hooks are set. The configuration is read when a compilation starts, not here.

        Args:
            base: Options to start from. They are kept: hooks in them, also those of another pipeline, run first, and no
                pass may change a key that is in them. Keys added to the result later count as the user's too.

        Returns:
            A new dict; *base* stays as it is.

        Raises:
            PassArgumentError: *base* has a misspelt option.
            PassArgumentTypeError: *base* is not a mapping with strings for keys, or holds something that cannot be
                called where a hook should be.
        """
        install()
        options = _options(base)
        user_keys = frozenset(options) - frozenset(_torch_compat.config.HOOKS)
        for name in _torch_compat.config.HOOKS:
            passes = tuple(p for p in self.passes if p.hook == name)
            if passes:
                before = options.get(name)
                keys = before.user_keys if isinstance(before, PipelineHook) else frozenset()
                options[name] = PipelineHook(name, (*parts_of(before), *passes), user_keys | keys)
        return options

    def as_pass(self) -> CustomGraphPass:
        """The whole pipeline as one pass, for a pass manager that is called from one of Inductor's hooks.

        It asks each pass and writes its record, and the configuration comes back when the compilation ends. Its
        ``uuid()`` must be part of the uuid of the manager. The passes run where the manager is called, those for
        ``post_grad_custom_pre_pass`` first; call it from a post-grad hook.

        Example:
            >>> from magi_passes import NDTilingWorkaroundPass, PassPipeline
            >>> ours = PassPipeline([NDTilingWorkaroundPass()]).as_pass()
            >>> ours.uuid() == ours.uuid()
            True

        Raises:
            PassArgumentError: The passes cannot run in one place: the hooks of some have graphs of another form.
        """
        return PipelineHook("", tuple(sorted(self.passes, key=lambda p: _torch_compat.config.HOOKS.index(p.hook))))

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Run this pipeline in every compilation that starts inside the ``with`` block, whatever its options.

        This is for a backend that calls Inductor itself. Hooks that are installed already run first. A pass that is
        called inside the block without any compilation may change configuration too; all of it is restored at the end.
        The backward graphs of what was compiled inside get the pipeline as well, whenever they are compiled.

        `torch._inductor.compile_fx.compile_fx` is replaced when the first pass is made. A backend that took it by name
        before that passes the pipeline by: a warning says so.

        Example:
            >>> import torch
            >>> from magi_passes import NDTilingWorkaroundPass, PassPipeline
            >>> with PassPipeline([NDTilingWorkaroundPass()]).scope():
            ...     pass  # compiled = compile_fx(gm, example_inputs)
        """
        with outside_of_current():
            start = _torch_compat.config.read_overrides()
            installed = {name: _torch_compat.config.get_config(name) for name in _torch_compat.config.HOOKS}
            try:
                for name, hook in self.inductor_options(installed).items():
                    if hook is not installed[name]:
                        _torch_compat.config.set_config(name, hook)
                with within(scope=start, scoped=bool(self.passes)):
                    yield
            finally:
                _torch_compat.config.restore_overrides(start)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave the passes of this pipeline out of every compilation that starts inside the ``with`` block.

        The other hooks of the current configuration stay. This is for a backend that compiles a graph again, because
        one of the passes has failed; an error has the hook that raised it in the attribute ``failed_pass``.
        """
        ours = {id(part) for part in self.passes}
        kept = {}
        for name in _torch_compat.config.HOOKS:
            hook = _torch_compat.config.get_config(name)
            if isinstance(hook, PipelineHook):
                others = tuple(part for part in hook.parts if id(part) not in ours)
                kept[name] = replace(hook, parts=others) if others else None
        with _torch_compat.config.patched(kept):
            yield


def _listed(passes: object) -> tuple[Any, ...]:
    if isinstance(passes, Iterable) and not isinstance(passes, (str, bytes, Mapping)):
        return tuple(passes)
    is_pass = isinstance(passes, MagiInductorPass) or (
        isinstance(passes, type) and issubclass(passes, MagiInductorPass)
    )
    advice = "Put it into a list: PassPipeline([...])." if is_pass else "Give a list of passes."
    raise PassArgumentTypeError(f"PassPipeline: passes is {passes!r}, of type {type(passes).__qualname__}. {advice}")


def _options(base: object) -> dict[str, Any]:
    if base is None:
        return {}
    if not isinstance(base, Mapping) or not all(isinstance(key, str) for key in base):
        msg = f"inductor_options: base must be a dict of Inductor's options by name, or None; got {base!r}."
        raise PassArgumentTypeError(msg)
    options = {key.replace("-", "_"): value for key, value in base.items()}
    known = _torch_compat.config.config_keys()
    for key in options.keys() - known:
        if meant := nearest(key, known):  # torch refuses any other, and takes some that are not configuration
            raise PassArgumentError(f"inductor_options: base has {key!r}, which is not an option of Inductor.{meant}")
    for name in _torch_compat.config.HOOKS:
        for part in parts_of(options.get(name)):
            if isinstance(part, type) or not callable(part):
                what = "a class; pass an instance" if isinstance(part, type) else "nothing that can be called"
                raise PassArgumentTypeError(f"inductor_options: base has {part!r} at {name}, which is {what}.")
    return options
