# SPDX-License-Identifier: Apache-2.0
"""Inputs for a variant, from the best provider that has any.

Recipes come first, then torch's own test database: its samples passed to ATen, and the calls that ATen saw when they
ran. For overloads that neither reaches, inputs are guessed from the schema. Guessed arguments can crash a kernel of
torch, so the guessing runs in a process of its own, which sends back only what ATen accepted.
"""

from __future__ import annotations

import functools as ft
import itertools as it
import random
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from magi_opschema.aten._generate.schema import OPTIONS
from magi_opschema.aten._torch_compat import OpOverload, arguments, find_overload
from magi_opschema.aten.errors import MissingExtraError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .recipes import RECIPES, recipe_samples
from .subject import Sample, Subject
from .workers import isolated


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
_KEPT = 4
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What ATen raises for arguments that it does not take."""

_SAMPLES_PER_OP_INFO = 40
_LARGEST = 20_000
"""The number of elements above which a sample is too slow to be useful."""

_FUZZED_DTYPES = (torch.float32, torch.int64, torch.complex64)
_FUZZED_SECONDS = 4.0


def samples_for(subjects: list[Subject]) -> dict[Subject, list[Sample]]:
    """Inputs for the variants of one base; a variant that no provider reaches has none."""
    found: dict[Subject, list[Sample]] = {subject: _from_recipes(subject) for subject in subjects}
    by_overload = {
        name: subject for subject in subjects for name in (subject.pair.functional, subject.pair.out) if name
    }
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
            found[subject] = _fuzzed_samples(subject.leading)
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
    names = [name for name in (subject.pair.functional, subject.pair.out) if name is not None]
    found = [s for name in names for s in calls.get(f"aten.{subject.base}.{name}", ())]
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
    """The database's entries by every ATen base that they may stand for.

    Raises:
        MissingExtraError: numpy or expecttest, which it needs, is missing.
    """
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
                    outputs = [t for t in _tensors(result) if t.requires_grad]
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
            tensors = _tensors([sample.input, *sample.args, *sample.kwargs.values()])
            if sum(t.numel() for t in tensors) <= _LARGEST:
                yield sample


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _fuzzed_samples(overload: OpOverload) -> list[Sample]:
    """Calls of *overload* that ATen accepts; none if no guess fits, or if guessing crashes or hangs."""
    dtypes = _FUZZED_DTYPES
    calls = isolated(lambda: [_guesses(overload, dtype) for dtype in dtypes], seconds=_FUZZED_SECONDS)
    if calls is None:  # a dtype that crashes must not affect the others
        alone = [isolated(ft.partial(_guesses, overload, dtype), seconds=_FUZZED_SECONDS) for dtype in dtypes]
        calls = [found or [] for found in alone]
    pairs = zip(dtypes, calls, strict=True)
    return [Sample(tuple(args), kwargs, "schema", dtype) for dtype, found in pairs for args, kwargs in found]


def _guesses(overload: OpOverload, dtype: torch.dtype) -> list[tuple[list[Any], dict[str, Any]]]:
    """Two calls that ATen accepts, or fewer."""
    rng = random.Random(str(overload))  # the same guesses in every run
    torch.manual_seed(0)
    found: list[tuple[list[Any], dict[str, Any]]] = []
    inputs = [a for a in arguments(overload) if not a.is_out]
    for _ in range(60):
        shape = rng.choice([(3, 4), (4, 4), (2, 3, 4), (2, 3, 4, 4), (5,), (1, 2, 4, 4, 4)])
        args, kwargs = [], {}
        for argument in inputs:
            if not argument.kwarg_only:
                args.append(_guess(argument, shape, dtype, rng))
            elif not argument.has_default_value():
                kwargs[argument.name] = _guess(argument, shape, dtype, rng)
        try:
            outs = {a.name: torch.empty(0, dtype=dtype) for a in arguments(overload) if a.is_out}
            overload(*args, **kwargs, **outs)
        except _REFUSALS:
            continue
        found.append((args, kwargs))
        if len(found) == 2:
            break
    return found


def _guess(argument: Any, shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> Any:
    name, type_ = argument.name, str(argument.type)
    if argument.has_default_value() and rng.random() < 0.7:
        return argument.default_value
    if type_.startswith("Optional["):
        if rng.random() < 0.5:
            return None
        type_ = type_.removeprefix("Optional[")[:-1]
    if type_ == "Tensor":
        return _tensor(name, shape, dtype, rng)
    if type_ == "List[Tensor]":
        return [_tensor(name, shape, dtype, rng) for _ in range(2)]
    if type_.startswith("List["):
        length = argument.N or rng.choice([1, 2, len(shape)])
        element = type_.removeprefix("List[")[:-1]
        return [_number(name, element, rng) for _ in range(length)]
    return _number(name, type_, rng)


def _tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> Tensor:
    if "mask" in name or name == "condition":
        return torch.rand(shape) > 0.5
    if any(word in name for word in ("index", "indices", "target", "repeats")):
        return torch.randint(2, shape)
    if rng.random() < 0.2:
        shape = shape[1:] or (1,)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 3, shape).to(dtype)
    return torch.randn(shape, dtype=dtype)


def _number(name: str, type_: str, rng: random.Random) -> Any:
    if type_ == "bool":
        return rng.random() < 0.5
    if type_ == "str":
        return rng.choice(["mean", "sum", "none", "fro", "reflect", "linear", "L", "U"])
    if type_ in {"float", "number"}:
        return rng.choice([0.5, 1.0, 2.0]) if type_ == "float" else rng.choice([1, 2, 0.5])
    if type_ == "int":
        return rng.choice([0, 1, -1]) if "dim" in name else rng.choice([1, 2, 0, 3])
    return None
