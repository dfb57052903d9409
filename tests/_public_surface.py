# SPDX-License-Identifier: Apache-2.0
"""Every public name with its signature. `python tests/_public_surface.py` writes them into public_surface.txt.

They are read from the source and nothing is imported, so neither Python, torch nor what is installed changes them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).parent.parent
FILE = Path(__file__).parent / "public_surface.txt"
FILES = {
    ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
    for source in sorted(ROOT.glob("packages/*/src"))
    for path in sorted(source.rglob("*.py"))
}
PUBLIC_MODULES = sorted(module for module in FILES if "._" not in module)
# A deprecation breaks nobody, so it must not change a line; nobody calls the other.
NOT_SHOWN = {"deprecated", "__post_init__"}


def public_surface() -> str:
    """One line for each public name, then the lines of its members; every line begins with the dotted name."""
    exports = [(module, name) for module in PUBLIC_MODULES for name in _exports(module)]
    return "".join(f"{line}\n" for module, name in exports for line in _lines(module, name))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        # `if TYPE_CHECKING` has the names that a package loads when they are used.
        yield from _statements([*node.body, *node.orelse]) if isinstance(node, ast.If) else [node]


@functools.cache
def _module(name: str) -> tuple[dict[str, list[ast.stmt]], dict[str, tuple[str, str]], set[str]]:
    """What the module defines, what it imports as (module, name), and which of the imports it exports."""
    defined: dict[str, list[ast.stmt]] = {}
    imported: dict[str, tuple[str, str]] = {}
    exported: set[str] = set()
    file = FILES[name]
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in _statements(ast.parse(file.read_text()).body):
        match node:
            case ast.ImportFrom(module=source, names=aliases, level=level):
                above = package[: len(package) - level + 1] if level else []
                home = ".".join([*above, *([source] if source else [])])
                imported |= {each.asname or each.name: (home, each.name) for each in aliases}
                exported |= {each.name for each in aliases if each.asname == each.name}
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names)):
                exported |= {ast.literal_eval(each) for each in names}
            case _:
                for each in _names(node):
                    defined.setdefault(each, []).append(node)
    return defined, imported, exported


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return []


def _exports(module: str) -> list[str]:
    defined, _, exported = _module(module)
    return sorted(exported | {name for name in defined if not name.startswith("_")})


def _home(module: str, name: str) -> tuple[str, str]:
    """Where *name* is defined, which other modules import it from."""
    while module in FILES and name in _module(module)[1] and f"{module}.{name}" not in FILES:
        module, name = _module(module)[1][name]
    return module, name


def _lines(module: str, name: str) -> Iterator[str]:
    home, there = _home(module, name)
    shown = f"{module}.{name}"
    if f"{home}.{there}" in FILES:
        return  # a public module has lines of its own
    if home != module and (home in PUBLIC_MODULES or home not in FILES):
        yield f"{shown} = {home}.{there}"
        return
    for node in _module(home)[0][there]:
        yield _line(shown, node)
        if isinstance(node, ast.ClassDef):
            # The order of fields is that of the constructor's arguments; the order of methods means nothing.
            for each, one in sorted(_members(node), key=lambda it: it[0] * isinstance(it[1], ast.FunctionDef)):
                yield _line(f"{shown}.{each}", one)


def _members(cls: ast.ClassDef) -> list[tuple[str, ast.stmt]]:
    members = [(name, node) for node in _statements(cls.body) for name in _names(node)]
    return [each for each in members if (each[0][:2] == "__" or each[0][0] != "_") and each[0] not in NOT_SHOWN]


def _line(shown: str, node: ast.stmt) -> str:
    match node:
        case ast.FunctionDef(args=arguments, returns=returns, decorator_list=decorators):
            text = f"{shown}({ast.unparse(arguments)})" + (f" -> {ast.unparse(returns)}" if returns else "")
        case ast.ClassDef(bases=bases, decorator_list=decorators):
            text = f"{shown}({', '.join(map(ast.unparse, bases))})"
        case ast.AnnAssign(annotation=annotation, value=value):
            return f"{shown}: {ast.unparse(annotation)}" + (" = ..." if value else "")
        case ast.Assign(value=value):
            return f"{shown} = {ast.unparse(value)}"
    # `functools.cached_property` is `cached_property`, however it is imported.
    said = [re.sub(r"^\w+\.", "", ast.unparse(each)) for each in decorators]
    return " ".join([text, *(f"@{each}" for each in said if each.partition("(")[0] not in NOT_SHOWN)])


if __name__ == "__main__":
    FILE.write_text(public_surface())
