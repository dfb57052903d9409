# SPDX-License-Identifier: Apache-2.0
"""The code on a page of the documents, as a program.

The Python blocks of a page run in order in one namespace. A comment right above a block says what else to do with it:

- `<!-- setup` and code `-->`: code that runs and is not shown
- `<!-- output -->`: what the Python block before prints; a `text` block right after a Python block is that anyway
- `<!-- raises -->`: the block raises; the `text` block after it is the last line of the traceback
- `<!-- gpu -->`: runs where there is a GPU; is only compiled elsewhere
- `<!-- not run: reason -->`: shown, never run
- `<!-- environment: NAME=value -->`, anywhere on the page: for the whole program

A block that includes a program of examples/ is run by the tests of the examples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from markdown_it.token import Token


_COMMENT = re.compile(
    r"\s*<!--\s*(?P<word>setup|output|raises|gpu|not run|environment)\b:?[ \t]*(?P<rest>.*?)-->\s*", re.DOTALL
)
# What pymdownx.snippets replaces by lines of a file.
_INCLUDED = re.compile(r'--8<-- "(?P<path>[^":]+)(:\d*)*"\n')


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
        reason: What the comment says behind the colon.
    """

    line: int
    language: str
    code: str
    word: str = ""
    reason: str = ""

    @property
    def is_program(self) -> bool:
        """Whether this block is Python that runs."""
        return self.language in {"python", "setup"} and self.word not in {"output", "not run"} and not self.included

    @property
    def included(self) -> str:
        """The file that the site shows here, relative to the repository; "" if the block is on the page itself."""
        match = _INCLUDED.fullmatch(self.code)
        return match["path"] if match else ""


@dataclass(frozen=True)
class Page:
    """A document, and the blocks of code in it, in order."""

    path: Path
    blocks: tuple[Block, ...]
    environment: dict[str, str]

    @property
    def not_run(self) -> list[Block]:
        """The blocks that nothing holds to what they say."""
        return [block for block in self.blocks if block.word == "not run"]


def read_page(path: Path) -> Page:
    """Read the blocks of the document at *path*.

    Raises:
        PageError: A comment that belongs to no block or gives no reason, or code that is indented rather than fenced.
    """
    blocks: list[Block] = []
    environment: dict[str, str] = {}
    comment: re.Match[str] | None = None
    for token in _tokens(path):
        assert token.map is not None
        line = token.map[0] + 1
        if token.type == "code_block":
            msg = f"{path}:{line}: indented code; put it between fences, so that it is tested"
            raise PageError(msg)
        if token.type == "fence":
            blocks.append(_fenced(path, token, comment))
            comment = None
            continue
        if comment is not None:
            msg = f"{path}:{line}: the comment <!-- {comment['word']} --> belongs to no block; put it right above one"
            raise PageError(msg)
        comment = _COMMENT.fullmatch(token.content) if token.type == "html_block" else None
        if comment is None:
            continue
        if comment["word"] == "setup":
            blocks.append(Block(line + 1, "setup", comment["rest"].lstrip("\n")))
            comment = None
        elif comment["word"] == "environment":
            name, _, value = comment["rest"].strip().partition("=")
            environment[name] = value
            comment = None
    return Page(path, tuple(blocks), environment)


def _tokens(path: Path) -> Iterator[Token]:
    """The blocks of *path* that have lines, without the tokens that only close one."""
    return (token for token in MarkdownIt().enable("table").parse(path.read_text()) if token.map is not None)


def _fenced(path: Path, token: Token, comment: re.Match[str] | None) -> Block:
    assert token.map is not None
    line, language = token.map[0] + 2, token.info.split(" ")[0]
    word, reason = (comment["word"], comment["rest"].strip()) if comment else ("", "")
    if word == "not run" and not reason:
        msg = f"{path}:{line}: <!-- not run: --> needs a reason"
        raise PageError(msg)
    return Block(line, language, token.content, word, reason)
