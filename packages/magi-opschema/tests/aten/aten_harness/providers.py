# SPDX-License-Identifier: Apache-2.0
"""Inputs for a variant, from the best provider that has any: recipes, torch's database, captured calls, the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from magi_opschema.aten._generate.schema import OPTIONS
from magi_opschema.aten._torch_compat import arguments

from .fuzz import fuzzed_samples
from .op_db import captured_samples, direct_samples
from .recipes import RECIPES, recipe_samples
from .samples import Sample


if TYPE_CHECKING:
    from collections.abc import Iterable

    from .subject import Subject


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
_KEPT = 4
_FUZZED_DTYPES = (torch.float32, torch.int64, torch.complex64)


def samples_for(subjects: list[Subject]) -> dict[Subject, list[Sample]]:
    """Inputs for the variants of one base; a variant that no provider reaches has none."""
    found: dict[Subject, list[Sample]] = {subject: _from_recipes(subject) for subject in subjects}
    by_overload = {
        name: subject for subject in subjects for name in (subject.pair.functional, subject.pair.out) if name
    }
    for dtype in DTYPES:
        _add_direct(found, by_overload, subjects[0].base, dtype)
    for subject in subjects:
        if not found[subject]:
            found[subject] = _captured(subject)
        if not found[subject]:
            found[subject] = fuzzed_samples(subject.leading, _FUZZED_DTYPES)
    return {subject: [*samples, *_with_options(subject, samples)] for subject, samples in found.items()}


def _from_recipes(subject: Subject) -> list[Sample]:
    label = subject.label
    if label not in RECIPES:
        return []
    # A recipe is for float32; other dtypes are tried with ATen.
    samples = recipe_samples(label, torch.float32)
    for dtype in DTYPES[1:]:
        for position in range(len(samples[: len(RECIPES[label])])):
            sample = _accepted(subject, lambda dtype=dtype, position=position: recipe_samples(label, dtype)[position])
            samples += [sample] if sample is not None else []
    return samples


def _add_direct(
    found: dict[Subject, list[Sample]], by_overload: dict[str, Subject], base: str, dtype: torch.dtype
) -> None:
    shapes: dict[Subject, set[Any]] = {}
    for overload, sample in direct_samples(base, dtype):
        subject = by_overload.get(overload)
        if subject is None:
            continue
        seen = shapes.setdefault(subject, set())
        form = (tuple(t.shape for t in sample.tensors()), tuple(sample.kwargs), len(sample.args))
        if len(seen) < _KEPT and form not in seen:
            seen.add(form)
            found[subject].append(sample)


def _captured(subject: Subject) -> list[Sample]:
    calls = captured_samples()
    names = [name for name in (subject.pair.functional, subject.pair.out) if name is not None]
    samples = [s for name in names for s in calls.get(f"aten.{subject.base}.{name}", ())]
    samples = [
        Sample(s.args, {k: v for k, v in s.kwargs.items() if k not in subject.outs}, s.origin, s.dtype) for s in samples
    ]
    halved = [_accepted(subject, lambda s=s: _cast(s, torch.bfloat16)) for s in samples[:2]]
    return samples + [sample for sample in halved if sample is not None]


def _cast(sample: Sample, dtype: torch.dtype) -> Sample:
    changed = sample.map_tensors(lambda t: t.to(dtype) if t.dtype is torch.float32 else t)
    return Sample(changed.args, changed.kwargs, sample.origin, dtype)


def _with_options(subject: Subject, samples: list[Sample]) -> list[Sample]:
    """Another copy of a sample for each optional number or flag, with another value than its default.

    The sample is the largest of the first dtype, because in a small one, an argument that is not passed on may make no
    difference.
    """
    if not samples:
        return []
    first = max((s for s in samples if s.dtype == samples[0].dtype), key=_elements)
    schema = arguments(subject.leading)
    varied = []
    for position, argument in enumerate(schema):
        if argument.is_out or argument.name in OPTIONS or not argument.has_default_value():
            continue
        for value in _other_values(argument.default_value):
            args, kwargs = first.args, {**first.kwargs, argument.name: value}
            if position < len(first.args) and not argument.kwarg_only:
                args, kwargs = (*args[:position], value, *args[position + 1 :]), first.kwargs
            sample = Sample(args, kwargs, f"option {argument.name}", first.dtype)
            if _accepted(subject, lambda sample=sample: sample) is not None:
                varied.append(sample)
                break
    return varied


def _elements(sample: Sample) -> int:
    return sum(t.numel() for t in sample.tensors())


def _other_values(default: Any) -> Iterable[Any]:
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, (int, float)):
        # The next number comes first, because an int may stand for an enumeration, as in `reduction`.
        return (default + 1, default + 0.5, default - 1)
    return ()


def _accepted(subject: Subject, make: Any) -> Sample | None:
    """The sample where ATen takes it; this asks what exists, and no check is lost by a no."""
    try:
        sample: Sample = make()
        subject.straight(sample.fresh())
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    return sample
