# SPDX-License-Identifier: Apache-2.0
"""Whether a body writes into a Tensor that its operator's schema does not name, seen while AOTAutograd traces it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magi_tritonwrap._torch_compat import functional_storage, qualified_name, writes_traced
from magi_tritonwrap.errors import UndeclaredWriteError


if TYPE_CHECKING:
    from torch._ops import OpOverload


@dataclass(frozen=True)
class TracedArguments:
    """The Tensors of one call that the schema does not say are written, and how often each was until now."""

    op: OpOverload
    tensors: tuple[tuple[str, Any, int], ...]

    def refuse_writes(self) -> None:
        """Refuse what the body has done since.

        Where every Tensor seems written nothing is refused: of a kernel that it cannot read, torch says so.

        Raises:
            UndeclaredWriteError: it wrote into some of these Tensors.
        """
        written = [name for name, tensor, count in self.tensors if writes_traced(tensor) != count]
        if not written or len(written) == len(self.tensors):
            return
        listed = " and ".join(f"'{name}'" for name in written)
        text = f"{qualified_name(self.op)}: the body launches a kernel that writes into {listed}, which the schema of "
        why = "the operator does not say: outside of a compiled graph, nothing would know that the Tensor changed. "
        raise UndeclaredWriteError(f"{text}{why}Name it: mutates_args=({', '.join(map(repr, written))},).")


def see_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedArguments:
    """What *op* is called with, before its body is traced, without what shares memory with a Tensor to be written."""
    found = list(_named(op, args, kwargs))
    written = {functional_storage(tensor) for _, tensor, is_written in found if is_written}
    kept = [(name, tensor) for name, tensor, _ in found if functional_storage(tensor) not in written]
    return TracedArguments(op, tuple((name, tensor, writes_traced(tensor)) for name, tensor in kept))


def _named(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """The name of each Tensor, the Tensor, and whether the schema says that it is written."""
    arguments = op._schema.arguments  # noqa: SLF001
    given = kwargs | {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    for argument in arguments:
        value = given.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if functional_storage(tensor) is not None:
                yield argument.name, tensor, is_written
