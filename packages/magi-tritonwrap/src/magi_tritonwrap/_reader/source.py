# SPDX-License-Identifier: Apache-2.0
"""From a code object to the syntax tree of its function, without importing or running anything."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import tokenize
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from types import CodeType, FunctionType


FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def function_node(function: FunctionType) -> FunctionNode | None:
    """The syntax tree of *function*, with the line numbers of its file; None where there is no source.

    Generated functions count as long as their text is in `linecache`.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if code.co_name != "<lambda>":
        alone = _definition("".join(_block(lines, code.co_firstlineno)), code.co_firstlineno)
        if alone is not None and alone.name == code.co_name:
            return alone
    tree = _parse("".join(lines))
    if tree is None:
        return None
    candidates = [node for node in _functions(tree) if _starts_at(node) == code.co_firstlineno]
    named = [node for node in candidates if getattr(node, "name", "<lambda>") == code.co_name]
    return named[0] if len(named) == 1 else _by_column(named, code)


def _block(lines: list[str], first: int) -> list[str]:
    """The lines of the definition that starts at line *first*; the rest of the file is not read."""
    try:
        return inspect.getblock(lines[first - 1 :])
    except (SyntaxError, tokenize.TokenError):
        return []


@functools.lru_cache(maxsize=4096)
def _definition(text: str, first: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The syntax tree of the function that *text* defines, with the lines and columns of its file."""
    tree = _parse("if True:\n" + text) if text[:1].isspace() else _parse("\n" + text)
    if tree is None or not tree.body:
        return None
    statement = tree.body[0].body[0] if isinstance(tree.body[0], ast.If) else tree.body[0]
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    ast.increment_lineno(statement, first - 2)
    return statement


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=256)
def _functions(tree: ast.Module) -> tuple[FunctionNode, ...]:
    return tuple(node for node in ast.walk(tree) if isinstance(node, FunctionNode))


def _starts_at(node: FunctionNode) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min((decorator.lineno for decorator in decorators), default=node.lineno)


def _by_column(nodes: list[FunctionNode], code: CodeType) -> FunctionNode | None:
    """The one of *nodes* that *code* belongs to; lambdas on one line differ in the columns of instructions."""
    spans = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
    for node in nodes:
        body = node.body if isinstance(node, ast.Lambda) else node.body[0]
        if (body.lineno, body.col_offset) in spans:
            return node
    return None
