# SPDX-License-Identifier: Apache-2.0
"""Inputs for a variant, from the best provider that has any.

First torch's own test database: its samples passed to ATen, and the calls that ATen saw when they ran. Overloads that
it does not reach, forms with a number for a tensor above all, get what their schema requires. Recipes are for those
that need more than that, or whose generator is to be passed.
"""

from __future__ import annotations

import functools as ft
import itertools as it
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from magi_opschema._model.schema import tensors_in
from magi_opschema.aten._generate.schema import OPTIONS
from magi_opschema.aten._torch_compat import arguments, find_overload
from magi_opschema.aten.errors import MissingExtraError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .subject import Sample, Subject


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
        return torch.rand(shape, generator=self._generator).to(self.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def mask(self, *shape: int) -> Tensor:
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


def _image(m: Make) -> Call:
    return (m(2, 3, 6, 6),)


def _convolution_3d(m: Make) -> Call:
    return m(1, 2, 4, 5, 6), m(3, 2, 2, 2, 2), [2, 2, 2], m(3)


def _seeded(*args: Any) -> Callable[[Make], Call]:
    return lambda m: (*(m(3, 4) if arg is Tensor else arg for arg in args), {"generator": _generator()})


def _volume(m: Make) -> Tensor:
    return m(1, 2, 3, 4, 5)


def _sparse(m: Make) -> Tensor:
    return m(3, 4).relu().to_sparse().coalesce()


RECIPES: dict[str, tuple[Callable[[Make], Call], ...]] = {
    "adaptive_avg_pool3d_backward.grad_input": (lambda m: (m(1, 2, 2, 2, 2), m(1, 2, 4, 4, 4)),),
    "affine_grid_generator": (
        lambda m: (m(2, 2, 3), [2, 1, 4, 5], False),
        lambda m: (m(1, 3, 4), [1, 1, 2, 3, 4], True),
    ),
    "bernoulli": (lambda m: (m.unit(3, 4), {"generator": _generator()}),),
    "bernoulli.Tensor": (lambda m: (m(3, 4), m.unit(3, 4), {"generator": _generator()}),),
    "bernoulli.float_out": (_seeded(Tensor, 0.25),),
    "bernoulli.p": (_seeded(Tensor, 0.25),),
    "bucketize.Scalar": (lambda m: (1, m(5).sort().values),),
    "cauchy": (_seeded(Tensor, 1.0, 2.0),),
    "ccol_indices_copy": (lambda m: (m(3, 4).to_sparse_csc(),),),
    "chain_matmul": (lambda m: ([m(2, 3), m(3, 4), m(4, 2)],),),
    "clip": (lambda m: (m(3, 4), -1, 1), lambda m: (m(3, 4), None, 1)),
    "col_indices_copy": (lambda m: (m(3, 4).to_sparse_csr(),),),
    "conv_depthwise3d": (lambda m: (m(1, 2, 4, 4, 4), m(2, 1, 2, 2, 2), [2, 2, 2], m(2), [1] * 3, [0] * 3, [1] * 3),),
    "conv_tbc": (lambda m: (m(5, 2, 3), m(2, 3, 4), m(4), 1),),
    "crow_indices_copy": (lambda m: (m(3, 4).to_sparse_csr(),),),
    "div.Scalar_mode": (lambda m: (m(3, 4), 2, {"rounding_mode": "floor"}),),
    "divide.Scalar_mode": (lambda m: (m(3, 4), 2, {"rounding_mode": "trunc"}),),
    "embedding_renorm": (lambda m: (m(5, 3), m.index(5, 4), 0.5, 2.0),),
    "exponential": (_seeded(Tensor, 1.5),),
    "fft_fftfreq": (lambda m: (9, 0.5, {"dtype": m.dtype}),),
    "fill.Tensor": (lambda m: (m(3, 4), m()),),
    "frobenius_norm.dim": (lambda m: (m(3, 4), [1], True),),
    "geometric": (_seeded(Tensor, 0.3),),
    "glu_backward_jvp": (lambda m: (m(3, 4), m(3, 2), m(3, 4), m(3, 2), m(3, 4), 1),),
    "glu_jvp": (lambda m: (m(3, 2), m(3, 4), m(3, 4), 1),),
    "indices_copy": (lambda m: (_sparse(m),),),
    "linalg_cond.p_str": (lambda m: (m(4, 4), "fro"),),
    "linalg_matrix_rank.tol_tensor": (lambda m: (m(3, 4), torch.tensor(0.1)),),
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
    "nuclear_norm.dim": (lambda m: (m(2, 3, 4), [0, 2], True),),
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
    "random.from": (_seeded(Tensor, -3, 9),),
    "randperm.generator": (lambda _: (7, {"generator": _generator()}),),
    "reflection_pad3d": (lambda m: (_volume(m), [1, 1, 1, 1, 1, 1]),),
    "reflection_pad3d_backward": (lambda m: (m(1, 2, 5, 6, 7), _volume(m), [1, 1, 1, 1, 1, 1]),),
    "replication_pad3d": (lambda m: (_volume(m), [1, 2, 0, 1, 1, 0]),),
    "replication_pad3d_backward": (lambda m: (m(1, 2, 4, 5, 8), _volume(m), [1, 2, 0, 1, 1, 0]),),
    "row_indices_copy": (lambda m: (m(3, 4).to_sparse_csc(),),),
    "rrelu_with_noise": (lambda m: (m(3, 4), m(3, 4), 0.1, 0.3, True, _generator()),),
    "searchsorted.Scalar": (lambda m: (m(5).sort().values, 1),),
    "select_copy.int": (lambda m: (m(3, 4), 1, 2),),
    "slogdet": (lambda m: (m(3, 3),),),
    "slow_conv3d": (_convolution_3d,),
    "slow_conv3d_forward": (lambda m: (*_convolution_3d(m), [1] * 3, [0] * 3),),
    "slow_conv_dilated2d": (lambda m: (*_image(m), m(4, 3, 2, 2), [2, 2], m(4), [1, 1], [0, 0], [2, 2]),),
    "slow_conv_dilated3d": (lambda m: (*_convolution_3d(m), [1] * 3, [1] * 3, [2] * 3),),
    "slow_conv_transpose2d": (lambda m: (*_image(m), m(3, 4, 2, 2), [2, 2], m(4), [2, 2]),),
    "slow_conv_transpose3d": (lambda m: (m(1, 2, 3, 4, 4), m(2, 3, 2, 2, 2), [2, 2, 2], m(3)),),
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
    "view_copy.dtype": (lambda m: (m(3, 4), torch.int32),),
    "where.Scalar": (lambda m: (m.mask(3, 4), 1, 2),),
    "where.ScalarOther": (lambda m: (m.mask(3, 4), m(3, 4), 2),),
    "where.ScalarSelf": (lambda m: (m.mask(3, 4), 1, m(3, 4)),),
}
"""By overload: functions that make the arguments of one call; a dictionary at the end holds keywords."""


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
_KEPT = 4
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What ATen raises for arguments that it does not take."""

_SAMPLES_PER_OP_INFO = 40
_LARGEST = 20_000
"""The number of elements above which a sample is too slow to be useful."""


def samples_for(subjects: list[Subject]) -> dict[Subject, list[Sample]]:
    """Inputs for the variants of one base; a variant that no provider reaches has none."""
    found: dict[Subject, list[Sample]] = {subject: _from_recipes(subject) for subject in subjects}
    by_overload = {name: subject for subject in subjects for name in subject.pair.names}
    for dtype in DTYPES:
        forms: dict[Subject, set[Any]] = defaultdict(set)
        for overload, sample in _direct_samples(subjects[0].base, dtype):
            form = (tuple(t.shape for t in sample.tensors()), tuple(sample.kwargs), len(sample.args))
            subject = by_overload.get(overload)
            if subject is not None and len(forms[subject]) < _KEPT and form not in forms[subject]:
                forms[subject].add(form)
                found[subject].append(sample)
    for subject in subjects:
        if not found[subject]:
            found[subject] = _captured(subject)
        if not found[subject]:
            found[subject] = _plain_samples(subject)
    return {subject: [*samples, *_with_options(subject, samples)] for subject, samples in found.items()}


def _from_recipes(subject: Subject) -> list[Sample]:
    # A recipe is for float32; other dtypes are tried with ATen.
    samples = recipe_samples(subject.label, torch.float32)
    for dtype in DTYPES[1:]:
        for position in range(len(RECIPES.get(subject.label, ()))):
            samples += _accepted(subject, lambda d=dtype, i=position: recipe_samples(subject.label, d)[i])
    return samples


def _captured(subject: Subject) -> list[Sample]:
    calls = captured_samples()
    found = [s for name in subject.pair.names for s in calls.get(f"aten.{subject.base}.{name}", ())]
    samples = [
        Sample(s.args, {k: v for k, v in s.kwargs.items() if k not in subject.outs}, s.origin, s.dtype) for s in found
    ]
    for sample in samples[:2]:
        half = sample.map_tensors(lambda t: t.to(torch.bfloat16) if t.dtype is torch.float32 else t)
        samples += _accepted(subject, lambda s=half: Sample(s.args, s.kwargs, s.origin, torch.bfloat16))
    return samples


def _with_options(subject: Subject, samples: list[Sample]) -> list[Sample]:
    """Another copy of a sample for each optional number or flag, with another value than its default.

    The sample is the largest of the first dtype, because in a small one, an argument that is not passed on may make no
    difference.
    """
    if not samples:
        return []
    alike = (s for s in samples if s.dtype == samples[0].dtype)
    first = max(alike, key=lambda s: sum(t.numel() for t in s.tensors()))
    varied = []
    for position, argument in enumerate(arguments(subject.leading)):
        if argument.is_out or argument.name in OPTIONS or not argument.has_default_value():
            continue
        for value in _other_values(argument.default_value):
            args, kwargs = first.args, {**first.kwargs, argument.name: value}
            if position < len(first.args) and not argument.kwarg_only:
                args, kwargs = (*args[:position], value, *args[position + 1 :]), first.kwargs
            sample = Sample(args, kwargs, f"option {argument.name}", first.dtype)
            if _accepted(subject, lambda sample=sample: sample):
                varied.append(sample)
                break
    return varied


def _other_values(default: Any) -> Iterable[Any]:
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, (int, float)):
        # The next number comes first, because an int may stand for an enumeration, as in `reduction`.
        return (default + 1, default + 0.5, default - 1)
    return ()


def _accepted(subject: Subject, make: Any) -> list[Sample]:
    """The sample where ATen takes it, otherwise nothing; this asks what exists, and no check is lost by a no."""
    try:
        sample: Sample = make()
        subject.straight(sample.fresh())
    except _REFUSALS:
        return []
    return [sample]


@ft.cache
def op_infos() -> dict[str, list[Any]]:
    """The database's entries by every ATen base that they may stand for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from torch.testing._internal.common_methods_invocations import op_db
        except ImportError as error:
            msg = f"torch's test database cannot be imported ({error}): pip install 'magi-opschema[aten]'."
            raise MissingExtraError(msg) from error
    found: dict[str, list[Any]] = defaultdict(list)
    for info in op_db:
        aliases = [alias.name for alias in info.aliases]
        names = {name.replace(".", "_") for name in (info.name, *aliases)} | {info.aten_name}
        names |= {name.removeprefix("nn_functional_") for name in names}
        for name in names:
            found[name].append(info)
    return dict(found)


def _direct_samples(base: str, dtype: torch.dtype) -> Iterator[tuple[str, Sample]]:
    """Samples of entries named like *base* that ATen's own overload resolution accepts, each with its overload."""
    for info in op_infos().get(base, ()):
        for sample in _samples(info, dtype) if dtype in info.dtypes else ():
            args = (sample.input, *sample.args)
            try:
                overload = torch._C._jit_resolve_packet(f"aten::{base}", *args, **sample.kwargs) or "default"
            except (RuntimeError, TypeError):
                continue  # no overload accepts these arguments
            # A tensor for a number of the schema: ATen reads its value, a caller means another form.
            schema = arguments(find_overload(base, overload))  # type: ignore[arg-type]  # it was just resolved
            pairs = zip(schema, args, strict=False)
            if not any(isinstance(value, Tensor) and "Tensor" not in str(a.type) for a, value in pairs):
                yield overload, Sample(args, dict(sample.kwargs), "op_db", dtype).map_tensors(Tensor.detach)


@ft.cache
def captured_samples() -> dict[str, list[Sample]]:
    """The calls of every ATen overload while the whole database ran, forward and backward."""
    capture = _Capture()
    for info in {id(info): info for infos in op_infos().values() for info in infos}.values():
        if torch.float32 not in info.dtypes:
            continue
        differentiable = info.supports_autograd
        for sample in it.islice(_samples(info, torch.float32, requires_grad=differentiable), 8):
            # The database has samples that raise by design, or that run on other devices only; these are skipped.
            try:
                with capture, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result = info(sample.input, *sample.args, **sample.kwargs)
                    outputs = [t for t in tensors_in(result) if t.requires_grad]
                    if outputs and differentiable:
                        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
            except (*_REFUSALS, AttributeError, AssertionError):
                continue
    return capture.calls


class _Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is untyped
        self.calls: dict[str, list[Sample]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("aten.") and len(self.calls[name]) < _KEPT:
            sample = Sample(tuple(args), dict(kwargs), "captured", torch.float32)
            if sum(t.numel() for t in sample.tensors()) <= _LARGEST:
                self.calls[name].append(sample.fresh())
        return func(*args, **kwargs)


def _samples(info: Any, dtype: torch.dtype, *, requires_grad: bool = False) -> Iterator[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = info.sample_inputs("cpu", dtype, requires_grad=requires_grad)
        for sample in it.islice(found, _SAMPLES_PER_OP_INFO):
            tensors = tensors_in([sample.input, *sample.args, *sample.kwargs.values()])
            if sum(t.numel() for t in tensors) <= _LARGEST:
                yield sample


def _plain_samples(subject: Subject) -> list[Sample]:
    """Calls of *subject* with what it requires alone, tensors and numbers, in the dtypes that ATen takes."""
    required = [a for a in arguments(subject.leading) if not (a.is_out or a.has_default_value())]

    def call(dtype: torch.dtype) -> Sample:
        make = Make(dtype)
        given = {a.name: make.unit(3, 4) + 1 if str(a.type) == "Tensor" else 2 for a in required}
        args = tuple(given[a.name] for a in required if not a.kwarg_only)
        return Sample(args, {a.name: given[a.name] for a in required if a.kwarg_only}, "schema", dtype)

    return [sample for dtype in DTYPES for sample in _accepted(subject, lambda d=dtype: call(d))]
