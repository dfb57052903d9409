# SPDX-License-Identifier: Apache-2.0
"""Run the program that a page of the documents is: `python tests/_run_page.py docs/concepts.md [--gpu]`.

The exit status is 1, and the sentences on stderr name lines of the page, where the page shows something that is not so.

With `--many` the pages are lines on stdin. Each is run by a forked process of its own, which finds torch and its
compiler imported, and a line of JSON on stdout has its exit status and what it wrote to stderr.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
import linecache
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import traceback
import types
from pathlib import Path
from unittest import mock

from _pages import Block, Page, PageError, read_page


_OUR_COMMANDS = {"magi-opschema"}
# A page shows what a first compilation says; which graphs another program has left in the cache must not matter.
COMPILES_ANEW = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
# The headers of vector instructions take most of the time of g++ for a small kernel.
COMPILES_QUICKLY = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
_PLACE = re.compile(r"[^\s\"(]+\.py(:\d+|\", line \d+)")


def run_page(page: Page, folder: Path, *, gpu: bool) -> None:
    """Run every block of *page* in order, with its modules and files in *folder*.

    Raises:
        PageError: A block fails, prints something else than the page shows, or is neither run nor explained.
    """
    program = _Program(page, folder)
    printed: str | None = None
    for block in page.blocks:
        if block.word == "not run":
            printed = None
        elif block.included:
            _check_included(program.at(block), block)
        elif block.is_program and block.word == "gpu" and not gpu:
            program.check_syntax(block)
            printed = None
        elif block.is_program:
            printed = program.run(block)
        elif block.word == "output" or (block.language == "text" and printed is not None):
            _check_output(program.at(block), block, printed)
            printed = None
        elif block.language == "console":
            _run_console(program.at(block), block, folder)
        elif block.language == "toml":
            _check_toml(program.at(block), block)
        else:
            msg = (
                f"{program.at(block)}: a {block.language or 'plain'} block that nothing checks. Run it or say why not."
            )
            raise PageError(msg)


class _Program:
    """A module whose file has the code of a page on the lines where the page has it."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page = page
        self.file = folder / "page.py"
        lines = [""] * len(page.path.read_text().splitlines())
        for block in page.blocks:
            if block.is_program:
                code = block.code.splitlines()
                lines[block.line - 1 : block.line - 1 + len(code)] = code
        self.file.write_text("\n".join(lines) + "\n")
        linecache.checkcache(str(self.file))
        self.module = types.ModuleType("page")
        self.module.__file__ = str(self.file)
        sys.modules["page"] = self.module

    def at(self, block: Block) -> str:
        return f"{self.page.path}:{block.line}"

    def check_syntax(self, block: Block) -> ast.Module:
        """The statements of *block*, on the lines where the page has them."""
        try:
            return ast.parse("\n" * (block.line - 1) + block.code, str(self.file))
        except SyntaxError as error:
            msg = f"{self.page.path}:{error.lineno}: {error!r}"
            raise PageError(msg) from error

    def run(self, block: Block) -> str:
        """Run the statements of *block*; what they print."""
        tree = self.check_syntax(block)
        source = self.file.read_text().splitlines()
        everything = io.StringIO()
        for statement in tree.body:
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compile(ast.Module([statement], []), str(self.file), "exec"), self.module.__dict__)
            except Exception as error:
                if block.word == "raises" and statement is tree.body[-1]:
                    return f"{type(error).__name__}: {error}\n"
                msg = f"{self.page.path}:{statement.lineno}: {traceback.format_exc()}"
                raise PageError(msg) from error
            assert statement.end_lineno is not None
            _check_promise(self.page.path, statement, source[statement.end_lineno - 1], printed.getvalue())
            everything.write(printed.getvalue())
        if block.word == "raises":
            msg = f"{self.at(block)}: the block raises nothing"
            raise PageError(msg)
        return everything.getvalue()


def _check_promise(path: Path, statement: ast.stmt, last_line: str, printed: str) -> None:
    """`print(x)  # text` prints exactly that text."""
    is_print = isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("print(")
    promised = last_line.partition("  # ")[2].strip()
    if is_print and promised and promised != printed.strip():
        msg = f"{path}:{statement.lineno}: prints\n{printed}and not\n{promised}"
        raise PageError(msg)


def _check_output(place: str, block: Block, printed: str | None) -> None:
    if printed is None:
        msg = f"{place}: output of nothing"
        raise PageError(msg)
    if block.language == "python":  # code that a program printed, formatted for the page
        same = ast.dump(ast.parse(printed)) == ast.dump(ast.parse(block.code))
    else:
        same = _says(block.code, printed)
    if not same:
        msg = f"{place}: the page shows\n{block.code}and the program says\n{printed}"
        raise PageError(msg)


def _says(shown: str, printed: str) -> bool:
    """Whether the page shows what was printed; `...` stands for anything, and `ops.py:14` for any file and line."""
    shown, printed = (_PLACE.sub("file.py:1", text) for text in (shown, printed))
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


def _check_included(place: str, block: Block) -> None:
    if not block.included.startswith("examples/") or not Path(block.included).is_file():
        msg = f"{place}: {block.included} is not a file of examples/, whose tests would run it"
        raise PageError(msg)


def _check_toml(place: str, block: Block) -> None:
    try:
        tomllib.loads(block.code)
    except tomllib.TOMLDecodeError as error:
        msg = f"{place}: {error!r}"
        raise PageError(msg) from error


def _run_console(place: str, block: Block, folder: Path) -> None:
    """Run each `$ command`, and compare the lines below it, if there are any, with what it prints."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    for entry in ("\n" + block.code).split("\n$ ")[1:]:
        command, _, shown = entry.partition("\n")
        words = shlex.split(command, comments=True)
        if words[0] not in _OUR_COMMANDS:
            msg = f"{place}: {words[0]} is not a command of ours. Say in a comment why the block is not run."
            raise PageError(msg)
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            msg = f"{place}: {command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
            raise PageError(msg)
        if shown.strip() and not _says(shown, done.stdout):
            msg = f"{place}: {command} prints\n{done.stdout}and not\n{shown}"
            raise PageError(msg)


def run_many() -> int:
    """Run each page named on stdin."""
    # What torch reads from the environment when it is imported.
    os.environ.update(COMPILES_ANEW | COMPILES_QUICKLY)
    import torch._inductor.compile_fx  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                return main([line.rstrip("\n")])
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            print(json.dumps({"status": status, "said": said.read()}), flush=True)  # noqa: T201
    return 0


def main(arguments: list[str]) -> int:
    """Run the page named first."""
    if arguments == ["--many"]:
        return run_many()
    try:
        page = read_page(Path(arguments[0]))
        with mock.patch.dict(os.environ, COMPILES_ANEW | page.environment), tempfile.TemporaryDirectory() as folder:
            run_page(page, Path(folder), gpu="--gpu" in arguments)
    except PageError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
