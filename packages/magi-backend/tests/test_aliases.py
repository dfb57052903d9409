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


def program(text: str) -> Callable[..., Tensor]:
    """The function of `x` and `s` that does *text* and returns `y`."""
    scope: dict[str, Any] = {"torch": torch, "ours": ours}
    exec(f"def program(x, s):\n    {text}\n    return y\n", scope)
    found: Callable[..., Tensor] = scope["program"]
    return found


# What loses a value under stock, and the repair that keeps it; "" where stock does not on a CPU.
BROKEN = {
    "a clone for an operator": ("ours(x.clone(), x); y = x * 2", KEEP),
    "a scatter, then zeros": ("y = torch.slice_scatter(x, s[1:3], 0, 1, 3); x.zero_()", REINPLACE),
    "a scatter of everything, then zeros": ("y = torch.slice_scatter(x, s); x.zero_(); s.add_(1)", ""),
    "a diagonal of itself, then twos": ("y = torch.diagonal_scatter(x, x.diagonal()); x.fill_(2)", REINPLACE),
    "a clone between two mutations": (
        "x.index_fill_(0, torch.tensor([0, 2]), 9.0); y = x.clone(); x.clamp_(0, 3)",
        REINPLACE,
    ),
    "a copy, then a mutation of its source": ("x[0:, :] = s[0:, :]; s.add_(1); y = s", KEEP),
    "a result that is copied back": ("y = torch.slice_scatter(x, s[1:3], 0, 1, 3); x.copy_(y)", REINPLACE),
    "a shift by one row": ("x[1:] = x[:-1].clone(); y = x", ""),  # a race on a GPU
    "a shift after a mutation": ("ours(s, x); x[1:] = x[:-1].clone(); y = x", REREAD),
    "two tensors exchanged": ("before = x.clone(); x.copy_(s); s.copy_(before); y = x", KEEP),
    "a view and zeros, then a mutation": ("y = x.view(-1) + torch.zeros(x.numel()); x.add_(1)", KEEP),
    "a product with ones": ("y = torch.ones_like(x) * x", KEEP),
    "a view of a difference from zeros": ("y = (x - torch.zeros_like(x)).t()", KEEP),
    "elements in the order of zeros": (
        "y = torch.as_strided(torch.zeros(*x.shape) + x.t(), (x.numel(),), (1,))",
        KEEP,
    ),
    "a view of a changed product with ones": ("z = torch.ones_like(x) * x; z.copy_(z.clone()); y = z.t()", KEEP),
    "a copy of a view of a copy": ("y = x.clone().t().clone()", KEEP),
}
MENDED_IN_2_15 = {
    "a clone for an operator",
    "a copy, then a mutation of its source",
    "two tensors exchanged",
    "a diagonal of itself, then twos",
    "a shift after a mutation",
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
@pytest.mark.parametrize("name", BROKEN)
def test_no_value_is_lost(name: str, dynamic: bool) -> None:
    text, repair = BROKEN[name]
    fn = program(text)
    expected = what_it_does(fn)

    assert what_it_does(torch.compile(fn, backend="magi", dynamic=dynamic)) == expected
    if repair and not dynamic and not (name in MENDED_IN_2_15 and torch_release() >= (2, 15)):
        torch.compiler.reset()
        assert what_it_does(torch.compile(fn)) != expected, "torch has mended this: give the defect its last release"
        torch.compiler.reset()
        report = explain(torch.compile(fn, backend="magi"))(*tensors())
        names = [each.name for compiled in report.compilations for graph in compiled.graphs for each in graph.repairs]
        assert repair in names


WHOLE = {
    "an update": "x[1:3] = s[1:3]; y = x",
    "an update from another part": "x[2:4] = x[:2]; x[:, 2:] = x[:, :2]; y = x",
    "rows replaced": "x.index_put_((torch.tensor([0, 2]),), s[:2]); y = x + 1",
    "an operator": "ours(s, x); y = x * 2",
    "a clone that nothing overwrites": "s.add_(x.clone()); y = x.clone() * 2",
    "no write": "y = (x @ s.t()).relu()",
}


@pytest.mark.kernels
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", WHOLE)
def test_code_without_a_lost_value_is_what_it_was(name: str, dynamic: bool) -> None:
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
            torch.compile(program(WHOLE[name]), backend="magi", dynamic=dynamic)(*tensors())
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
