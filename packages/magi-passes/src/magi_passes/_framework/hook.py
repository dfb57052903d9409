# SPDX-License-Identifier: Apache-2.0
"""What a pipeline puts into one of Inductor's hooks: its passes, and the hooks that were there before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch._inductor.custom_graph_pass import CustomGraphPass

from magi_passes import _torch_compat
from magi_passes._identity.code import digest

from .compilation import collectors_of_current, current_compilation
from .context import PassContext, context_of
from .declared import DeclaredPass
from .disable import disabled_passes
from .records import PassRecord, observed, trace
from .run import run_pass


if TYPE_CHECKING:
    from torch.fx import Graph


@dataclass(frozen=True)
class PipelineHook(CustomGraphPass):
    """The value of one hook option. It is a single object, because a hook of torch before 2.13 holds one pass.

    Attributes:
        name: The Inductor option that holds this object; empty when another library's manager holds it.
        parts: Passes of this package, and any other hook, in the order in which they run.
        user_keys: Inductor keys that the user set in the options, whatever their value.
    """

    name: str
    parts: tuple[Any, ...]
    user_keys: frozenset[str] = frozenset()

    @property
    def passes(self) -> tuple[DeclaredPass, ...]:
        """The parts that are passes of this package."""
        return tuple(part for part in self.parts if isinstance(part, DeclaredPass))

    @property
    def declared_keys(self) -> frozenset[str]:
        """Every Inductor key that one of the passes may change."""
        return frozenset(key for p in self.passes for key in p.inductor_config_keys_potentially_mutated_by_this_pass)

    def __call__(self, graph: Graph) -> None:
        """Run the parts on *graph* in order, in the current compilation or scope, and record each pass.

        An error that leaves it has the part that raised it in the attribute ``failed_pass``.
        """
        context = context_of(graph, self.name, self.declared_keys, self.user_keys)
        compilation = current_compilation()
        if compilation is not None:
            compilation.asked.append(self.name)
        records: list[PassRecord] = []
        try:
            for part in self.parts:
                if isinstance(part, DeclaredPass):
                    records.append(run_pass(part, graph, context))
                else:
                    with observed(_name_of(part), graph, collectors_of_current()):
                        _call(part, graph, context)
        except Exception as error:
            vars(error)["failed_pass"] = part
            raise
        finally:
            trace(records)

    def uuid(self) -> str | None:
        """One uuid for all parts; None, which turns Inductor's caches off, if a hook of the user has none.

        The user's keys count if a pass declares them: setting ``triton.max_tiles`` to its default changes what the pass
        may do, and no other part of the cache key shows it. The names that the environment disables count for the same
        reason.
        """
        uuids = [_uuid_of(part) for part in self.parts]
        if not all(uuids):
            return None
        kept_keys = sorted(self.user_keys & self.declared_keys)
        # Every name counts, also those of passes that are not in the pipeline, because a chooser reads them too.
        return digest(self.name, *map(str, uuids), "|", *kept_keys, "|", *sorted(disabled_passes()))

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineHook:
        # Reading Inductor's whole configuration copies it deeply, hooks too; the copy must be recognised as this hook.
        return self


def parts_of(value: object) -> tuple[Any, ...]:
    """The hooks inside the value of a hook option: None, one hook, a list of them, or a pipeline's."""
    if value is None:
        return ()
    if isinstance(value, PipelineHook):
        return value.parts
    if isinstance(value, (list, tuple)):
        return tuple(part for item in value for part in parts_of(item))
    return (value,)


def _call(part: Any, graph: Graph, context: PassContext) -> None:
    if _torch_compat.is_inference_aware(part):
        part(graph, is_inference=context.is_inference)
    else:
        part(graph)


def _name_of(part: object) -> str:
    return str(getattr(part, "__name__", type(part).__name__))


def _uuid_of(part: object) -> object:
    return part.uuid() if isinstance(part, CustomGraphPass) else None


def as_pipeline_hook(name: str, *values: object) -> PipelineHook | None:
    """*values* of the hook option *name* as one pipeline hook; None when no pass of this package is among them.

    A pass that is in the option without a pipeline becomes a pipeline of one.
    """
    if len(values) == 1 and isinstance(values[0], PipelineHook):
        return values[0] if values[0].name == name else replace(values[0], name=name)
    parts = tuple(part for value in values for part in parts_of(value))
    if not any(isinstance(part, DeclaredPass) for part in parts):
        return None
    return PipelineHook(name, parts, frozenset().union(*map(_user_keys_of, values)))


def _user_keys_of(value: object) -> frozenset[str]:
    if isinstance(value, PipelineHook):
        return value.user_keys
    items = value if isinstance(value, (list, tuple)) else ()
    return frozenset().union(*map(_user_keys_of, items))
