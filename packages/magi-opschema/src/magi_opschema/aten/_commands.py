# SPDX-License-Identifier: Apache-2.0
"""The commands `magi-opschema aten ...`: their arguments, what they do, and what they print."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._generate.installed import SHIPPED, installed_schemas, read_allowlist, select_bases, verify
from ._generate.scaffold import scaffold
from ._generate.surface import COVERAGE_FILE, drift, generate, surface_files, write_folder
from .errors import OutputError, SurfaceError


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command to the parser of the topic `aten`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

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
    for path in scaffold(options.op, options.slot, options.out, installed_schemas()):
        _say(str(path))
    return 0


def _gap(options: argparse.Namespace) -> int:
    """Count the operators that the script dispatches, including those of gradients, and list them by who serves them.

    Operators that are not on the surface are views, in-place and vendor operators.
    """
    if not options.script.is_file():
        msg = f"{options.script} is not a file"
        raise OutputError(msg)
    from torch.utils._python_dispatch import TorchDispatchMode

    from ._dispatch.kernels import cells
    from ._dispatch.load import default_surface

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
        msg = f"--kernels {path}: no such file"
        raise SurfaceError(msg)
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
