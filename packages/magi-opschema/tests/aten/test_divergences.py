# SPDX-License-Identifier: Apache-2.0
"""The divergences of torch that the harness expects, shown with torch's public functions alone."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch


if TYPE_CHECKING:
    from collections.abc import Callable


on_213 = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="seen on torch 2.13")


def _strided(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.full((*shape, 2), float("nan"))[..., 0]


@on_213
@pytest.mark.parametrize("function", [torch.fft.ihfftn, torch.fft.ihfft2], ids=["ihfftn", "ihfft2"])
def test_ihfft_of_one_dimension_leaves_out_untouched(function: Callable[..., Any]) -> None:
    x, out = torch.randn(8), torch.full((5,), float("nan"), dtype=torch.complex64)
    function(x, dim=(-1,), out=out)
    assert out.isnan().all()


@on_213
def test_binary_cross_entropy_does_not_reduce_into_out() -> None:
    x, y = torch.tensor([0.2, 0.9]), torch.tensor([1.0, 0.0])
    out = torch.ops.aten.binary_cross_entropy.out(x, y, out=torch.tensor(0.0))
    expected = torch.nn.functional.binary_cross_entropy(x, y)
    assert not torch.allclose(out, expected)


@on_213
@pytest.mark.parametrize(
    ("functional", "overload", "args"),
    [
        (torch.nn.functional.gelu, torch.ops.aten.gelu.out, (torch.randn(5),)),
        (torch.ops.aten.avg_pool3d, torch.ops.aten.avg_pool3d.out, (torch.randn(1, 1, 4, 4, 4), [2, 2, 2])),
        (torch.narrow_copy, torch.ops.aten.narrow_copy.out, (torch.randn(4, 4), 0, 0, 2)),
    ],
    ids=["gelu", "avg_pool3d", "narrow_copy"],
)
def test_a_strided_out_is_not_written_as_it_lies(functional: Any, overload: Any, args: Any) -> None:
    expected = functional(*args)
    out = _strided(tuple(expected.shape))
    overload(*args, out=out)
    assert not torch.allclose(out, expected)


@on_213
@pytest.mark.parametrize(
    "code",
    [
        """torch.ops.aten.native_batch_norm_backward(
            torch.ones(0, 5), torch.ones(0, 5), None, None, None, torch.ones(5), torch.ones(5), True, 1e-5, [True] * 3
        )""",
        """torch.ops.aten.rrelu_with_noise.out(
            torch.randn(3, 4), torch.randn(3, 4), 0.1, 0.3, True, out=torch.empty(0)
        )""",
    ],
    ids=["native_batch_norm_backward", "rrelu_with_noise"],
)
def test_torch_crashes(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import torch; {code}"], capture_output=True, check=False)
    assert done.returncode < 0
