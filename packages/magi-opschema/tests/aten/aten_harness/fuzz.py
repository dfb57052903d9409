# SPDX-License-Identifier: Apache-2.0
"""Inputs guessed from a schema, for overloads that no other provider reaches.

Guessed arguments can crash a kernel of torch, so the guessing runs in a process of its own, which sends back only what
ATen accepted.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from magi_opschema.aten._torch_compat import OpOverload, arguments
from torch import Tensor

from .samples import Sample
from .workers import isolated


_TRIES = 60
_WANTED = 2
_SECONDS = 4.0


def fuzzed_samples(overload: OpOverload, dtypes: tuple[torch.dtype, ...]) -> list[Sample]:
    """Calls of *overload* that ATen accepts; none if no guess fits, or if guessing crashes or hangs."""
    calls = isolated(lambda: [_accepted(overload, dtype) for dtype in dtypes], seconds=_SECONDS)
    if calls is None:  # a dtype that crashes must not affect the others
        calls = [isolated(lambda d=dtype: _accepted(overload, d), seconds=_SECONDS) or [] for dtype in dtypes]  # type: ignore[misc]
    return [
        Sample(tuple(args), kwargs, "schema", dtype)
        for dtype, found in zip(dtypes, calls, strict=True)
        for args, kwargs in found
    ]


def _accepted(overload: OpOverload, dtype: torch.dtype) -> list[tuple[list[Any], dict[str, Any]]]:
    rng = random.Random(str(overload))  # the same guesses in every run
    torch.manual_seed(0)
    found = []
    for _ in range(_TRIES):
        shape = rng.choice([(3, 4), (4, 4), (2, 3, 4), (2, 3, 4, 4), (5,), (1, 2, 4, 4, 4)])
        args, kwargs = [], {}
        for argument in arguments(overload):
            if argument.is_out:
                continue
            if argument.kwarg_only:
                if not argument.has_default_value():
                    kwargs[argument.name] = _guess(argument, shape, dtype, rng)
                continue
            args.append(_guess(argument, shape, dtype, rng))
        try:
            outs = {a.name: torch.empty(0, dtype=dtype) for a in arguments(overload) if a.is_out}
            overload(*args, **kwargs, **outs)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue  # ATen refused the guess
        found.append((args, kwargs))
        if len(found) == _WANTED:
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
