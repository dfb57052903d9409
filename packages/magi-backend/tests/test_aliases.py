# SPDX-License-Identifier: Apache-2.0
"""Values that share memory after a pass of Inductor are what they were before it; other graphs are left as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from magi_backend import explain, magi_register_custom_op
from magi_backend._repairs import _defect
from magi_backend._repairs.aliases import Region
from magi_backend._torch_compat.compiling import torch_release
from torch import Tensor
from torch._inductor.graph import GraphLowering


if TYPE_CHECKING:
    from collections.abc import Callable

KEEP, REINPLACE, REREAD = "keep_copies", "reinplace_unread", "fuse_rereads_in_place"


def _reversed_into(source: Tensor, target: Tensor) -> None:
    assert source.untyped_storage().data_ptr() != target.untyped_storage().data_ptr(), "the clone is lost"
    for index in range(target.shape[0]):
        target[-1 - index] = source[index]


ours = magi_register_custom_op("magi_backend_aliases::ours", mutates_args=("target",))(_reversed_into)


def a_clone_for_an_operator(x: Tensor, _: Tensor) -> Tensor:
    ours(x.clone(), x)
    return x * 2


def a_scatter_then_zeros(x: Tensor, s: Tensor) -> Tensor:
    y = torch.slice_scatter(x, s[1:3], 0, 1, 3)
    x.zero_()
    return y


def a_scatter_of_everything_then_zeros(x: Tensor, s: Tensor) -> Tensor:
    y = torch.slice_scatter(x, s)
    x.zero_()
    s.add_(1)
    return y


def a_diagonal_of_itself_then_twos(x: Tensor, _: Tensor) -> Tensor:
    y = torch.diagonal_scatter(x, x.diagonal())
    x.fill_(2)
    return y


def a_clone_between_two_mutations(x: Tensor, _: Tensor) -> Tensor:
    x.index_fill_(0, torch.tensor([0, 2]), 9.0)
    y = x.clone()
    x.clamp_(0, 3)
    return y


def a_copy_then_a_mutation_of_its_source(x: Tensor, s: Tensor) -> Tensor:
    x[0:, :] = s[0:, :]
    s.add_(1)
    return s


def a_result_that_is_copied_back(x: Tensor, s: Tensor) -> Tensor:
    y = torch.slice_scatter(x, s[1:3], 0, 1, 3)
    x.copy_(y)
    return y


def a_shift_by_one_row(x: Tensor, _: Tensor) -> Tensor:
    x[1:] = x[:-1].clone()
    return x


def a_shift_after_a_mutation(x: Tensor, s: Tensor) -> Tensor:
    ours(s, x)
    x[1:] = x[:-1].clone()
    return x


def two_tensors_exchanged(x: Tensor, s: Tensor) -> Tensor:
    before = x.clone()
    x.copy_(s)
    s.copy_(before)
    return x


def a_view_and_zeros_then_a_mutation(x: Tensor, _: Tensor) -> Tensor:
    y = x.view(-1) + torch.zeros(x.numel())
    x.add_(1)
    return y


def a_product_with_ones(x: Tensor, _: Tensor) -> Tensor:
    return torch.ones_like(x) * x


def a_view_of_a_difference_from_zeros(x: Tensor, _: Tensor) -> Tensor:
    return (x - torch.zeros_like(x)).t()


def elements_in_the_order_of_zeros(x: Tensor, _: Tensor) -> Tensor:
    return torch.as_strided(torch.zeros(*x.shape) + x.t(), (x.numel(),), (1,))


def a_view_of_a_changed_product_with_ones(x: Tensor, _: Tensor) -> Tensor:
    y = torch.ones_like(x) * x
    y.copy_(y.clone())
    return y.t()


def a_copy_of_a_view_of_a_copy(x: Tensor, _: Tensor) -> Tensor:
    return x.clone().t().clone()


BROKEN: list[tuple[Callable[..., Tensor], str]] = [
    (a_clone_for_an_operator, KEEP),
    (a_scatter_then_zeros, REINPLACE),
    (a_scatter_of_everything_then_zeros, ""),
    (a_diagonal_of_itself_then_twos, REINPLACE),
    (a_clone_between_two_mutations, REINPLACE),
    (a_copy_then_a_mutation_of_its_source, KEEP),
    (a_result_that_is_copied_back, REINPLACE),
    (a_shift_by_one_row, ""),  # a race on a GPU
    (a_shift_after_a_mutation, REREAD),
    (two_tensors_exchanged, KEEP),
    (a_view_and_zeros_then_a_mutation, KEEP),
    (a_product_with_ones, KEEP),
    (a_view_of_a_difference_from_zeros, KEEP),
    (elements_in_the_order_of_zeros, KEEP),
    (a_view_of_a_changed_product_with_ones, KEEP),
    (a_copy_of_a_view_of_a_copy, KEEP),
]

MENDED_IN_2_15 = {
    a_clone_for_an_operator,
    a_copy_then_a_mutation_of_its_source,
    two_tensors_exchanged,
    a_diagonal_of_itself_then_twos,
    a_shift_after_a_mutation,
}


def tensors() -> list[Tensor]:
    return [torch.arange(16.0).reshape(4, 4), -torch.arange(16.0).reshape(4, 4)]


def what_it_does(fn: Callable[..., Tensor]) -> tuple[list[list[float]], int]:
    """The result and the arguments after the call, and which argument the result shares memory with."""
    given = tensors()
    try:
        result = fn(*given)
    except AssertionError as error:
        return [[str(error)]], -1  # type: ignore[list-item]
    bases = [tensor.untyped_storage().data_ptr() for tensor in (*given, result)]
    return [tensor.flatten().tolist() for tensor in (result, *given)], bases.index(bases[-1])


@pytest.mark.kernels
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("fn", "repair"), BROKEN, ids=[fn.__name__ for fn, _ in BROKEN])
def test_no_value_is_lost(fn: Callable[..., Tensor], repair: str, dynamic: bool) -> None:
    expected = what_it_does(fn)

    assert what_it_does(torch.compile(fn, backend="magi", dynamic=dynamic)) == expected
    if repair and not dynamic and not (fn in MENDED_IN_2_15 and torch_release() >= (2, 15)):
        torch.compiler.reset()
        assert what_it_does(torch.compile(fn)) != expected, "torch has mended this: give the defect its last release"
        torch.compiler.reset()
        report = explain(torch.compile(fn, backend="magi"))(*tensors())
        names = [each.name for compiled in report.compilations for graph in compiled.graphs for each in graph.repairs]
        assert repair in names


def an_update_in_place(x: Tensor, s: Tensor) -> Tensor:
    x[1:3] = s[1:3]
    return x


def an_update_from_another_part(x: Tensor, _: Tensor) -> Tensor:
    x[2:4] = x[:2]
    x[:, 2:] = x[:, :2]
    return x


def rows_replaced(x: Tensor, s: Tensor) -> Tensor:
    x.index_put_((torch.tensor([0, 2]),), s[:2])
    return x + 1


def an_operator_in_place(x: Tensor, s: Tensor) -> Tensor:
    ours(s, x)
    return x * 2


def a_clone_that_nothing_overwrites(x: Tensor, s: Tensor) -> Tensor:
    s.add_(x.clone())
    return x.clone() * 2


@pytest.mark.kernels
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "fn",
    [
        an_update_in_place,
        an_update_from_another_part,
        rows_replaced,
        an_operator_in_place,
        a_clone_that_nothing_overwrites,
        lambda x, s: (x @ s.t()).relu(),
    ],
    ids=["update", "from another part", "rows", "operator", "clone", "no write"],
)
def test_code_without_a_lost_value_is_what_it_was(fn: Callable[..., Tensor], dynamic: bool) -> None:
    """Compares the text that Inductor writes, byte for byte, and stops before it is compiled."""

    def written() -> str:
        texts: list[str] = []

        def stop(graph: GraphLowering) -> None:
            code: Any = graph.codegen()[0]
            texts.append(getattr(code, "value", code))
            raise InterruptedError

        torch.compiler.reset()
        with (
            mock.patch.object(GraphLowering, "compile_to_module", stop),
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
            pytest.raises(Exception, match="InterruptedError"),
        ):
            torch.compile(fn, backend="magi", dynamic=dynamic)(*tensors())
        return texts[0].partition("\n")[2]  # the first line is the number of the compilation

    repaired = written()
    with mock.patch.object(_defect, "is_active", lambda name: name not in (KEEP, REINPLACE, REREAD)):
        assert written() == repaired


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (lambda x: x[:2], lambda x: x[2:], True),
        (lambda x: x[:, :2], lambda x: x[:, 2:], True),
        (lambda x: x[:2, :2], lambda x: x[1:, 2:], True),
        (lambda x: x[:2, 2:], lambda x: x[2:, :2], True),
        (lambda x: x[:2, :2], lambda x: x[1:, 1:], False),
        (lambda x: x, lambda x: x[1:], False),
        (lambda x: x[:, 2:], lambda x: x[1:, :2], True),
        (lambda x: x, lambda x: x.t(), False),
        (lambda x: x[0], lambda x: x[:, 3], False),
        (lambda x: x.as_strided((2, 3), (4, 1)), lambda x: x.as_strided((2, 3), (4, 1), 3), False),
    ],
    ids=map(str, range(10)),
)
def test_two_views_are_apart_only_if_they_share_no_element(
    one: Callable[[Any], Tensor], other: Callable[[Any], Tensor], apart: bool
) -> None:
    x = torch.arange(16).reshape(4, 4)
    views = one(x), other(x)
    mine, its = (Region(tuple(view.shape), tuple(view.stride()), view.storage_offset()) for view in views)

    assert mine.is_known_apart(its) is its.is_known_apart(mine) is apart
    if apart:
        assert not set(views[0].flatten().tolist()) & set(views[1].flatten().tolist())
