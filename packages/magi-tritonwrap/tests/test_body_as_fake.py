# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""A body on fake tensors: its own fake, a probe of what it launches, and what it may ask of data and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tritonwrap_patterns as patterns
from graph_questions import Ops, launch_of, launches, op_stays
from magi_tritonwrap import (
    NoFakeError,
    OpaqueFallbackWarning,
    fake_from_body,
    probe_launches,
    see_through_report,
    triton_op,
)
from magi_tritonwrap.testing import aot_graphs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def by_loop_over_lengths(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for length in x.long().tolist():
        patterns.double_kernel[(length,)](x, out, length, BLOCK=128)
    return out


def by_segments(x: Tensor) -> Tensor:
    at = torch.repeat_interleave(torch.arange(x.numel()), torch.ones_like(x, dtype=torch.int64))
    mask = torch.stack([at, at], 1)[: len(x.nonzero())]
    return patterns.module_level(x) + x[x > 0].sum() + mask.sum()


def refuses_most_data(x: Tensor) -> Tensor:
    assert x.max() <= 300, "a label is out of range"
    assert 0 < x.max().item() <= 3, "a label is out of range"
    return patterns.module_level(x)


READING: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: 1 / max(x.sum().item(), 1) * patterns.module_level(x),
    "branch": lambda x: patterns.module_level(x) if (x > 0).all() else torch.zeros_like(x),
    "comparison": lambda x: patterns.module_level(x) if torch.equal(x, x.clone()) else x.clone(),
    "refused data": refuses_most_data,
    "lengths": by_loop_over_lengths,
    "segments": by_segments,
}


@pytest.mark.parametrize("name", READING)
def test_a_body_that_reads_data_is_its_own_fake(name: str) -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = fake_from_body(READING[name])(torch.ones(300))
    assert (fake.shape, fake.dtype) == ((300,), torch.float32)
    assert mode.shape_env is not None
    assert not mode.shape_env.pending_fresh_unbacked_symbols


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("name", ["item", "branch", "comparison", "refused data"])
def test_an_op_that_reads_data_compiles_and_stays_opaque(name: str, ops: Ops) -> None:
    op = triton_op(f"{ops.namespace}::reads", READING[name], mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.warns(OpaqueFallbackWarning, match=r"cannot be traced\..*register_fake"):
        (graph,) = aot_graphs(op, torch.ones(300), device="cpu")
    assert op._opoverload in {node.target for node in graph.graph.nodes}
    assert len(see_through_report(op).fallbacks) == 1


@pytest.mark.usefixtures("stub")
def test_lengths_that_only_size_launches_are_seen_through(ops: Ops) -> None:
    op = triton_op(f"{ops.namespace}::reads", by_loop_over_lengths, mutates_args=())
    assert len(launches(op, torch.ones(3), device="cpu")) == 3


def never_ends(x: Tensor) -> Tensor:
    while not x.any() or x.all():
        x = x + 1
    return x


NO_FAKE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "size": (
        lambda x: x.new_empty(int(x.sum())),
        r"reads data of its tensors \(.*:\d+\), and its outputs depend on them",
    ),
    "dtype": (lambda x: x.double() if x.any() else x.clone(), "its outputs depend on them"),
    "count": (lambda x: [x.clone() for _ in range(int(x[0]))], "its outputs depend on them"),
    "nonzero": (lambda x: x.nonzero(), "its outputs depend on them"),
    "unique": (lambda x: x.unique(), "does not run on fake tensors: DynamicOutputShapeException"),
    "array": (lambda x: torch.from_numpy(x.numpy() * 2), r"does not run on fake tensors: RuntimeError: \.numpy\(\)"),
    "loop": (never_ends, "reads data in a loop that does not end"),
}


@pytest.mark.parametrize("name", NO_FAKE)
def test_no_fake_can_be_had(name: str) -> None:
    body, reason = NO_FAKE[name]
    with FakeTensorMode(), pytest.raises(NoFakeError, match=rf"{body.__name__}.*{reason}.*infer_output_meta_fn="):
        fake_from_body(body)(torch.ones(3))


def test_errors_of_the_body_itself_are_its_own() -> None:
    def refuses(x: Tensor) -> Tensor:
        raise ValueError("x has the wrong size")

    def multiplies(x: Tensor) -> Tensor:
        return torch.ones(2, 3) @ x

    for body, error in ((refuses, ValueError), (multiplies, RuntimeError)):
        with FakeTensorMode(), pytest.raises(error) as raised:
            fake_from_body(body)(torch.ones(2, 2))
        assert not isinstance(raised.value, NoFakeError)


@pytest.mark.parametrize("symbolic", [False, True])
def test_probe(symbolic: bool) -> None:
    shape_env = ShapeEnv() if symbolic else None
    mode = FakeTensorMode(shape_env=shape_env, static_shapes=not symbolic)
    x = mode.from_tensor(torch.ones(300))
    probe = probe_launches(patterns.helper, (x,), {})
    assert [launch.name for launch in probe.launches] == ["double_kernel"]
    assert probe.stopped_by == ""
    assert shape_env is None or not shape_env.guards, "the trace that is going on hears nothing of it"
    assert probe_launches(patterns.twice, (x,), {}).launches == ()


def raises(x: Tensor) -> Tensor:
    raise LookupError("not here")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (READING["item"], "reads data of a tensor"),
        (raises, "LookupError: not here"),
        (lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", "0"), "it communicates with other ranks"),
    ],
)
def test_probe_that_stops(body: Callable[[Tensor], Tensor], reason: str) -> None:
    probe = probe_launches(body, (torch.ones(3),), {})
    assert probe.launches == ()
    assert reason in probe.stopped_by


def aligned(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    is_aligned = x.data_ptr() % 16 == 0 and not out.data_ptr() & 15
    assert is_aligned == ((out.data_ptr() | x.data_ptr()) % 16 == 0) == ((4 + x.data_ptr() + 12) % 16 == 0)
    block = 128 if is_aligned else 32
    patterns.double_kernel[patterns.blocks(x.numel())](x, out, x.numel(), BLOCK=block)
    return out


def behind(x: Tensor, start: int) -> Tensor:
    """``x[start:]``, which a torch without CUDA refuses for fake tensors of a card."""
    return x.narrow(0, start, x.shape[0] - start)


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("view", "block"),
    [
        pytest.param(lambda x: x, 128, id="whole"),
        pytest.param(lambda x: behind(x, 1), 32, id="4 bytes"),
        pytest.param(lambda x: behind(x, 4), 128, id="16 bytes"),
        pytest.param(lambda x: behind(x.half(), 4), 32, id="8 bytes"),
        pytest.param(lambda x: behind(x.half(), 8), 128, id="16 bytes of half"),
        pytest.param(lambda x: behind(x.view(20, 15), 1), 32, id="a row"),
        pytest.param(lambda x: x.view(15, 20).select(1, 2), 32, id="a column"),
        pytest.param(lambda x: behind(x, 1).clone(), 128, id="copied"),
    ],
)
def test_the_branch_follows_where_a_tensor_begins(
    view: Callable[[Tensor], Tensor], block: int, dynamic: bool, ops: Ops
) -> None:
    op = ops.seen("aligned", aligned)
    launch = launch_of(lambda x: op(view(x.relu())), torch.ones(300), dynamic=dynamic)
    assert launch.arguments["BLOCK"] == block


@pytest.mark.usefixtures("stub")
def test_a_symbolic_beginning_is_guarded(ops: Ops) -> None:
    op = ops.seen("aligned", aligned)
    blocks = [
        launch_of(lambda x, n: op(behind(x, n)), torch.ones(300), n, dynamic=True).arguments["BLOCK"] for n in (4, 5, 8)
    ]
    assert blocks == [128, 32, 128]


MORE: dict[str, Callable[[Tensor], Any]] = {
    "equal": lambda x: x.data_ptr() == 0,
    "unequal": lambda x: x.data_ptr() != 0,
    "truth": lambda x: bool(x.data_ptr()),
    "negated": lambda x: not x.data_ptr(),
    "larger": lambda x: x.data_ptr() > 0,
    "number": lambda x: int(x.data_ptr()),
    "text": lambda x: f"{x.data_ptr()}",
    "shown": lambda x: repr(x.data_ptr()),
    "key": lambda x: {x.data_ptr(): 1},
    "by_32": lambda x: x.data_ptr() % 32,
    "by_6": lambda x: x.data_ptr() % 6,
    "by_nothing": lambda x: x.data_ptr() % 0,
    "by_less": lambda x: x.data_ptr() % -16,
    "mask": lambda x: x.data_ptr() & 31,
    "mask_of_some": lambda x: x.data_ptr() & 4,
    "plus_itself": lambda x: x.data_ptr() + x.data_ptr(),
    "plus_a_fraction": lambda x: x.data_ptr() + 0.5,
    "one_bit_set": lambda x: x.data_ptr() | 1,
    "inverted": lambda x: ~x.data_ptr(),
    "apart": lambda x: x.data_ptr() - x.data_ptr(),
    "page": lambda x: x.data_ptr() >> 4,
    "list": lambda x: torch.tensor([x.data_ptr()]),
}


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("name", MORE)
def test_nothing_else_is_known_of_an_address(name: str, ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        MORE[name](x)
        return patterns.module_level(x)

    with FakeTensorMode(), pytest.raises(NoFakeError, match="only the remainder by 16 is known|FakeAddress"):
        fake_from_body(body)(torch.ones(300))
    op = ops.seen("more", body)
    with pytest.warns(OpaqueFallbackWarning, match="more stays opaque.*(data pointer|FakeAddress)"):
        assert op_stays(op)


def test_a_real_tensor_has_its_own_address() -> None:
    seen: list[Any] = []

    def body(x: Tensor) -> Tensor:
        seen.append(x.data_ptr())
        return torch.empty_like(x)

    x = torch.ones(3)
    fake_from_body(body)(x)
    assert seen == [x.data_ptr()]
