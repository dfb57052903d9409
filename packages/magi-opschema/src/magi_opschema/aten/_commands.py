# SPDX-License-Identifier: Apache-2.0
"""The commands `magi-opschema aten ...`: their arguments, and what they print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ._allowlist import SHIPPED


if TYPE_CHECKING:
    import argparse


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command to the parser of the topic `aten`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_gen(commands.add_parser("gen", help="generate the surface for the installed torch"))


def _add_gen(parser: argparse.ArgumentParser) -> None:
    parser.description = "Generate the surface of an allowlist for the installed torch. Imports no torch."
    parser.add_argument("--allowlist", type=Path, default=SHIPPED, metavar="FILE", help="YAML list of base names")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where DIR differs")
    parser.add_argument("--verify", action="store_true", help="compare each schema with torch's dispatcher")
    parser.set_defaults(run=_gen)


def _gen(options: argparse.Namespace) -> int:
    from ._allowlist import read_allowlist, select_bases
    from ._files import drift, write_folder
    from ._generate import surface_files
    from ._torchgen import installed_schemas

    names = read_allowlist(options.allowlist)
    schemas = installed_schemas()
    bases = select_bases(names, schemas, options.allowlist)
    files = surface_files(bases, schemas)
    overloads = sum(len(base.overloads) for base in bases)
    if options.verify:
        from ._verify import verify

        _say(f"{verify(bases)} overloads agree with the dispatcher of torch {schemas.torch_version}")
    if options.check:
        lines = drift(files, options.out)
        for line in lines:
            _say(line)
        return 1 if lines else 0
    write_folder(files, options.out)
    _say(f"{options.out}: {len(bases)} bases, {overloads} overloads of torch {schemas.torch_version}")
    return 0


def _say(line: str) -> None:
    print(line)  # noqa: T201  # a command's answer
