# SPDX-License-Identifier: Apache-2.0
"""From a code object to the syntax tree of its function, without importing or running anything."""

from __future__ import annotations

import ast
import functools
import linecache
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
    tree = _parse("".join(lines))
    if tree is None:
        return None
    candidates = [node for node in _functions(tree) if _starts_at(node) == code.co_firstlineno]
    named = [node for node in candidates if getattr(node, "name", "<lambda>") == code.co_name]
    return named[0] if len(named) == 1 else _by_column(named, code)


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
    """Tell two lambdas of one line apart by the columns of their instructions."""
    spans = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
    for node in nodes:
        body = node.body if isinstance(node, ast.Lambda) else node.body[0]
        if (body.lineno, body.col_offset) in spans:
            return node
    return None
