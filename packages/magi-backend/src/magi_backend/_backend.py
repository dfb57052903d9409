# SPDX-License-Identifier: Apache-2.0
"""The function behind ``torch.compile(backend="magi")``. Loading it imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import GraphModule

    from ._settings import ConfigPatch


def magi(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured; use it as ``torch.compile(model, backend="magi")``.

    Args:
        gm: The captured graph.
        example_inputs: Fake tensors, symbolic sizes and constants, one for each input of *gm*.
        mode: As in ``torch.compile``. ``options={"magi.mode": ...}`` means the same, and can be given with other
            options.
        options: Settings of :class:`CompileConfig` as ``magi.*``, and keys of ``torch._inductor.config``.

    Returns:
        The compiled function.

    Raises:
        OptionError: An unknown option, one of the wrong type, or two modes.
        ConfigError: A malformed ``MAGI_COMPILE_*`` variable.
        TargetTypeError: *gm* is not a graph.
    """
    return _compiled(gm, example_inputs, mode=mode, options=options)


@dataclass(frozen=True)
class PatchedBackend:
    """The backend with a ``config_patch`` and a label, for ``magi_compile``. Two are equal if both are equal."""

    __name__ = "magi"

    config_patch: ConfigPatch | None = field(hash=False)
    label: str

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile *gm*, as :func:`magi` does."""
        return _compiled(gm, example_inputs, config_patch=self.config_patch, label=self.label)


def _compiled(gm: object, example_inputs: Sequence[Any], **asked: Any) -> Callable[..., Any]:
    from torch.fx import GraphModule

    from ._compose import compile_request
    from ._settings import read_request
    from ._torch_compat.compiling import as_itself
    from .errors import TargetTypeError, family

    if not isinstance(gm, GraphModule):
        raise TargetTypeError(
            f"magi compiles a graph that Dynamo captured, and got {gm!r} (a {type(gm).__name__}). "
            'Write torch.compile(model, backend="magi").'
        )
    try:
        return compile_request(gm, example_inputs, read_request(**asked))
    except Exception as error:
        itself = as_itself(error, family())
        if itself is error:
            raise
        raise itself from itself.__cause__
