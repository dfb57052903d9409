# SPDX-License-Identifier: Apache-2.0
"""`magi-opschema aten new`: a typed kernel to fill in, and its test."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from magi_opschema.aten.errors import ScaffoldError, SlotError, UnknownOpError

from .emit import out_text, parameter_texts, returns_text
from .installed import InstalledSchemas
from .schema import Base, Variant, base_name, canonical_name, nearest, python_name


_KERNEL = '''\
"""Kernels for aten::{base} in slot {slot}."""

from __future__ import annotations

{imports}
{functions}'''

_IMPORTS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"collections.abc": ("Sequence",)},
    {"torch": ("Generator", "SymInt", "Tensor", "dtype", "layout", "memory_format")},
    {"magi_opschema": ("aten",), "magi_opschema.aten._types": ("Device", "Scalar")},
)
"""The names that a kernel can use, by module; a blank line separates the groups."""

_FUNCTION = '''

def {name}_supports({parameters}) -> bool:
    """Whether the kernel serves this call; false leaves it to the next slot."""
    return True


@aten.register_slot("{overload}", {slot}, devices=("cpu", "cuda"), supports={name}_supports)
def {name}({parameters_with_out}) -> {returns}:
    """aten::{schema}."""
    raise NotImplementedError
'''

_TEST = '''\
"""The kernels for aten::{base} in slot {slot} against ATen."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from magi_opschema import aten


runpy.run_path(str(Path(__file__).with_name("{stem}.py")))
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # arguments that the kernels serve


def test_there_are_calls() -> None:
    assert CALLS, "fill in calls"


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_{stem}(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with aten.use_slot("{base}", 8):
        expected = aten.{base}(*args, **kwargs)
    with aten.use_slot("{base}", {slot}):
        torch.testing.assert_close(aten.{base}(*args, **kwargs), expected)
'''


def scaffold(op: str, slot: int, folder: Path, schemas: InstalledSchemas) -> list[Path]:
    """Write a kernel file and a test file for *op* into *folder*, which is made if it is missing, and return both.

    *op* is a base (`softmax`, `linalg.norm`), for a kernel for each overload, or one overload (`add.Tensor`).
    """
    if not 0 <= slot <= 7:
        msg = f"slot {slot}: kernels go into slots 0 to 7; 8 is ATen itself"
        raise SlotError(msg)
    base, only = _find(op, schemas)
    variants = [v for v in base.variants if only is None or only in {o.attribute for o in v.overloads}]
    if not variants:
        names = [overload.attribute for overload in base.overloads]
        msg = f"aten::{base.name} has no overload {only!r}{nearest(only or '', names)}"
        raise UnknownOpError(msg)
    stem = f"{base.name}_slot{slot}"
    functions = "".join(_function(base, variant, slot) for variant in variants)
    files = {
        folder / f"{stem}.py": _KERNEL.format(
            base=base.name, slot=slot, imports=_imports(functions), functions=functions
        ),
        folder / f"test_{stem}.py": _TEST.format(base=base.name, slot=slot, stem=stem),
    }
    for path in files:
        if path.exists():
            msg = f"{path} exists; move it away, or name another folder with --out"
            raise ScaffoldError(msg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        for path in files:
            with contextlib.suppress(OSError):  # a file that could not be written may not exist
                path.unlink()
        msg = f"cannot write {folder}: {error.strerror}"
        raise ScaffoldError(msg) from error
    return list(files)


def _imports(functions: str) -> str:
    """Imports of the names that *functions* uses."""
    words = set(re.findall(r"\w+", functions))
    groups = []
    for modules in _IMPORTS:
        used = {module: [name for name in names if name in words] for module, names in modules.items()}
        groups.append("".join(f"from {module} import {', '.join(names)}\n" for module, names in used.items() if names))
    return "\n".join(filter(None, groups))


def _find(op: str, schemas: InstalledSchemas) -> tuple[Base, str | None]:
    for name, only in ((op, None), (base_name(op), None), tuple(op.rpartition(".")[::2])):
        if name in schemas.out_counts:
            return schemas.base(name), only
    known = [*schemas.out_counts, *map(canonical_name, schemas.out_counts)]
    msg = f"torch {schemas.torch_version} has no operator {op!r} that writes into out={nearest(op, known)}"
    raise UnknownOpError(msg)


def _function(base: Base, variant: Variant, slot: int) -> str:
    leading = variant.leading
    positional, keyword = parameter_texts(variant)
    out = f"out: {out_text(variant)} | None = None"
    return _FUNCTION.format(
        name=f"{base.name}_{python_name(leading.attribute)}",
        overload=f"{base.name}.{leading.attribute}",
        slot=slot,
        parameters=", ".join([*positional, *(["*", *keyword] if keyword else [])]),
        parameters_with_out=", ".join([*positional, "*", *keyword, out]),
        returns=returns_text(variant),
        schema=leading.schema,
    )
