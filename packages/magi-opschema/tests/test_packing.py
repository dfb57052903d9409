# SPDX-License-Identifier: Apache-2.0
"""More leaves than torch has arguments, among them as many Tensors as one likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from _signatures import Doubling, make_function, same
from magi_opschema import ObjectHandle, errors, magi_register_custom_op, op_def, opcheck, register_vmap
from torch import Tensor


def record(**kinds: tuple[int, Any]) -> Any:
    """A dataclass with fields `a0, a1, …, b0, …`: for each letter a count and an annotation."""
    fields = [(f"{name}{i}", kind) for name, (count, kind) in kinds.items() for i in range(count)]
    return make_dataclass("Many", fields, frozen=True)


def tensors(count: int, start: float = 0.0, **options: Any) -> list[Tensor]:
    return [torch.full((2,), start + i, **options) for i in range(count)]


CASES: dict[str, tuple[Any, list[Any]]] = {
    "64 Tensors and one number": (record(t=(64, Tensor), a=(1, float)), [*tensors(64), 0.5]),
    "62 Tensors and three kinds of two": (
        record(t=(62, Tensor), a=(2, float), b=(2, int), c=(2, str)),
        [*tensors(62), 0.5, 1.5, 1, 2, "x", "y"],
    ),
    "64 Tensors and 136 others": (
        record(t=(64, Tensor), a=(60, float), b=(60, int | None), c=(16, str)),
        [*tensors(64), *[float(i) for i in range(60)], *[None if i % 3 else i for i in range(60)], *"abcdefghijklmnop"],
    ),
    "64 Tensors that may be None": (
        record(t=(64, Tensor | None), a=(3, bool)),
        [*[None if i % 5 == 1 else tensor for i, tensor in enumerate(tensors(64))], True, False, True],
    ),
    "40 of both kinds": (
        record(t=(40, Tensor), u=(40, Tensor | None), a=(40, float)),
        [*tensors(40), *[tensor if i % 2 else None for i, tensor in enumerate(tensors(40))], *map(float, range(40))],
    ),
    "200 Tensors": (record(t=(200, Tensor)), tensors(200)),
    "70 objects": (record(r=(70, ObjectHandle[Doubling])), [Doubling(float(i)) for i in range(70)]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_body_gets_what_was_passed(ns: str, case: str) -> None:
    cls, values = CASES[case]
    seen: list[Any] = []
    body = make_function({"x": Tensor, "cfg": cls}, seen)
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(body)
    arguments = op_def(op).torch_op._schema.arguments
    assert len(arguments) <= 64
    x = torch.ones(3)
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        assert call(x, cls(*values)).tolist() == [2.0] * 3
        assert same(seen.pop()[1], cls(*values))
    assert set(opcheck(op, (x, cls(*values))).values()) == {"SUCCESS"}


Wide: Any = record(t=(64, Tensor), u=(3, Tensor | None), a=(3, float))


def make_sum(ns: str, **options: Any) -> Callable[[Any], Tensor]:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        (cfg,) = inputs
        assert type(cfg) is Wide
        assert cfg.u1 is None
        ctx.needs = {path for path, is_needed in ctx.needs_grad.items() if is_needed}
        ctx.scale = cfg.a0

    def backward(ctx: Any, grad: Tensor) -> Any:
        assert ctx.needs == {"cfg.t5", "cfg.u2"}
        return {"t5": grad * 5 * ctx.scale, "u2": grad * ctx.scale}

    @magi_register_custom_op(
        f"{ns}::sum", infer_output_meta_fn=["cfg.u2"], setup_context_fn=setup, backward_fn=backward, **options
    )
    def total(cfg: Wide) -> Tensor:
        present = [tensor for tensor in (cfg.u0, cfg.u1, cfg.u2) if tensor is not None]
        return (sum(i * getattr(cfg, f"t{i}") for i in range(64)) + sum(present)) * cfg.a0  # type: ignore[no-any-return]

    return total


def wide(t5: Tensor, u2: Tensor) -> Any:
    others = tensors(64)
    return Wide(*others[:5], t5, *others[6:], torch.ones(2), None, u2, 3.0, 0.0, 0.0)


def test_gradients_through_tensors_that_share_an_argument(ns: str) -> None:
    total = make_sum(ns)
    assert op_def(total).lowering.schema.count("Tensor[]") == 2
    t5, u2 = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    for call in (total, torch.compile(total, fullgraph=True, backend="aot_eager")):
        grads = torch.autograd.grad(call(wide(t5, u2)).sum(), (t5, u2))
        assert [grad.tolist() for grad in grads] == [[15.0, 15.0], [3.0, 3.0]]
    by_func = torch.func.grad(lambda t5, u2: total(wide(t5, u2)).sum(), (0, 1))(t5.detach(), u2.detach())
    assert [grad.tolist() for grad in by_func] == [[15.0, 15.0], [3.0, 3.0]]


def test_vmap_by_loop_and_by_rule(ns: str) -> None:
    total = make_sum(ns)
    batch, u2 = torch.randn(4, 2), torch.ones(2)
    expected = torch.stack([total(wide(row, u2)) for row in batch])
    torch.testing.assert_close(torch.vmap(lambda t5: total(wide(t5, u2)))(batch), expected)

    @register_vmap(total)
    def rule(info: Any, in_dims: Any, cfg: Any) -> Any:
        assert [name for name, dim in in_dims[0].items() if dim is not None] == ["t5"]
        return total(cfg), in_dims[0]["t5"]

    torch.testing.assert_close(torch.vmap(lambda t5: total(wide(t5, u2)))(batch), expected)


Targets: Any = record(out=(60, Tensor), maybe=(5, Tensor | None), x=(2, Tensor), a=(4, float))


def make_fill(ns: str) -> Callable[[Any], None]:
    mutates = [f"cfg.out{i}" for i in range(60)] + [f"cfg.maybe{i}" for i in range(5)]

    @magi_register_custom_op(f"{ns}::fill", mutates_args=mutates)
    def fill(cfg: Targets) -> None:
        for i in range(60):
            getattr(cfg, f"out{i}").copy_(cfg.x0 * i)
        for i in range(5):
            if (maybe := getattr(cfg, f"maybe{i}")) is not None:
                maybe.copy_(cfg.x1 + cfg.a3)

    return fill


def targets(x: Tensor) -> Any:
    maybe = [torch.zeros(2) if i % 2 else None for i in range(5)]
    return Targets(*[torch.zeros(2) for _ in range(60)], *maybe, x, x, 0.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_writing_into_tensors_that_share_an_argument(ns: str, backend: str | None) -> None:
    fill = make_fill(ns)
    assert "Tensor(a0!)[] packed_mutated_Tensor" in op_def(fill).lowering.schema
    call = fill if backend is None else torch.compile(fill, fullgraph=True, backend=backend)
    cfg = targets(torch.ones(2))
    call(cfg)
    assert [getattr(cfg, f"out{i}").tolist() for i in (0, 7, 59)] == [[0.0] * 2, [7.0] * 2, [59.0] * 2]
    assert cfg.maybe3.tolist() == [4.0, 4.0]
    assert cfg.out7._version > 0
    assert cfg.maybe3._version > 0


def test_what_is_written_into_must_not_need_a_gradient(ns: str) -> None:
    fill = make_fill(ns)
    cfg = targets(torch.ones(2, requires_grad=True))
    fill(cfg)
    cfg.maybe3.requires_grad_()
    for call in (fill, torch.compile(fill, fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match=r"'cfg.maybe3' is written into, and it requires a gradient"):
            call(cfg)


def test_vmap_of_writing(ns: str) -> None:
    fill = make_fill(ns)
    outs = torch.zeros(60, 3, 2)

    def one(outs: Tensor, x: Tensor) -> Tensor:
        fill(Targets(*outs.unbind(), None, None, None, None, None, x, x, 0.0, 1.0, 2.0, 3.0))
        return x

    torch.vmap(one, in_dims=(1, 0))(outs, torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))
    assert outs[7].tolist() == [[7.0, 7.0], [14.0, 14.0], [21.0, 21.0]]


def test_a_packed_record_that_changes_when_it_is_rebuilt(ns: str) -> None:
    cls = record(t=(64, Tensor), a=(3, float), bad=(1, Doubling))

    @magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["cfg.t0"])
    def op(cfg: cls) -> Tensor:  # type: ignore[valid-type]
        return cfg.t0 * 2  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(errors.RoundTripError, match=r"'cfg.bad0.x'.* was .* after the op rebuilt its record"):
        op(cls(*tensors(64), 1.0, 2.0, 3.0, Doubling(1.0)))
