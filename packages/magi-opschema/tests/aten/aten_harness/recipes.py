# SPDX-License-Identifier: Apache-2.0
"""Inputs written by hand, for overloads whose arguments must fit each other and that torch's database does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .subject import Sample


Call = tuple[Any, ...]


class Make:
    """Makes tensors of one dtype from a separate generator, so that a recipe gives the same values in every process."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(17)

    def __call__(self, *shape: int) -> Tensor:
        """Values around zero; small ones for integers, so that nothing overflows."""
        if self.dtype is torch.bool:
            return self.mask(*shape)
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return torch.randint(-4, 5, shape, generator=self._generator).to(self.dtype)
        wide = torch.complex64 if self.dtype.is_complex else torch.float32
        return torch.randn(shape, generator=self._generator, dtype=wide).to(self.dtype)

    def unit(self, *shape: int) -> Tensor:
        """Values from 0 to 1."""
        return torch.rand(shape, generator=self._generator).to(self.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        """Indices below *high*."""
        return torch.randint(high, shape, generator=self._generator)

    def mask(self, *shape: int) -> Tensor:
        """Booleans."""
        return torch.rand(shape, generator=self._generator) > 0.5


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def recipe_samples(overload: str, dtype: torch.dtype) -> list[Sample]:
    """The hand-written inputs of one overload, `add.Tensor` or `relu`; most overloads have none."""
    samples = []
    for recipe in RECIPES.get(overload, ()):
        args = list(recipe(Make(dtype)))
        kwargs: dict[str, Any] = args.pop() if isinstance(args[-1], dict) else {}
        samples.append(Sample(tuple(args), kwargs, "recipe", dtype))
    return samples


def _unary(m: Make) -> Call:
    return (m(3, 4),)


def _image(m: Make) -> Call:
    return (m(2, 3, 6, 6),)


def _convolution_3d(m: Make) -> Call:
    return m(1, 2, 4, 5, 6), m(3, 2, 2, 2, 2), [2, 2, 2], m(3)


def _window(*more: Any) -> Callable[[Make], Call]:
    return lambda m: (7, *more, {"dtype": m.dtype})


def _seeded(*args: Any) -> Callable[[Make], Call]:
    return lambda m: (*(m(3, 4) if arg is Tensor else arg for arg in args), {"generator": _generator()})


def _volume(m: Make) -> Tensor:
    return m(1, 2, 3, 4, 5)


def _sparse(m: Make) -> Tensor:
    return m(3, 4).relu().to_sparse().coalesce()


_WINDOWS = ("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window")

RECIPES: dict[str, tuple[Callable[[Make], Call], ...]] = {
    **{name: (_window(),) for name in _WINDOWS},
    **{f"{name}.periodic": (_window(False),) for name in _WINDOWS},
    "adaptive_avg_pool3d_backward.grad_input": (lambda m: (m(1, 2, 2, 2, 2), m(1, 2, 4, 4, 4)),),
    "affine_grid_generator": (
        lambda m: (m(2, 2, 3), [2, 1, 4, 5], False),
        lambda m: (m(1, 3, 4), [1, 1, 2, 3, 4], True),
    ),
    "bernoulli": (lambda m: (m.unit(3, 4), {"generator": _generator()}),),
    "bernoulli.Tensor": (lambda m: (m(3, 4), m.unit(3, 4), {"generator": _generator()}),),
    "bernoulli.float_out": (_seeded(Tensor, 0.25),),
    "bernoulli.p": (_seeded(Tensor, 0.25),),
    "binomial": (lambda m: (m.index(9, 3, 4).to(m.dtype), m.unit(3, 4), {"generator": _generator()}),),
    "bucketize.Scalar": (lambda m: (1, m(5).sort().values),),
    "cauchy": (_seeded(Tensor, 1.0, 2.0),),
    "ccol_indices_copy": (lambda m: (m(3, 4).to_sparse_csc(),),),
    "chain_matmul": (lambda m: ([m(2, 3), m(3, 4), m(4, 2)],),),
    "clip": (lambda m: (m(3, 4), -1, 1), lambda m: (m(3, 4), None, 1)),
    "col_indices_copy": (lambda m: (m(3, 4).to_sparse_csr(),),),
    "conv_depthwise3d": (lambda m: (m(1, 2, 4, 4, 4), m(2, 1, 2, 2, 2), [2, 2, 2], m(2), [1] * 3, [0] * 3, [1] * 3),),
    "conv_tbc": (lambda m: (m(5, 2, 3), m(2, 3, 4), m(4), 1),),
    "copy": (lambda m: (m(3, 4), m(4)),),
    "crow_indices_copy": (lambda m: (m(3, 4).to_sparse_csr(),),),
    "div.Scalar_mode": (lambda m: (m(3, 4), 2, {"rounding_mode": "floor"}),),
    "divide.Scalar_mode": (lambda m: (m(3, 4), 2, {"rounding_mode": "trunc"}),),
    "embedding_renorm": (lambda m: (m(5, 3), m.index(5, 4), 0.5, 2.0),),
    "exponential": (_seeded(Tensor, 1.5),),
    "fill.Tensor": (lambda m: (m(3, 4), m()),),
    "fft_fftfreq": (lambda m: (9, 0.5, {"dtype": m.dtype}),),
    "fft_rfftfreq": (lambda m: (9, 0.5, {"dtype": m.dtype}),),
    "frobenius_norm.dim": (lambda m: (m(3, 4), [1], True),),
    "geometric": (_seeded(Tensor, 0.3),),
    "glu_backward_jvp": (lambda m: (m(3, 4), m(3, 2), m(3, 4), m(3, 2), m(3, 4), 1),),
    "glu_jvp": (lambda m: (m(3, 2), m(3, 4), m(3, 4), 1),),
    "hamming_window.periodic_alpha": (_window(True, 0.5),),
    "hamming_window.periodic_alpha_beta": (_window(True, 0.5, 0.4),),
    "indices_copy": (lambda m: (_sparse(m),),),
    "isin.Scalar_Tensor": (lambda m: (1, m(3, 4)),),
    "isin.Tensor_Scalar": (lambda m: (m(3, 4), 1, {"invert": True}),),
    "kaiser_window.beta": (_window(False, 8.0),),
    "linalg_cond.p_str": (lambda m: (m(4, 4), "fro"),),
    "linalg_matrix_rank": (lambda m: (m(3, 4), 0.1),),
    "linalg_matrix_rank.tol_tensor": (lambda m: (m(3, 4), torch.tensor(0.1)),),
    "linalg_pinv": (lambda m: (m(3, 4), 0.1),),
    "linear_backward": (lambda m: (m(3, 4), m(3, 5), m(5, 4), [True] * 3),),
    "log_normal": (_seeded(Tensor, 0.5, 1.0),),
    "matmul_backward": (lambda m: (m(3, 5), m(3, 4), m(4, 5), [True, True]),),
    "max_pool2d_backward": (lambda m: (m(2, 3, 3, 3), m(2, 3, 6, 6), [2, 2]),),
    "native_dropout": (lambda m: (m(3, 4), 0.5, True), lambda m: (m(3, 4), 0.5, False)),
    "native_norm": (lambda m: (_sparse(m),),),
    "native_norm.ScalarOpt_dim_dtype": (lambda m: (_sparse(m), 2, [0, 1], False, None),),
    "nll_loss": (lambda m: (m(4, 5), m.index(5, 4)), lambda m: (m(4, 5), m.index(5, 4), m.unit(5), 2, 1)),
    "nll_loss2d": (
        lambda m: (m(2, 5, 3, 3), m.index(5, 2, 3, 3)),
        lambda m: (m(2, 5, 3, 3), m.index(5, 2, 3, 3), None, 0),
    ),
    "norm.ScalarOpt_dim_dtype": (lambda m: (m(3, 4), 2, [1], True, {"dtype": torch.float64}),),
    "norm.ScalarOpt_dtype": (lambda m: (m(3, 4), 3, {"dtype": torch.float64}),),
    "normal.Tensor_Tensor": (lambda m: (m(3, 4), m.unit(3, 4), {"generator": _generator()}),),
    "normal.float_Tensor": (lambda m: (0.5, m.unit(3, 4), {"generator": _generator()}),),
    "normal.out": (_seeded(Tensor, 0.5, 2.0),),
    "nuclear_norm": (_unary,),
    "nuclear_norm.dim": (lambda m: (m(2, 3, 4), [0, 2], True),),
    "poisson": (lambda m: (m.unit(3, 4), _generator()),),
    "rand": (lambda m: ([3, 4], {"dtype": m.dtype}),),
    "rand.generator": (lambda m: ([3, 4], {"generator": _generator(), "dtype": m.dtype}),),
    "rand_like.generator": (_seeded(Tensor),),
    "randint.generator": (lambda _: (9, [3, 4], {"generator": _generator()}),),
    "randint.low_generator": (lambda _: (-3, 9, [3, 4], {"generator": _generator()}),),
    "randint_like.Tensor": (lambda m: (m(3, 4), torch.tensor(9)),),
    "randint_like.Tensor_generator": (lambda m: (m(3, 4), torch.tensor(9), {"generator": _generator()}),),
    "randint_like.generator": (_seeded(Tensor, 9),),
    "randint_like.low_generator_dtype": (_seeded(Tensor, -3, 9),),
    "randn.generator": (lambda m: ([3, 4], {"generator": _generator(), "dtype": m.dtype}),),
    "randn_like.generator": (_seeded(Tensor),),
    "random": (_seeded(Tensor),),
    "random.from": (_seeded(Tensor, -3, 9),),
    "random.to": (_seeded(Tensor, 9),),
    "randperm": (lambda _: (7,),),
    "randperm.generator": (lambda _: (7, {"generator": _generator()}),),
    "range": (lambda m: (1, 5, {"dtype": m.dtype}),),
    "range.step": (lambda m: (1, 9, 2, {"dtype": m.dtype}),),
    "reflection_pad3d": (lambda m: (_volume(m), [1, 1, 1, 1, 1, 1]),),
    "reflection_pad3d_backward": (lambda m: (m(1, 2, 5, 6, 7), _volume(m), [1, 1, 1, 1, 1, 1]),),
    "replication_pad3d": (lambda m: (_volume(m), [1, 2, 0, 1, 1, 0]),),
    "replication_pad3d_backward": (lambda m: (m(1, 2, 4, 5, 8), _volume(m), [1, 2, 0, 1, 1, 0]),),
    "row_indices_copy": (lambda m: (m(3, 4).to_sparse_csc(),),),
    "rrelu_with_noise": (lambda m: (m(3, 4), m(3, 4), 0.1, 0.3, True, _generator()),),
    "searchsorted.Scalar": (lambda m: (m(5).sort().values, 1),),
    "select_copy.int": (lambda m: (m(3, 4), 1, 2),),
    "slice_copy.Tensor": (lambda m: (m(5, 4), 0, 1, 4, 2),),
    "slogdet": (lambda m: (m(3, 3),),),
    "slow_conv3d": (_convolution_3d,),
    "slow_conv3d_forward": (lambda m: (*_convolution_3d(m), [1] * 3, [0] * 3),),
    "slow_conv_dilated2d": (lambda m: (*_image(m), m(4, 3, 2, 2), [2, 2], m(4), [1, 1], [0, 0], [2, 2]),),
    "slow_conv_dilated3d": (lambda m: (*_convolution_3d(m), [1] * 3, [1] * 3, [2] * 3),),
    "slow_conv_transpose2d": (lambda m: (*_image(m), m(3, 4, 2, 2), [2, 2], m(4), [2, 2]),),
    "slow_conv_transpose3d": (lambda m: (m(1, 2, 3, 4, 4), m(2, 3, 2, 2, 2), [2, 2, 2], m(3)),),
    "special_zeta.other_scalar": (lambda m: (m.unit(3, 4) + 2, 3),),
    "split_copy.Tensor": (lambda m: (m(5, 4), 2), lambda m: (m(5, 4), 3, 1)),
    "squeeze_copy.dims": (lambda m: (m(1, 3, 1, 4), [0, 2]),),
    "tensordot": (lambda m: (m(2, 3, 4), m(4, 3, 5), [1, 2], [1, 0]),),
    "thnn_conv2d": (lambda m: (*_image(m), m(4, 3, 2, 2), [2, 2], m(4)),),
    "unique_dim": (lambda m: (m.index(3, 5, 2).to(m.dtype), 0, True, True, True),),
    "unique_dim_consecutive": (lambda m: (m.index(2, 6, 2).to(m.dtype), 0, True, True),),
    "unsafe_split_with_sizes": (lambda m: (m(5, 4), [2, 3]),),
    "upsample_bicubic2d.vec": (
        lambda m: (*_image(m), [9, 8], False, None),
        lambda m: (*_image(m), None, True, [1.5, 2.0]),
    ),
    "upsample_bilinear2d.vec": (
        lambda m: (*_image(m), [9, 8], False, None),
        lambda m: (*_image(m), None, True, [1.5, 2.0]),
    ),
    "upsample_linear1d.vec": (lambda m: (m(2, 3, 5), [8], False, None), lambda m: (m(2, 3, 5), None, True, [2.0])),
    "upsample_nearest1d.vec": (lambda m: (m(2, 3, 5), [8], None), lambda m: (m(2, 3, 5), None, [2.0])),
    "upsample_nearest2d.vec": (lambda m: (*_image(m), [9, 8], None), lambda m: (*_image(m), None, [1.5, 2.0])),
    "upsample_nearest3d": (lambda m: (_volume(m), [4, 5, 7]),),
    "upsample_nearest3d.vec": (lambda m: (_volume(m), [4, 5, 7], None),),
    "upsample_nearest3d_backward": (lambda m: (m(1, 2, 6, 8, 10), [6, 8, 10], [1, 2, 3, 4, 5]),),
    "upsample_trilinear3d.vec": (lambda m: (_volume(m), [4, 5, 7], False, None),),
    "values_copy": (lambda m: (_sparse(m),), lambda m: (m(3, 4).to_sparse_csr(),)),
    "view_as_complex_copy": (lambda m: (m(3, 4, 2),),),
    "view_as_real_copy": (lambda m: (torch.complex(m(3, 4), m(3, 4)),),),
    "view_copy.dtype": (lambda m: (m(3, 4), torch.int32),),
    "where": (lambda m: (m.mask(3, 4),),),
    "where.Scalar": (lambda m: (m.mask(3, 4), 1, 2),),
    "where.ScalarOther": (lambda m: (m.mask(3, 4), m(3, 4), 2),),
    "where.ScalarSelf": (lambda m: (m.mask(3, 4), 1, m(3, 4)),),
    "zero": (_unary,),
}
"""By overload: functions that make the arguments of one call; a dictionary at the end holds keywords."""
