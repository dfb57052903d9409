# SPDX-License-Identifier: Apache-2.0
"""Detect, while AOTAutograd traces a body, a write into a Tensor that the operator's schema does not declare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magi_tritonwrap._torch_compat.operators import qualified_name
from magi_tritonwrap._torch_compat.tracing import functional_storage, writes_traced
from magi_tritonwrap.errors import UndeclaredWriteError


if TYPE_CHECKING:
    from torch._ops import OpOverload


@dataclass(frozen=True)
class TracedArguments:
    """The Tensors of one call that the schema does not declare as written, and how often each was written."""

    op: OpOverload
    tensors: tuple[tuple[str, Any, int], ...]

    def refuse_writes(self) -> None:
        """Raise if the body has written into one of these Tensors since.

        If every Tensor seems written, nothing is raised, because torch reports that for a kernel that it cannot
        analyse.

        Raises:
            UndeclaredWriteError: the body wrote into some of these Tensors, but not all.
        """
        written = [name for name, tensor, count in self.tensors if writes_traced(tensor) != count]
        if not written or len(written) == len(self.tensors):
            return
        listed = " and ".join(f"'{name}'" for name in written)
        text = f"{qualified_name(self.op)}: the body launches a kernel that writes into {listed}, which the schema of "
        why = "the operator does not declare: outside of a compiled graph, nothing would know that the Tensor changed. "
        raise UndeclaredWriteError(f"{text}{why}Name it: mutates_args=({', '.join(map(repr, written))},).")


def see_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedArguments:
    """The Tensors of a call, before its body is traced; without those that share memory with a declared write."""
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
