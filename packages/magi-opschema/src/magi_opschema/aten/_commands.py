# SPDX-License-Identifier: Apache-2.0
"""The command `magi-opschema`: its arguments, what it does, and what it prints. It has one topic, `aten`."""

from __future__ import annotations

import argparse
import contextlib
import re
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._generate.emit import out_text, parameter_texts, returns_text
from ._generate.schema import (
    SHIPPED,
    Base,
    Variant,
    base_and_overload,
    canonical_name,
    installed_schemas,
    nearest,
    python_name,
    read_allowlist,
    select_bases,
    verify,
)
from ._generate.surface import COVERAGE_FILE, drift, generate, surface_files, write_folder
from .errors import AtenError, OutputError, ScaffoldError, SlotError, SurfaceError, UnknownOpError


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
        expected = aten.{canonical}(*args, **kwargs)
    with aten.use_slot("{base}", {slot}):
        torch.testing.assert_close(aten.{canonical}(*args, **kwargs), expected)
'''


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with *argv*, the process's own arguments without it.

    Returns:
        0 for success; 1 if a check found something, such as drift or a failed test; 2 for a wrong call or bad input.
    """
    parser = argparse.ArgumentParser(prog="magi-opschema", description="PyTorch custom ops with rich signatures.")
    topics = parser.add_subparsers(required=True, metavar="TOPIC")
    topic = topics.add_parser("aten", help="the generated ATen surface", description="The generated ATen surface.")
    commands = topic.add_subparsers(required=True, metavar="COMMAND")

    gen = commands.add_parser("gen", help="generate the surface for the installed torch")
    gen.description = "Generate the surface of an allowlist for the installed torch. Imports no torch."
    _add_allowlist(gen)
    gen.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    gen.add_argument("--check", action="store_true", help="write nothing; exit 1 where DIR differs")
    gen.add_argument("--verify", action="store_true", help="compare each schema with torch's dispatcher")
    gen.set_defaults(run=_gen)

    coverage = commands.add_parser("coverage", help="what of ATen the surface has")
    coverage.description = "Print the coverage page. Imports no torch."
    _add_allowlist(coverage)
    coverage.set_defaults(run=_coverage)

    new = commands.add_parser("new", help="write a typed kernel to fill in, and its test")
    new.description = "Write OP_slotN.py, a kernel per overload to fill in, and test_OP_slotN.py. Imports no torch."
    new.add_argument("op", metavar="OP", help="softmax, linalg.norm, or one overload: add.Tensor")
    new.add_argument("--slot", type=int, required=True, metavar="N", help="0 to 7")
    new.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where (default: here)")
    new.set_defaults(run=_new)

    gap = commands.add_parser("gap", help="which operators a program uses that only slot 8 covers")
    gap.description = "Run SCRIPT and list the operators that it dispatched and that have no kernel below slot 8."
    gap.add_argument("--kernels", type=Path, metavar="FILE", help="a Python file that registers kernels; run first")
    gap.add_argument("script", type=Path, metavar="SCRIPT")
    gap.add_argument("arguments", nargs="*", metavar="ARG", help="arguments of SCRIPT, behind --")
    gap.set_defaults(run=_gap)

    options = parser.parse_args(argv)
    try:
        code: int = options.run(options)
    except AtenError as error:
        print(f"magi-opschema: {error}", file=sys.stderr)  # noqa: T201  # a command's answer
        return 2
    return code


def _add_allowlist(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allowlist", type=Path, default=SHIPPED, metavar="FILE", help="YAML list of base names")


def _gen(options: argparse.Namespace) -> int:
    names = read_allowlist(options.allowlist)
    schemas = installed_schemas()
    bases = select_bases(names, schemas, options.allowlist)
    files = surface_files(bases, schemas)
    if options.verify:
        _say(f"{verify(bases)} overloads agree with the dispatcher of torch {schemas.torch_version}")
    if options.check:
        lines = drift(files, options.out)
        for line in lines:
            _say(line)
        return 1 if lines else 0
    write_folder(files, options.out)
    overloads = sum(len(base.overloads) for base in bases)
    _say(f"{options.out}: {len(bases)} bases, {overloads} overloads of torch {schemas.torch_version}")
    return 0


def _coverage(options: argparse.Namespace) -> int:
    _say(generate(options.allowlist)[COVERAGE_FILE])
    return 0


def _new(options: argparse.Namespace) -> int:
    """Write a kernel file and a test file for an operator into a folder, which is made if it is missing.

    The operator is a base (`softmax`, `linalg.norm`), for a kernel for each overload, or one overload (`add.Tensor`).
    """
    slot, folder = options.slot, options.out
    if not 0 <= slot <= 7:
        raise SlotError(f"slot {slot}: kernels go into slots 0 to 7; 8 is ATen itself")
    schemas = installed_schemas()
    name, only = base_and_overload(options.op)
    if name not in schemas.out_counts:
        known = [*schemas.out_counts, *map(canonical_name, schemas.out_counts)]
        msg = f"torch {schemas.torch_version} has no operator {options.op!r} that writes into out="
        raise UnknownOpError(f"{msg}{nearest(options.op, known)}")
    base = schemas.base(name)
    variants = [v for v in base.variants if only is None or only in {o.attribute for o in v.overloads}]
    if not variants:
        names = [overload.attribute for overload in base.overloads]
        raise UnknownOpError(f"aten::{base.name} has no overload {only!r}{nearest(only or '', names)}")
    stem = f"{base.name}_slot{slot}"
    functions = "".join(_function(base, variant, slot) for variant in variants)
    files = {
        folder / f"{stem}.py": _KERNEL.format(
            base=base.name, slot=slot, imports=_imports(functions), functions=functions
        ),
        folder / f"test_{stem}.py": _TEST.format(base=base.name, canonical=base.canonical, slot=slot, stem=stem),
    }
    for path in files:
        if path.exists():
            raise ScaffoldError(f"{path} exists; move it away, or name another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        for path in files:
            with contextlib.suppress(OSError):  # a file that could not be written may not exist
                path.unlink()
        raise ScaffoldError(f"cannot write {folder}: {error.strerror}") from error
    _say("\n".join(map(str, files)))
    return 0


def _imports(functions: str) -> str:
    """Imports of the names that *functions* uses."""
    words = set(re.findall(r"\w+", functions))
    groups = []
    for modules in _IMPORTS:
        used = {module: [name for name in names if name in words] for module, names in modules.items()}
        groups.append("".join(f"from {module} import {', '.join(names)}\n" for module, names in used.items() if names))
    return "\n".join(filter(None, groups))


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


def _gap(options: argparse.Namespace) -> int:
    """Count the operators that the script dispatches, including those of gradients, and list them by who serves them.

    Operators that are not on the surface are views, in-place and vendor operators.
    """
    if not options.script.is_file():
        raise OutputError(f"{options.script} is not a file")
    from torch.utils._python_dispatch import TorchDispatchMode

    from ._dispatch.kernels import cells
    from ._dispatch.slots import default_surface

    counts: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            namespace, _, name = func.name().partition("::")
            base = name.partition(".")[0]
            counts[base.partition("__")[0] if namespace == "magi_aten" else base] += 1
            return func(*args, **(kwargs or {}))

    run_kernels(options.kernels)
    default_surface()
    try:
        with Count():  # type: ignore[no-untyped-call]  # torch's own is untyped
            _run_script(options.script, name="__main__", arguments=options.arguments)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    sections: dict[str, list[str]] = {"only slot 8": [], "a lower slot": [], "not on the surface": []}
    for base, count in counts.most_common():
        served = ("a lower slot" if cells[base].kernels else "only slot 8") if base in cells else "not on the surface"
        sections[served].append(f"  {base:40} {count} calls")
    for title, lines in sections.items():
        _say("\n".join([f"{title}: {len(lines)}", *lines]))
    return 0


def run_kernels(path: Path | None) -> None:
    """Run the file that registers the user's kernels, if there is one, with its own name and not as `__main__`."""
    if path is None:
        return
    if not path.is_file():
        raise SurfaceError(f"--kernels {path}: no such file")
    _run_script(path)


def _run_script(path: Path, *, name: str | None = None, arguments: Sequence[str] | None = None) -> None:
    """Run the file *path*, which can import modules from its folder, also later from inside its kernels.

    Its `__name__` is *name*, by default a unique one; without *arguments*, `sys.argv` is unchanged.
    """
    before = sys.argv
    sys.path.insert(0, str(path.resolve().parent))
    if arguments is not None:
        sys.argv = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name=name)
    finally:
        sys.argv = before


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a command's answer


if __name__ == "__main__":
    sys.exit(main())
