# SPDX-License-Identifier: Apache-2.0
"""The commands `magi-opschema aten ...`: their arguments, and what they print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ._generate.allowlist import SHIPPED


if TYPE_CHECKING:
    import argparse


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command to the parser of the topic `aten`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_gen(commands.add_parser("gen", help="generate the surface for the installed torch"))
    _add_coverage(commands.add_parser("coverage", help="what of ATen the surface has"))
    _add_new(commands.add_parser("new", help="write a typed kernel to fill in, and its test"))
    _add_gap(commands.add_parser("gap", help="which operators a program uses that only slot 8 covers"))


def _add_gen(parser: argparse.ArgumentParser) -> None:
    parser.description = "Generate the surface of an allowlist for the installed torch. Imports no torch."
    _add_allowlist(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where DIR differs")
    parser.add_argument("--verify", action="store_true", help="compare each schema with torch's dispatcher")
    parser.set_defaults(run=_gen)


def _add_coverage(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the coverage page. Imports no torch."
    _add_allowlist(parser)
    parser.set_defaults(run=_coverage)


def _add_new(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write OP_slotN.py, a kernel per overload to fill in, and test_OP_slotN.py. Imports no torch."
    parser.add_argument("op", metavar="OP", help="softmax, linalg.norm, or one overload: add.Tensor")
    parser.add_argument("--slot", type=int, required=True, metavar="N", help="0 to 7")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where (default: here)")
    parser.set_defaults(run=_new)


def _add_gap(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run SCRIPT and list the operators that it dispatched and that have no kernel below slot 8."
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="a Python file that registers kernels; run first")
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument("arguments", nargs="*", metavar="ARG", help="arguments of SCRIPT, behind --")
    parser.set_defaults(run=_gap)


def _add_allowlist(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allowlist", type=Path, default=SHIPPED, metavar="FILE", help="YAML list of base names")


def _gen(options: argparse.Namespace) -> int:
    from ._generate.allowlist import read_allowlist, select_bases
    from ._generate.files import drift, write_folder
    from ._generate.surface import surface_files
    from ._generate.torchgen import installed_schemas

    names = read_allowlist(options.allowlist)
    schemas = installed_schemas()
    bases = select_bases(names, schemas, options.allowlist)
    files = surface_files(bases, schemas)
    overloads = sum(len(base.overloads) for base in bases)
    if options.verify:
        from ._generate.verify import verify

        _say(f"{verify(bases)} overloads agree with the dispatcher of torch {schemas.torch_version}")
    if options.check:
        lines = drift(files, options.out)
        for line in lines:
            _say(line)
        return 1 if lines else 0
    write_folder(files, options.out)
    _say(f"{options.out}: {len(bases)} bases, {overloads} overloads of torch {schemas.torch_version}")
    return 0


def _coverage(options: argparse.Namespace) -> int:
    from ._generate.coverage_page import FILE_NAME
    from ._generate.surface import generate

    _say(generate(options.allowlist)[FILE_NAME])
    return 0


def _new(options: argparse.Namespace) -> int:
    from ._generate.scaffold import scaffold
    from ._generate.torchgen import installed_schemas

    for path in scaffold(options.op, options.slot, options.out, installed_schemas()):
        _say(str(path))
    return 0


def _gap(options: argparse.Namespace) -> int:
    from .errors import OutputError

    if not options.script.is_file():
        msg = f"{options.script} is not a file"
        raise OutputError(msg)
    from ._dispatch.gap import find_gap, run_kernels

    run_kernels(options.kernels)

    gap = find_gap(options.script, options.arguments)
    for title, counts in (
        ("only slot 8", gap.only_aten),
        ("a lower slot", gap.covered),
        ("not on the surface", gap.outside),
    ):
        _say(f"{title}: {len(counts)}")
        for base, count in counts.items():
            _say(f"  {base:40} {count} calls")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a command's answer
