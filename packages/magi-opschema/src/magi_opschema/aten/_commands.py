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
    _add_coverage(commands.add_parser("coverage", help="what of ATen the surface has, and what of it passes"))
    _add_test(commands.add_parser("test", help="test one operator in one slot against ATen"))
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
    parser.description = "Print the coverage page. With --run, test every operator and print what passes, by slot."
    _add_allowlist(parser)
    _add_kernels(parser)
    parser.add_argument("--run", dest="run_all", action="store_true", help="run every active slot of every operator")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="processes at a time")
    parser.set_defaults(run=_coverage)


def _add_test(parser: argparse.ArgumentParser) -> None:
    parser.description = "Test one operator in one slot. Exits 1 where a check fails."
    parser.add_argument("op", metavar="OP", help="softmax, linalg.norm")
    parser.add_argument("--slot", type=int, default=8, metavar="N", help="0 to 7 for a kernel, 8 for ATen (default)")
    _add_kernels(parser)
    parser.add_argument("--device", metavar="DEVICE", help="where the inputs are (default: where the kernel serves)")
    parser.add_argument("--verbose", action="store_true", help="print every row")
    parser.set_defaults(run=_test)


def _add_new(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write OP_slotN.py, a kernel per overload to fill in, and test_OP_slotN.py. Imports no torch."
    parser.add_argument("op", metavar="OP", help="softmax, linalg.norm, or one overload: add.Tensor")
    parser.add_argument("--slot", type=int, required=True, metavar="N", help="0 to 7")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where (default: here)")
    parser.set_defaults(run=_new)


def _add_gap(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run SCRIPT and list the operators that it dispatched and that have no kernel below slot 8."
    _add_kernels(parser)
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument("arguments", nargs="*", metavar="ARG", help="arguments of SCRIPT, behind --")
    parser.set_defaults(run=_gap)


def _add_allowlist(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allowlist", type=Path, default=SHIPPED, metavar="FILE", help="YAML list of base names")


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="a Python file that registers kernels; run first")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


_positive.__name__ = "positive number"  # the name that argparse uses


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
    if not options.run_all:
        from ._generate.coverage_page import FILE_NAME
        from ._generate.surface import generate

        _say(generate(options.allowlist)[FILE_NAME])
        return 0
    from ._dispatch.load import default_surface
    from ._generate.allowlist import read_allowlist
    from ._harness.run import active_tasks, run

    default_surface()
    _run_kernels(options.kernels)
    failed = 0
    for (base, slot), report in sorted(run(active_tasks(read_allowlist(options.allowlist)), jobs=options.jobs)):
        failed += len(report.failures)
        _say(f"{base:45} slot {slot}  {report.summary()}")
    return 1 if failed else 0


def _test(options: argparse.Namespace) -> int:
    _run_kernels(options.kernels)
    from .testing import check

    report = check([(options.op, options.slot)], device=options.device)[options.op, options.slot]
    for row in report.rows if options.verbose else report.failures:
        _say(str(row))
    _say(f"{options.op} slot {options.slot}: {report.summary()}")
    for reason, count in report.skips.items():
        _say(f"  skipped {count}: {reason}")
    return 1 if report.failures else 0


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
    _run_kernels(options.kernels)
    from ._dispatch.gap import find_gap

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


def _run_kernels(path: Path | None) -> None:
    """Run the file that registers the user's kernels, with its own name and not as `__main__`."""
    if path is None:
        return
    from .errors import SurfaceError

    if not path.is_file():
        msg = f"--kernels {path}: no such file"
        raise SurfaceError(msg)
    from ._dispatch.script import run_script

    run_script(path)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a command's answer
