# SPDX-License-Identifier: Apache-2.0
"""What a pipeline puts into one of Inductor's hooks: its passes, and the hooks that were there before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch._inductor.custom_graph_pass import CustomGraphPass

from . import _torch_compat
from ._code import digest
from ._compilation import Compilation, current_compilation
from ._context import PassContext
from ._disable import disabled_passes
from ._pass import MagiInductorPass
from ._records import PassRecord, active_collectors
from ._run import run_parts


if TYPE_CHECKING:
    from torch.fx import Graph


@dataclass(frozen=True)
class Binding:
    """What one call of `compile_fx` adds to a hook, for the graphs it compiles now and the backward ones later."""

    collectors: tuple[list[PassRecord], ...] = ()
    asked: list[str] = field(default_factory=list)
    """Names of the graphs whose passes were asked; empty after the call when a cache had everything."""


@dataclass(frozen=True)
class PipelineHook(CustomGraphPass):
    """The value of one hook option. One object on every torch: before 2.13 a hook holds a single pass.

    Attributes:
        name: The Inductor option that holds this object.
        parts: Passes of this package, and any other hook, in the order in which they run.
        user_keys: Inductor keys that the user set in the options, whatever their value.
        binding: Set on the copy that one call of `compile_fx` runs with.
    """

    name: str
    parts: tuple[Any, ...]
    user_keys: frozenset[str] = frozenset()
    binding: Binding | None = field(default=None, compare=False, repr=False)

    @property
    def passes(self) -> tuple[MagiInductorPass, ...]:
        """The parts that are passes of this package."""
        return tuple(part for part in self.parts if isinstance(part, MagiInductorPass))

    @property
    def declared_keys(self) -> frozenset[str]:
        """Every Inductor key that one of the passes may change."""
        return frozenset(key for p in self.passes for key in p.inductor_config_keys_potentially_mutated_by_this_pass)

    def __call__(self, graph: Graph) -> None:
        """Run the parts on *graph*, in the compilation that is under way."""
        compilation = current_compilation()
        context = self._context(graph, compilation)
        if compilation is not None:
            compilation.asked.append(self.name)
        if self.binding is not None:
            self.binding.asked.append(context.graph)
        run_parts(self.parts, graph, context, self.collectors)

    @property
    def collectors(self) -> tuple[list[PassRecord], ...]:
        """Who wants the records of the passes: those that were there when the call of `compile_fx` began."""
        return active_collectors() if self.binding is None else self.binding.collectors

    def _context(self, graph: Graph, compilation: Compilation | None) -> PassContext:
        if compilation is None:
            return PassContext(hook=self.name, user_keys=self.user_keys, compile_id=_torch_compat.current_compile_id())
        config = compilation.config
        chosen = frozenset(key for key in self.declared_keys if config[key] != _torch_compat.default_of(key))
        return PassContext(
            graph=compilation.graph,
            compile_id=compilation.compile_id,
            is_backward=compilation.is_backward,
            is_inference=compilation.is_inference,
            is_subgraph=graph is not compilation.gm.graph,
            hook=self.name,
            example_inputs=compilation.example_inputs,
            user_keys=self.user_keys | chosen,
            config=config,
        )

    def uuid(self) -> str | None:
        """One uuid over all parts; None, which turns Inductor's caches off, when a foreign part has none.

        The user's keys count where a pass declares them: setting ``triton.max_tiles`` to its default changes what
        the pass may do, and no other part of the cache key shows it. So does what the environment disables.
        """
        uuids = [_uuid_of(part) for part in self.parts]
        if not all(uuids):
            return None
        kept_keys = sorted(self.user_keys & self.declared_keys)
        # Every name counts, also of passes that are not in the pipeline: a chooser asks too.
        return digest(self.name, *map(str, uuids), "|", *kept_keys, "|", *sorted(disabled_passes()))

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineHook:
        # Reading Inductor's whole configuration copies it deeply, hooks too; the copy must be recognised as this hook.
        return self

    def merged_after(self, installed: object) -> PipelineHook:
        """This hook with the parts of *installed*, another value of the same option, before its own."""
        parts = parts_of(installed)
        keys = installed.user_keys if isinstance(installed, PipelineHook) else frozenset()
        return replace(self, parts=(*parts, *self.parts), user_keys=self.user_keys | keys)


def parts_of(value: object) -> tuple[Any, ...]:
    """The hooks inside the value of a hook option: None, one hook, a list of them, or a pipeline's."""
    if value is None:
        return ()
    if isinstance(value, PipelineHook):
        return value.parts
    if isinstance(value, (list, tuple)):
        return tuple(part for item in value for part in parts_of(item))
    return (value,)


def _uuid_of(part: object) -> object:
    return part.uuid() if isinstance(part, CustomGraphPass) else None


def as_pipeline_hook(name: str, value: object) -> PipelineHook | None:
    """*value* of the hook option *name* as one pipeline hook; None when no pipeline is in it."""
    if isinstance(value, PipelineHook):
        return value
    if isinstance(value, (list, tuple)):
        inside = [hook for item in value if (hook := as_pipeline_hook(name, item)) is not None]
        if inside:
            return PipelineHook(name, parts_of(value), frozenset().union(*(hook.user_keys for hook in inside)))
    return None
