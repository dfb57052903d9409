# SPDX-License-Identifier: Apache-2.0
"""Records all through torch: saved programs, transforms, control flow, two ranks; and what torch refuses."""

from __future__ import annotations

import enum
import io
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.utils._pytree as pytree
from magi_opschema import magi_register_custom_op
from magi_opschema.errors import RecordTreeError
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch.fx.experimental.proxy_tensor import make_fx


T = TypeVar("T")
X = torch.arange(1.0, 4.0)


class Mode(enum.Enum):
    RMS = 1
    LAYER = "layer"


@dataclass(frozen=True)
class Inner:
    scale: Tensor
    eps: float = 1e-6


@dataclass(frozen=True)
class Cfg:
    inner: Inner
    weight: Tensor
    other: Inner | None = None
    rest: tuple[Tensor, ...] = ()
    count: int = 3
    mode: Mode = Mode.RMS
    halves: float = field(init=False, default=0.5)

    def __post_init__(self) -> None:
        assert isinstance(self.weight, Tensor), "torch unflattens with other things, and nothing of the user's may run"


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class Slotted:
    weight: Tensor
    eps: float = 1.0


@dataclass(frozen=True)
class OutInner:
    twice: Tensor


@dataclass(frozen=True)
class Out:
    inner: OutInner
    thrice: Tensor
    pair: tuple[Tensor, Tensor]


def derive(ctx: Any, grad: Tensor) -> Any:
    return grad * 6, {"weight": grad * 5, "inner": {"scale": grad * 7}}


@magi_register_custom_op("opschema_records::scale", infer_output_meta_fn=["x"], backward_fn=derive)
def scale(x: Tensor, cfg: Cfg) -> Tensor:
    return x * cfg.weight * cfg.inner.scale


@magi_register_custom_op("opschema_records::boxes", infer_output_meta_fn=["x"])
def boxes(x: Tensor, box: Box[Tensor], nested: Box[Inner], slotted: Slotted) -> Tensor:
    return x * box.value * nested.value.scale * slotted.weight


@magi_register_custom_op("opschema_records::make", infer_output_meta_fn=lambda x: Out(OutInner(x), x, (x, x)))
def make(x: Tensor) -> Out:
    return Out(OutInner(x * 2), x * 3, (x * 4, x * 5))


def cfg(value: float = 2.0, *shape: int, **options: Any) -> Cfg:
    sized = shape or (3,)
    return Cfg(Inner(torch.full(sized, value)), torch.full(sized, value + 1), **options)


def plus_one(record: Any) -> Any:
    return pytree.tree_map(lambda tensor: tensor + 1, record)


def same(actual: object, expected: object) -> None:
    leaves, spec = pytree.tree_flatten(actual)
    others, other_spec = pytree.tree_flatten(expected)
    assert spec == other_spec
    torch.testing.assert_close(leaves, others)


class Calls(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def saved_and_loaded(program: torch.export.ExportedProgram) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    # The example inputs are in the file; torch loads their classes without a word if they are declared safe.
    with torch.serialization.safe_globals([Cfg, Inner, Box, Slotted, Mode]):
        return torch.export.load(file).module()


EXPORTED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "nested": (scale, (X, cfg()), (X, cfg(5.0))),
    "every field": (
        scale,
        (X, cfg(other=Inner(X, float("nan")), rest=(X, X), mode=Mode.LAYER)),
        (X, cfg(5.0, other=Inner(X, float("nan")), rest=(X, X), mode=Mode.LAYER)),
    ),
    "generic and slotted": (
        boxes,
        (X, Box(X.clone()), Box(Inner(X.clone())), Slotted(X.clone())),
        (X, Box(X + 1), Box(Inner(X + 2)), Slotted(X + 3)),
    ),
    "in containers": (lambda x, held: scale(x, held["a"][0]), (X, {"a": [cfg()]}), (X, {"a": [cfg(5.0)]})),
    "returned": (make, (X,), (X + 1,)),
    "returned in a list": (lambda x: [make(x), {"out": make(x + 1)}], (X,), (X + 1,)),
    "passed on": (plus_one, (cfg(),), (cfg(5.0),)),
    "made in the forward": (lambda x: Box(Slotted(x + 1)), (X,), (X + 1,)),
}


@pytest.mark.parametrize("strict", [False, True])
class TestExport:
    """torch.export of models that take and return records."""

    @pytest.mark.parametrize("kind", EXPORTED)
    def test_round_trip(self, strict: bool, kind: str) -> None:
        fn, example, other = EXPORTED[kind]
        program = torch.export.export(Calls(fn), example, strict=strict)
        for run in (program.module(), saved_and_loaded(program)):
            same(run(*other), fn(*other))

    def test_by_keyword(self, strict: bool) -> None:
        program = torch.export.export(Calls(scale), (X,), {"cfg": cfg()}, strict=strict)
        same(saved_and_loaded(program)(X, cfg=cfg(5.0)), scale(X, cfg(5.0)))

    @pytest.mark.parametrize("form", ["by place", "collected", "automatic"])
    def test_dynamic_shapes(self, strict: bool, form: str) -> None:
        size: Any = torch.export.Dim.AUTO if form == "automatic" else torch.export.Dim("size")
        x, record = X.clone(), cfg()
        shapes: Any = ({0: size}, [[{0: size}], {0: size}])
        if form == "collected":
            shapes = torch.export.ShapesCollection()
            for tensor in (x, record.weight, record.inner.scale):
                shapes[tensor] = {0: size}
        model = Positional()
        program = torch.export.export(model, (x, record), strict=strict, dynamic_shapes=shapes)
        other = cfg(5.0, 7)
        same(saved_and_loaded(program)(torch.ones(7), other), scale(torch.ones(7), other))

    @pytest.mark.parametrize("change", [{"count": 4}, {"mode": Mode.LAYER}, {"count": True}], ids=str)
    def test_other_fields_are_constants(self, strict: bool, change: dict[str, Any]) -> None:
        program = torch.export.export(Calls(scale), (X, cfg()), strict=strict)
        with pytest.raises(Exception, match=r"tree ?spec|structure|match"):
            saved_and_loaded(program)(X, cfg(**change))

    def test_two_classes_of_one_name_are_refused(self, strict: bool, ns: str) -> None:
        def local(number: int) -> Any:
            @dataclass(frozen=True)
            class Local:
                weight: Tensor

            def body(x: Tensor, value: Any) -> Tensor:
                return torch.mul(x, value.weight)

            body.__annotations__["value"] = Local
            return magi_register_custom_op(f"{ns}::op{number}", infer_output_meta_fn=["x"])(body), Local

        for op, cls in [local(1), local(2)]:
            program = torch.export.export(Calls(op), (X, cls(X.clone())), strict=strict)
            same(program.module()(X, cls(X + 1)), X * (X + 1))
        with pytest.raises(RecordTreeError, match=r"there are \d classes named .*Local"):
            saved_and_loaded(program)


class Positional(torch.nn.Module):
    def forward(self, x: Tensor, cfg: Cfg) -> Tensor:
        return scale(x, cfg)


class TestTraced:
    """make_fx and aot_function."""

    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    @pytest.mark.parametrize("kind", ["nested", "generic and slotted", "passed on", "returned"])
    def test_make_fx_bakes_nothing_in(self, mode: Any, kind: str) -> None:
        fn, example, other = EXPORTED[kind]
        graph = make_fx(fn, tracing_mode=mode)(*example)
        same(graph(*other), fn(*other))
        assert not [node for node in graph.graph.nodes if node.op == "get_attr"]

    @pytest.mark.parametrize("kind", ["nested", "generic and slotted", "passed on", "returned"])
    def test_aot_function(self, kind: str) -> None:
        from functorch.compile import nop  # type: ignore[import-untyped]

        fn, example, other = EXPORTED[kind]
        compiled = aot_function(fn, nop)
        same(compiled(*example), fn(*example))
        same(compiled(*other), fn(*other))

    def test_gradients_of_aot_function(self) -> None:
        from functorch.compile import nop

        record = pytree.tree_map(lambda tensor: tensor.requires_grad_(), cfg())
        aot_function(lambda x, c: scale(x, c) * 2, nop)(X, record).sum().backward()
        torch.testing.assert_close(record.weight.grad, torch.full((3,), 10.0))
        torch.testing.assert_close(record.inner.scale.grad, torch.full((3,), 14.0))


class TestFunc:
    """torch.func, where records are arguments, dimensions, outputs and auxiliary values."""

    def test_grad_and_value_with_an_auxiliary_record(self) -> None:
        differentiate: Any = torch.func.grad_and_value(lambda c: (scale(X, c).sum(), c), has_aux=True)  # type: ignore[misc]
        grads, (value, aux) = differentiate(cfg())
        torch.testing.assert_close(grads.weight, torch.full((3,), 5.0))
        torch.testing.assert_close(value, (X * 6).sum())
        same(aux, cfg())

    def test_vjp_of_a_returned_record(self) -> None:
        output, pull = torch.func.vjp(lambda x: Box(Slotted(x * 2)), X)  # type: ignore[misc]
        (grad,) = pull(pytree.tree_map(torch.ones_like, output))
        torch.testing.assert_close(grad, torch.full((3,), 2.0))

    def test_jacrev_of_and_into_records(self) -> None:
        jacobian: Any = torch.func.jacrev(lambda c: Box(c.weight * c.inner.scale))(cfg())
        torch.testing.assert_close(jacobian.value.weight, torch.eye(3) * 2)
        torch.testing.assert_close(jacobian.value.inner.scale, torch.eye(3) * 3)

    @pytest.mark.parametrize("out_dims", [0, 1])
    def test_vmap_with_dimensions_by_field(self, out_dims: int) -> None:
        record = Cfg(Inner(torch.full((3, 4), 2.0)), torch.full((4, 3), 3.0))
        places = iter([1, 0])
        in_dims: Any = pytree.tree_map(lambda _: next(places), record)
        output = torch.vmap(scale, in_dims=(None, in_dims), out_dims=out_dims)(X, record)
        torch.testing.assert_close(output, (X * 6).expand(4, 3).movedim(0, out_dims))

    @pytest.mark.parametrize("out_dims", [0, 1])
    def test_vmap_of_a_returned_record(self, out_dims: int) -> None:
        output = torch.vmap(make, out_dims=out_dims)(torch.ones(4, 3))
        assert type(output) is Out
        assert {tensor.shape for tensor in pytree.tree_leaves(output)} == {
            torch.Size((4, 3) if out_dims == 0 else (3, 4))
        }

    def test_functional_call(self) -> None:
        same(torch.func.functional_call(Positional(), {}, (X, cfg())), X * 6)


class TestControlFlow:
    """map and scan take records apart; in what a body returns torch takes none, and says so."""

    def test_scan_over_a_record(self) -> None:
        from torch._higher_order_ops.scan import scan

        def step(carry: Tensor, c: Cfg) -> tuple[Tensor, Tensor]:
            return scale(carry, c), carry.clone()

        for run in (scan, torch.compile(scan, fullgraph=True, backend="aot_eager")):
            carry, outputs = run(step, X, cfg(2.0, 4, 3))
            torch.testing.assert_close(carry, X * 6**4)
            assert outputs.shape == (4, 3)

    @pytest.mark.parametrize("kind", ["nested", "generic", "slotted"])
    def test_map_over_a_record(self, kind: str) -> None:
        from torch._higher_order_ops.map import map as map_over

        many = torch.full((4, 3), 2.0)
        records = {"nested": Cfg(Inner(many), many + 1), "generic": Box(many * 3), "slotted": Slotted(many * 3)}

        def body(record: Any, x: Tensor) -> Tensor:
            if kind == "nested":
                return scale(x, record)
            factor: Tensor = record.value if kind == "generic" else record.weight
            return x * factor

        mapped: Any = map_over
        torch.testing.assert_close(mapped(body, records[kind], X), (X * 6).expand(4, 3))

    @pytest.mark.parametrize("place", ["carry", "output of scan", "output of map", "output of cond", "while_loop"])
    def test_a_body_that_returns_a_record_is_refused(self, place: str) -> None:
        from torch._higher_order_ops.map import map as map_over
        from torch._higher_order_ops.scan import scan

        many = torch.ones(4, 3)
        mapped: Any = map_over
        loop: Any = torch._higher_order_ops.while_loop
        calls: dict[str, Callable[[], Any]] = {
            "carry": lambda: scan(lambda c, x: (Box(c.value + x), x.clone()), Box(X), many),
            "output of scan": lambda: scan(lambda c, x: (c + x, Box(c.clone())), X, many),
            "output of map": lambda: mapped(lambda x: Box(x * 2), many),
            "output of cond": lambda: torch.cond(torch.tensor(True), lambda x: Box(x + 1), lambda x: Box(x + 2), (X,)),
            "while_loop": lambda: loop(lambda b: b.value.sum() < 9, lambda b: (Box(b.value * 2),), (Box(X),)),
        }
        with pytest.raises(RuntimeError, match="higher order operator"):
            calls[place]()


class TestCompiled:
    """torch.compile takes and returns records."""

    @pytest.mark.parametrize("kind", EXPORTED)
    def test_inputs_and_outputs(self, kind: str) -> None:
        fn, example, other = EXPORTED[kind]
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        for args in (example, other):
            same(compiled(*args), fn(*args))

    def test_gradients_through_a_returned_record(self) -> None:
        @torch.compile(fullgraph=True, backend="aot_eager")
        def fn(c: Cfg) -> Any:
            return Box(Slotted(scale(X, c)))

        record = pytree.tree_map(lambda tensor: tensor.requires_grad_(), cfg())
        fn(record).value.weight.sum().backward()
        torch.testing.assert_close(record.weight.grad, torch.full((3,), 5.0))


def test_copies_and_pickles_are_records_still() -> None:
    for record in (cfg(), Box(Slotted(X)), make(X)):
        same(pickle.loads(pickle.dumps(record)), record)
        same(plus_one(plus_one(record)), pytree.tree_map(lambda tensor: tensor + 2, record))


@pytest.mark.parametrize("field_name", ["weight", "inner"])
def test_a_field_that_is_missing_is_an_error(field_name: str) -> None:
    """Dynamo loses fields in the bodies of control flow: a record without them must not pass for one."""
    record = cfg()
    object.__delattr__(record, field_name)
    with pytest.raises(AttributeError, match=field_name):
        pytree.tree_flatten(record)


def test_a_field_that_init_does_not_take_may_be_missing(ns: str) -> None:
    @dataclass(frozen=True)
    class Late:
        weight: Tensor
        cache: int = field(init=False)

    @magi_register_custom_op(f"{ns}::op")
    def op(x: Tensor, late: Late) -> Tensor:
        return x * 2

    assert plus_one(Late(X)).weight[0] == 2
    assert not hasattr(plus_one(Late(X)), "cache")


RANKS = """
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from magi_opschema import magi_register_custom_op
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

kind, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]


@dataclass(frozen=True)
class Batch:
    x: Tensor
    mask: Tensor
    factor: float = 0.5


@dataclass(frozen=True)
class Result:
    values: Tensor


def save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0].mask)


@magi_register_custom_op(
    "ranks::masked",
    infer_output_meta_fn=["batch.x"],
    setup_context_fn=save,
    backward_fn=lambda ctx, grad: ({"x": grad["values"] * ctx.saved_tensors[0] * 0.5},),
)
def masked(batch: Batch) -> Result:
    return Result(batch.x * batch.mask * batch.factor)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, batch: Batch) -> Result:
        hidden = masked(Batch(self.first(batch.x), batch.mask)).values
        return Result(self.second(hidden))


def run(model, batch):
    model(batch).values.square().mean().backward()


dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
batches = [Batch(part, (part > 0).float()) for part in (x, *x.chunk(2))]
torch.manual_seed(0)
alone = Model()
run(alone, batches[0])
torch.manual_seed(0)
model = Model()
model = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model, find_unused_parameters=True)
run(model, batches[1 + rank])
for expected, parameter in zip(alone.parameters(), model.parameters()):
    grad = parameter.grad.full_tensor() if kind == "fsdp" else parameter.grad
    torch.testing.assert_close(grad, expected.grad)
dist.destroy_process_group()
print("agree")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "ranks.py"
    path.write_text(RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path), kind, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=240)
        assert rank.returncode == 0, output
        assert "agree" in output
