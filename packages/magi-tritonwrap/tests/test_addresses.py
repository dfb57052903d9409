# SPDX-License-Identifier: Apache-2.0
"""A body that asks whether a tensor is aligned, and one that asks more of its address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tritonwrap_patterns as patterns
from graph_questions import Ops, launch_of, op_stays
from magi_tritonwrap import NoFakeError, fake_from_body
from magi_tritonwrap.errors import OpaqueFallbackWarning
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


pytestmark = pytest.mark.usefixtures("stub")


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
