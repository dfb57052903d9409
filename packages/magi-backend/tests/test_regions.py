# SPDX-License-Identifier: Apache-2.0
"""Blocks that repeat are compiled once, blocks that differ in what code depends on are not, and results stay."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from magi_backend import CompileConfig, _torch_compat, explain
from magi_backend._records.log import Collector, collecting
from magi_backend._regions import piece_structure, regions
from magi_backend._split import split_at
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


WIDTH = 8
CONVOLUTIONS = "convolutions choose their memory format for a whole graph"


class Block(nn.Module):
    """A norm, two products, dropout, a number of its own, a buffer that it writes, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.scale = 0.5
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def inner(self, x: Tensor) -> Tensor:
        x = self.up(self.norm(x)).sin().cos().neg().tanh()
        return functional.dropout(self.down(x).exp().neg().tanh().sin() * self.scale, 0.2, self.training)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.inner(x).cos().tanh().neg()


class Autocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class WithoutGrad(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            offset = self.inner(x)
        return super().forward(x) + offset


class Checkpointed(Block):
    def checkpointed(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        result = self.checkpointed(x)
        assert isinstance(result, Tensor)
        for _ in range(16):
            result = result.sin()
        return result


def _everything(*_: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _nothing(*_: object) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Checkpointed):
    policy = staticmethod(_everything)

    def checkpointed(self, x: Tensor) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)


class GivesAView(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.stack((y, y.neg())).unbind(0)[0]


class WritesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(super().forward(x.clone()))


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x * 2


def _found(
    model: nn.Module,
    x: Tensor,
    names: tuple[str, ...] = ("Block",),
    pieces: list[torch.fx.GraphModule] | None = None,
    **inductor: Any,
) -> tuple[Any, list[int]]:
    """What is said of the blocks of *model*, and for each piece which one it shares its code with; adds to *pieces*."""
    seen: list[tuple[Any, list[int]]] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        found = regions(gm, CompileConfig(regions=names), inductor)
        split = split_at(gm, frozenset(), found.blocks)
        parts: Any = [] if split is None else [split.module.get_submodule(attribute) for attribute in split.titles]
        structures = [piece_structure(part) for part in parts]
        if pieces is not None:
            pieces.extend(parts)
        seen.append((found, [structures.index(each) for each in structures]))
        return gm if split is None else split.module

    torch.compiler.reset()
    torch.manual_seed(0)
    expected = copy.deepcopy(model)(x.clone())
    torch.manual_seed(0)
    torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x.clone()), expected)
    (only,) = seen
    return only


# What is changed in one block of four.
CHANGES = {
    "another number": "block.scale = 0.25",
    "frozen": "block.up.weight.requires_grad_(False)",
    "wide": "block.up, block.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)",
    "transposed": "block.up.weight = nn.Parameter(weight.t().contiguous().t())",
    "with an offset": "block.up.weight = nn.Parameter(torch.randn(16 * WIDTH + 1)[1:].view(16, WIDTH))",
    "shared memory": "block.norm.weight, block.norm.bias = map(nn.Parameter, (weight[0], weight[0]))",
    "evaluated": "block.eval()",
    "another policy": "block.policy = _nothing",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_differs_has_code_of_its_own(change: str) -> None:
    kind = Selective if change == "another policy" else Block
    model = Stack(kind)
    block: Any = model.blocks[2]
    exec(CHANGES[change], globals(), {"block": block, "weight": block.up.weight.detach()})
    found, shared = _found(model, torch.randn(3, WIDTH), (kind.__name__,))

    assert found.found == (f"3 blocks {kind.__name__} of {len(found.blocks[0].nodes)} calls are compiled once",)
    assert shared == [0, 1, 1, 3, 1, 5]


class WritesBetween(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).exp()
            x += 1
        return x


class Identity(Block):
    """What may return its input writes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(x.dtype).contiguous())


class Combines(Block):
    """A block that combines a mask of all with its own, whose operator has the name ``and_``, and writes nothing."""

    mask = torch.ones(WIDTH, dtype=torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.where(self.mask & (y > 0), 0)


@pytest.mark.parametrize(
    "kind", [Block, WithoutGrad, Checkpointed, Selective, GivesAView, Autocast, Identity, Combines, WritesBetween]
)
def test_equal_blocks_share_code(kind: Any) -> None:
    stack, name = (kind(), "Block") if kind is WritesBetween else (Stack(kind), kind.__name__)
    found, shared = _found(stack, torch.randn(3, WIDTH), (name,))

    count = 3 if kind is WritesBetween else 4  # there the first has an input without a gradient
    assert found.found == (f"{count} blocks {name} of {len(found.blocks[0].nodes)} calls are compiled once",)
    # A view is made in the piece that uses it, which is the next block.
    others = {GivesAView: [0, 1, 2, 2, 2, 5], WritesBetween: [0, 1, 2, 1, 2, 1, 2]}
    assert shared == others.get(kind, [0, 1, 1, 1, 1, 5])


@pytest.mark.parametrize(
    ("inductor", "reason"),
    [
        ({"triton.cudagraphs": True}, "with CUDA graphs, one graph of everything is replayed faster than many"),
        ({"freezing": True}, "with freezing, the parameters of each are part of its code"),
    ],
)
def test_settings_that_need_one_graph(inductor: dict[str, Any], reason: str) -> None:
    found, shared = _found(Stack(), torch.randn(3, WIDTH), **inductor)

    (sentence,) = found.found
    assert sentence.endswith(f" calls are each compiled: {reason}")
    assert not shared


class Counts(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.nonzero().sum()


class Transposes(Stack):
    def forward(self, x: Tensor) -> Tensor:
        square = x.new_ones(WIDTH, 2)
        row = square[0]
        square.t_()
        return super().forward(x) + row.sum()


class Nested(Stack):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 3]))
        return super().forward(x) + rows.sin().values()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Counts, "the graph has a size that depends on data"),
        (Transposes, "a call changes the sizes of a tensor in place, after which Dynamo knows only the last ones"),
        (Nested, "a tensor of a subclass is in the graph"),
    ],
)
def test_a_graph_that_cannot_be_cut_is_left_whole(kind: type[Stack], reason: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found, shared = _found(kind(), torch.randn(3, WIDTH))
    assert found.found[0].endswith(f" calls are each compiled: {reason}")
    assert not shared


class GivenAView(Block):
    """A block whose first use of its second input is one without a gradient."""

    def forward(self, x: Tensor, view: Tensor | None = None) -> Tensor:
        assert view is not None
        with torch.no_grad():
            mean = view.sin().mean()
        return super().forward(x) * mean + view


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


def _all(x: Tensor) -> Tensor:
    return x[:, :]


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x[:, :]


def _of_a_function(x: Tensor) -> Tensor:
    apply: Callable[[Tensor], Tensor] = Clamped.apply
    return apply(x)


def _under_vmap(x: Tensor) -> Tensor:
    result: Tensor = torch.vmap(lambda row: row[:WIDTH])(x)
    return result


@pytest.mark.parametrize("view", [_all, _without_grad, _of_a_function, _under_vmap])
def test_the_gradient_of_a_view_that_several_blocks_use(view: Callable[[Tensor], Tensor]) -> None:
    class Gives(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            seen = view(x)
            for block in self.blocks:
                x = block(x, seen)
            return x

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        split = split_at(gm, frozenset(), regions(gm, CompileConfig(regions=("GivenAView",)), {}).blocks)
        assert split is not None
        # The first block has memory in common with its view.
        assert [*split.titles.values()] == ["piece 0", *["GivenAView"] * 3]
        return split.module

    torch.compiler.reset()
    model = Gives(GivenAView).eval()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(_trained(model, torch.compile(model, backend=backend), 3), _trained(twin, twin, 3))


def test_a_name_that_fits_no_block_is_said() -> None:
    found, _ = _found(Stack(), torch.randn(3, WIDTH), ("Blok",))

    assert found.found == ("magi.regions names Blok, of which no two blocks are equal",)


class Convolutional(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix(x[None])[0]
        return super().forward(x) + mixed.neg().neg()


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Stack(blocks=70), ["70 blocks Block of N calls are compiled once"]),
        (Stack(blocks=12), []),  # not worth the cuts
        (Stack(Convolutional, 70), ["70 blocks Convolutional of N calls are each compiled: " + CONVOLUTIONS]),
    ],
)  # fmt: skip
def test_what_is_cut_out_by_default(model: nn.Module, found: list[str]) -> None:
    said = regions(_captured(model), CompileConfig(), {}).found
    assert [re.sub(r"\d+ calls", "N calls", each) for each in said] == found
    assert not regions(torch.fx.symbolic_trace(nn.ReLU()), CompileConfig(regions=False), {}).found


def _trained(model: nn.Module, call: Callable[..., Any], rows: int) -> list[Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    model.zero_grad()
    result = call(x)
    result.square().sum().backward()
    gradients = [each.grad for each in (x, *model.parameters()) if each.grad is not None]
    return [result, *gradients, *(each.clone() for each in model.buffers())]


class IndexesWhatIsOlder(Stack):
    def forward(self, x: Tensor) -> Tensor:
        older: Tensor = self.first(x)
        last = super().forward(x)
        rows = last.argmax(-1) % x.shape[0]
        return last + older[rows, :] + older[rows % 2][:, None][:, 0]


def test_an_older_tensor_may_be_indexed_by_what_came_after_a_cut() -> None:
    _, shared = _found(IndexesWhatIsOlder(), torch.randn(3, WIDTH))

    assert len(set(shared)) < len(shared)


class CountsInAll(Block):
    """A block with a number without a gradient that all blocks write, and that a backward may compute again."""

    total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.total.exp()
        self.total *= 2
        return y


class Rectified(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(super().forward(x.clone()) * x, inplace=True) + functional.relu(x, inplace=True)


@pytest.mark.parametrize("kind", [WritesItsInput, CountsInAll, Rectified])
def test_blocks_that_write_to_what_a_backward_may_need_are_left_in_the_graph(kind: type[Block]) -> None:
    found, shared = _found(Stack(kind), torch.randn(3, WIDTH), (kind.__name__,))

    (sentence,) = found.found
    assert sentence.endswith(" calls are each compiled: a tensor that a backward may need is written after a cut")
    assert not shared
    with torch.no_grad():
        _, shared = _found(Stack(kind), torch.randn(3, WIDTH), (kind.__name__,))
    assert shared == [0, 1, 1, 1, 4, 5]


class Modulated(Block):
    """A block whose first product is one of the step, as in a diffusion transformer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.down(functional.silu(self.up(self.calls.expand(WIDTH)))))


class Turns(Stack):
    """Blocks of two kinds in turn, as where one layer of two attends to a window."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3) for kind in (Block, Modulated))


class Apart(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).cos()
        return x * 2


@pytest.mark.parametrize(
    ("model", "shared", "ends"),
    [
        (Stack(), [0, 1, 1, 1, 4, 5], ["layer_norm"] * 4 + ["add", "mul"]),
        (Stack(Modulated), [0, 1, 1, 1, 4, 5], ["layer_norm"] * 4 + ["add", "mul"]),
        (Turns(), [0, 1, 2, 1, 2, 1, 6, 7], ["layer_norm"] * 6 + ["add", "mul"]),
        (Apart(), [0, 1, 2, 1, 2, 1, 2, 1, 8], ["linear", "add", "cos", "add", "cos", "add", "cos", "add", "mul"]),
        (Stack(Autocast), [0, 1, 1, 1, 1, 5], ["linear", *["_exit_autocast"] * 4, "mul"]),
        (Stack(Checkpointed), [0, 1, 1, 1, 1, 5], ["linear", *["sin"] * 4, "mul"]),
    ],
    ids=["one kind", "modulated", "in turn", "apart", "autocast", "checkpointed"],
)
def test_without_gradients_the_norm_of_a_block_is_in_the_piece_of_the_residual_that_it_normalises(
    model: nn.Module, shared: list[int], ends: list[str]
) -> None:
    pieces: list[torch.fx.GraphModule] = []
    kinds = tuple({type(block).__name__ for block in model.blocks})  # type: ignore[union-attr]
    with torch.no_grad():
        _, seen = _found(model, torch.randn(3, WIDTH), kinds, pieces)
    calls = [[node for node in piece.graph.nodes if node.op.startswith("call_")] for piece in pieces]
    assert seen == shared
    assert [_torch_compat.nodes.called_name(nodes[-1]) for nodes in calls] == ends


@pytest.mark.parametrize("kind", [Block, WritesItsInput, Checkpointed])
def test_results_gradients_and_buffers_are_those_of_eager(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Stack(kind)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"magi.regions": kind.__name__, "fallback_random": True}
    compiled = torch.compile(model, backend="magi", dynamic=True, fullgraph=True, options=options)
    for rows in (3, 5, 6):
        torch.testing.assert_close(_trained(model, compiled, rows), _trained(twin, twin, rows), rtol=1e-4, atol=1e-5)


def test_the_report_and_the_check_of_each_block() -> None:
    options = {"magi.regions": "Block", "magi.check": True}
    report = explain(Stack().eval(), options=options)(torch.randn(3, WIDTH))

    (one,) = report.compilations
    assert one.pieces == ("piece 0", *["Block"] * 4, "piece 1")
    assert [graph.piece for graph in one.graphs if graph.kind == "forward"] == ["piece 0", "Block", "piece 1"]
    assert [check.piece for check in one.checks] == list(one.pieces)
    assert "pieces piece 0 | 4 times Block | piece 1" in str(report)
    assert re.search("4 blocks Block of [0-9]+ calls are compiled once", str(report))


class Attends(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        heads = x[None, None]
        return super().forward(x) + functional.scaled_dot_product_attention(heads, heads, heads, mask)[0, 0]


class OneMask(Stack):
    """The blocks have a mask in common."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0])
        mask = places[None, :] <= places[:, None]
        for block in self.blocks:
            x = block(x, mask)
        return x


def test_a_mask_that_blocks_have_in_common_is_known_in_each() -> None:
    torch.manual_seed(0)
    model, x = OneMask(Attends).eval(), torch.randn(3, WIDTH)
    expected = copy.deepcopy(model)(x)
    report = explain(model, dynamic=True, options={"magi.regions": "Attends"})(x)

    assert "before the cuts: of 4 masks of attention, 0 hide nothing and 4 what comes later" in str(report)
    assert re.search("3 blocks Attends of [0-9]+ calls are compiled once", str(report))
    torch.testing.assert_close(torch.compile(model, backend="magi", dynamic=True)(x), expected)


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.25

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = shape = x.shape
        return super().forward(x).clone().view(shape) * self.scale + rows


def test_floats_of_modules_are_constants_of_the_first_graph() -> None:
    """With ``dynamic=True``, each float would be an input with its own symbol. The block also uses a shape."""
    torch.manual_seed(0)
    model = Stack(Scaled).eval()
    seen: list[tuple[str, ...]] = []
    with collecting(Collector()) as collector:
        compiled = torch.compile(model, backend="magi", dynamic=True, options={"magi.regions": "Scaled"})
        for rows in (3, 5):
            x = torch.randn(rows, WIDTH)
            torch.testing.assert_close(compiled(x), model(x))
        blocks: Any = model.blocks
        for block in blocks:
            block.scale = 0.5
        x = torch.randn(6, WIDTH)
        torch.testing.assert_close(compiled(x), model(x))
        seen += [one.regions for one in collector.compilations()]

    first, second = seen
    assert first[0].startswith("4 blocks Scaled of ")
    assert second == ("magi.regions names Scaled, of which no two blocks are equal",)  # it is an input from then on


def test_a_result_that_torch_saves_is_one_graph() -> None:
    with torch._dynamo.config.patch(caching_precompile=True):
        found = regions(_captured(Stack()), CompileConfig(regions=("Block",)), {})

    assert found.found[0].endswith("the result is saved, for which torch needs one graph")
    assert not found.blocks


def _captured(model: nn.Module) -> torch.fx.GraphModule:
    kept: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        kept.append(gm)
        return gm

    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(3, WIDTH))
    return kept[0]
