# SPDX-License-Identifier: Apache-2.0
"""Passes that several tests make, what they note, and models to compile with them."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from magi_passes import MagiInductorPass, PassContext, Reason, _torch_compat
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


HOOK = "post_grad_custom_post_pass"
RELEASE = _torch_compat.config.numbers_of(torch.__version__)[:2]
seen: list[Any] = []


@dataclass(frozen=True)
class Spy(MagiInductorPass):
    """Notes what it starts from, changes it in graphs of the kinds in its field, and raises if it should."""

    inductor_config_keys_potentially_mutated_by_this_pass = ("size_asserts", "triton.max_tiles")
    kinds: tuple[str, ...] = ("inference", "forward", "backward")
    tiles: int = 3
    raises: type[BaseException] | None = None
    in_the_gate: bool = False

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        kind = context.graph.partition("_")[2]
        seen.append((kind, config.size_asserts, config.triton.max_tiles))
        if self.raises and self.in_the_gate:
            raise self.raises("now")
        return Reason(kind in self.kinds, "by kind")

    def __call__(self, graph: Graph) -> None:
        config.size_asserts = False
        config.triton.max_tiles = self.tiles
        if self.raises:
            raise self.raises("now")


@dataclass(frozen=True)
class Holds(MagiInductorPass):
    value: object = None

    def __call__(self, graph: Graph) -> None:
        pass


def at(name: str) -> MagiInductorPass:
    """A pass at the hook *name*, which notes that."""

    @dataclass(frozen=True)
    class At(MagiInductorPass):
        hook = name

        def __call__(self, graph: Graph) -> None:
            seen.append(name)

    return At()


class Foreign(CustomGraphPass):
    """A pass of another library, which notes its name and acts."""

    def __init__(self, name: str = "theirs", act: Callable[[], object] = bool) -> None:
        self.name, self.act = name, act

    def __call__(self, graph: Graph) -> None:
        seen.append(self.name)
        self.act()

    def uuid(self) -> str:
        return self.name


class Manager(CustomGraphPass):
    """As vLLM and SGLang have it: its passes are called one after the other in Inductor's hook."""

    def __init__(self, *passes: CustomGraphPass) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> str:
        return hashlib.sha256("".join(str(one.uuid()) for one in self.passes).encode()).hexdigest()


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def other(x: torch.Tensor) -> torch.Tensor:
    return x @ x @ x


def infer(fn: Any = product, options: Any = None) -> Any:
    """The result of *fn*, compiled anew."""
    torch._dynamo.reset()
    compiled: Any = torch.compile(fn, options=options)
    return compiled(torch.ones(4, 4))


def train(compiled: Any, size: int = 4) -> None:
    torch.autograd.backward(compiled(torch.ones(size, size, requires_grad=True)).sum())


def changes_since(before: Any) -> dict[str, tuple[Any, Any]]:
    return _torch_compat.config.config_changes(before, _torch_compat.config.read_overrides())


def trace(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[int] = ()) -> torch.fx.GraphModule:
    """The ATen graph of ``fn(*args)``, with the *dynamic* dimensions of the first argument symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for position, arg in enumerate(args):
        kinds = [
            DimDynamic.DYNAMIC if position == 0 and dim in dynamic else DimDynamic.STATIC for dim in range(arg.dim())
        ]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fakes.append(mode.from_tensor(arg, source=ConstantSource(f"arg{position}"), symbolic_context=context))
    with enable_python_dispatcher():
        return make_fx(fn, tracing_mode="real")(*fakes)


def decomposed(fn: Any, *args: torch.Tensor, sizes: Literal["fake", "symbolic"] = "fake") -> torch.fx.GraphModule:
    """The graph of ``fn(*args)`` as Inductor's hooks see it: group norms, for example, are taken apart."""
    return make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode=sizes)(*args)


def rewritten(gm: torch.fx.GraphModule, *passes: MagiInductorPass) -> torch.fx.GraphModule:
    """*gm* after *passes*, ready to run."""
    for one in passes:
        one(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def calls(gm: torch.fx.GraphModule, target: Any) -> list[Any]:
    return gm.graph.find_nodes(op="call_function", target=target)


def is_left_alone(gm: torch.fx.GraphModule, one: MagiInductorPass) -> bool:
    """Whether *one* does not apply to *gm*, and changes nothing if it is called all the same."""
    before = str(gm.graph)
    is_applicable = one.is_applicable(gm.graph, PassContext())
    one(gm.graph)
    return not is_applicable and str(gm.graph) == before


def pretend_cuda(gm: torch.fx.GraphModule, dtype: torch.dtype = torch.bfloat16) -> torch.fx.GraphModule:
    """*gm* with fake values that say they are on a GPU."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            element = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
            node.meta["val"] = FakeTensor(value.fake_mode, element, torch.device("cuda:0"))
    return gm


PASS = """
from dataclasses import dataclass
from magi_passes import MagiInductorPass
{before}
@dataclass(frozen=True)
class Mine(MagiInductorPass):
    def __call__(self, graph):
        {body}
"""


def made_pass(before: str = "", body: str = "pass", name: str = "made", filename: str = "<string>") -> Any:
    """The class `Mine` of a namespace that was run from text, as a prompt, a notebook and `python -c` do."""
    namespace: dict[str, Any] = {"__name__": name} if name else {}
    text = PASS.format(before=textwrap.dedent(before), body=body)
    exec(compile(text, filename, "exec", dont_inherit=True), namespace)
    return namespace["Mine"]


def globals_of(mine: Any) -> dict[str, Any]:
    """Those of the author's function, which is in the part that makes the pass safe by itself."""
    found: dict[str, Any] = inspect.unwrap(mine.__call__).__globals__
    return found
