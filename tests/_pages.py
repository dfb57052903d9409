# SPDX-License-Identifier: Apache-2.0
"""A page of the documents as the program that it is: `python tests/_pages.py docs/concepts.md [--gpu]` runs it.

The Python blocks of a page run in order in one namespace. `print(x)  # text` prints that text. A comment right above a
block says what else to do with it:

- `<!-- setup` and code `-->`: code that runs and is not shown. No block that is shown may need it, because a reader
  copies what is shown: it checks what was done, or provides a file that the reader has
- `<!-- output -->`: what the Python block before prints; a `text` block right after a Python block is that anyway
- `<!-- raises -->`: the block raises; the `text` block after it is the last line of the traceback
- `<!-- gpu -->`: runs where there is a GPU; is only compiled elsewhere
- `<!-- not run: reason -->`: shown, never run

A `sh` block has one command a line, with no prompt in front of it. The commands of ours are run, and a `text` block
after them is what the last one prints.

A block that includes a program of examples/ is run by the tests of the examples. The exit status is 1, and a sentence
on stderr names a line of the page, where the page shows something that is not so.

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
import symtable
import sys
import tempfile
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from markdown_it import MarkdownIt


_COMMENT = re.compile(r"\s*<!--\s*(?P<word>setup|output|raises|gpu|not run)\b:?[ \t]*(?P<rest>.*?)-->\s*", re.DOTALL)
# What pymdownx.snippets replaces by lines of a file.
_INCLUDED = re.compile(r'--8<-- "(?P<path>[^":]+)(:\d*)*"\n')
# The modules of our commands, which need not be installed as scripts.
_OUR_COMMANDS = {"magi": "magi_backend", "magi-opschema": "magi_opschema.aten._commands"}
# A page shows what a first compilation says; which graphs another program has left in the cache must not matter.
COMPILES_ANEW = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
# The headers of vector instructions take most of the time of g++ for a small kernel.
COMPILES_QUICKLY = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
_PLACE = re.compile(r"[^\s\"(]+\.py(:\d+|\", line \d+)")


class PageError(Exception):
    """A page is marked up in a way that says nothing, or what it shows is not so."""


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        line: The line of the page on which the code begins, from 1.
        language: What stands behind the fence; `setup` for code that is not shown.
        code: The text between the fences.
        word: The comment above it, "" without one.
    """

    line: int
    language: str
    code: str
    word: str = ""

    @property
    def is_program(self) -> bool:
        """Whether this block is Python that runs."""
        is_python = self.language in {"python", "setup"} and self.word not in {"output", "not run"}
        return is_python and not _INCLUDED.fullmatch(self.code)


def read_page(path: Path) -> list[Block]:
    """The blocks of code of the document at *path*, in order.

    Raises:
        PageError: A comment that belongs to no block or gives no reason, or code that is indented rather than fenced.
    """
    blocks: list[Block] = []
    comment: re.Match[str] | None = None
    for token in MarkdownIt().enable("table").parse(path.read_text()):
        if token.map is None:  # it only closes a block
            continue
        line = token.map[0] + 1
        if token.type == "code_block":
            raise PageError(f"{path}:{line}: indented code; put it between fences, so that it is tested")
        if token.type == "fence":
            word = comment["word"] if comment else ""
            if comment and word == "not run" and not comment["rest"].strip():
                raise PageError(f"{path}:{line}: <!-- not run: --> needs a reason")
            blocks.append(Block(line + 1, token.info.split(" ")[0], token.content, word))
            comment = None
        elif comment is not None:
            word = comment["word"]
            raise PageError(f"{path}:{line}: the comment <!-- {word} --> belongs to no block; put it right above one")
        else:
            comment = _COMMENT.fullmatch(token.content) if token.type == "html_block" else None
            if comment and comment["word"] == "setup":
                blocks.append(Block(line + 1, "setup", comment["rest"].lstrip("\n")))
                comment = None
    return blocks


def run_page(path: Path, folder: Path, *, gpu: bool) -> None:
    """Run every block of the page at *path* in order, with its modules and files in *folder*.

    Raises:
        PageError: A block fails, prints something else than the page shows, or is neither run nor explained.
    """
    blocks = read_page(path)
    program = _Program(path, blocks, folder)
    printed: str | None = None
    for block in blocks:
        place = f"{path}:{block.line}"
        included = _INCLUDED.fullmatch(block.code)
        if block.word == "not run":
            printed = None
        elif included:
            if not included["path"].startswith("examples/") or not Path(included["path"]).is_file():
                raise PageError(f"{place}: {included['path']} is not a file of examples/, whose tests would run it")
        elif block.is_program:
            statements = program.statements(block)
            printed = program.run(block, statements) if gpu or block.word != "gpu" else None
        elif block.word == "output" or (block.language == "text" and printed is not None):
            if printed is None:
                raise PageError(f"{place}: output of nothing")
            if block.language == "python":  # code that a program printed, formatted for the page
                is_so = ast.dump(ast.parse(printed)) == ast.dump(ast.parse(block.code))
            else:
                is_so = _says(block.code, printed)
            if not is_so:
                raise PageError(f"{place}: the page shows\n{block.code}and the program says\n{printed}")
            printed = None
        elif block.language == "sh":
            printed = _run_commands(place, block, folder)
        else:
            raise PageError(f"{place}: a {block.language or 'plain'} block that nothing checks. Run it or say why not.")


def _globals(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """The names that code gives a value at module level, and the names of the module that it reads."""
    is_module = table.get_type() == "module"
    defines = {s.get_name() for s in table.get_symbols() if is_module and (s.is_assigned() or s.is_imported())}
    needs = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (is_module or s.is_global())}
    return defines, needs.union(*(_globals(child)[1] for child in table.get_children()))


class _Program:
    """A module whose file has the code of a page on the lines where the page has it."""

    def __init__(self, path: Path, blocks: list[Block], folder: Path) -> None:
        self.path = path
        self.hidden, self.shown = set[str](), set[str]()
        self.file = folder / "page.py"
        self.lines = [""] * len(path.read_text().splitlines())
        for block in blocks:
            if block.is_program:
                code = block.code.splitlines()
                self.lines[block.line - 1 : block.line - 1 + len(code)] = code
        self.file.write_text("\n".join(self.lines) + "\n")
        linecache.checkcache(str(self.file))
        self.module = types.ModuleType("page")
        self.module.__file__ = str(self.file)
        sys.modules["page"] = self.module

    def statements(self, block: Block) -> list[ast.stmt]:
        """The statements of *block*, on the lines where the page has them; what is hidden defines no name for them."""
        try:
            tree = ast.parse("\n" * (block.line - 1) + block.code, str(self.file))
        except SyntaxError as error:
            raise PageError(f"{self.path}:{error.lineno}: {error!r}") from error
        defines, needs = _globals(symtable.symtable(block.code, str(self.file), "exec"))
        if block.language == "setup":
            self.hidden |= defines
        else:
            self.shown |= defines
            if missing := sorted(needs & self.hidden - self.shown):
                raise PageError(f"{self.path}:{block.line}: only code that is not shown defines {missing[0]}")
        return tree.body

    def run(self, block: Block, statements: list[ast.stmt]) -> str:
        """Run the *statements* of *block*; what they print."""
        everything = ""
        for statement in statements:
            place, printed = f"{self.path}:{statement.lineno}", io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compile(ast.Module([statement], []), str(self.file), "exec"), self.module.__dict__)
            except Exception as error:
                if block.word == "raises" and statement is statements[-1]:
                    return f"{type(error).__name__}: {error}\n"
                raise PageError(f"{place}: {traceback.format_exc()}") from error
            everything += printed.getvalue()
            promised = self.lines[(statement.end_lineno or 0) - 1].partition("  # ")[2].strip()
            if ast.unparse(statement).startswith("print(") and promised and promised != printed.getvalue().strip():
                raise PageError(f"{place}: prints\n{printed.getvalue()}and not\n{promised}")
        if block.word == "raises":
            raise PageError(f"{self.path}:{block.line}: the block raises nothing")
        return everything


def _says(shown: str, printed: str) -> bool:
    """Whether the page shows what was printed; `...` stands for anything, and `ops.py:14` for any file and line."""
    shown, printed = (_PLACE.sub("file.py:1", text) for text in (shown, printed))
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


def _run_commands(place: str, block: Block, folder: Path) -> str:
    """Run each line of *block*; what the last one prints."""
    printed = ""
    for command in block.code.splitlines():
        words = shlex.split(command, comments=True)
        if words[0] not in _OUR_COMMANDS:
            raise PageError(f"{place}: {words[0]} is not a command of ours. Say in a comment why the block is not run.")
        words[:1] = [sys.executable, "-m", _OUR_COMMANDS[words[0]]]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PageError(f"{place}: {command} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        printed = done.stdout
    return printed


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
        with mock.patch.dict(os.environ, COMPILES_ANEW), tempfile.TemporaryDirectory() as folder:
            run_page(Path(arguments[0]), Path(folder), gpu="--gpu" in arguments)
    except PageError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
