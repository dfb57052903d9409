# SPDX-License-Identifier: Apache-2.0
"""Every name of torch and Triton that the packages use exists in the release that runs, the private ones in one place.

A name that torch drops or moves fails here by itself, with the file and line that use it, whatever the other tests
happen to execute. Names behind `hasattr` and `getattr` are asked for at run time and are not looked at; neither are
attributes of values, which the tests of each package read.
"""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
LIBRARIES = ("torch", "triton")


@dataclass(frozen=True)
class Use:
    """One dotted name in one place, such as ``torch._C._increment_version``."""

    name: str
    line: int


def uses(source: str) -> list[Use]:
    """The names of torch and Triton that *source* imports or reads, each in full."""
    tree = ast.parse(source)
    aliases = dict(_aliases(tree))
    found = [Use(target, node.lineno) for node, target in _imported(tree)]
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, *rest = _dotted(node)
            if root in aliases:
                found.append(Use(".".join([aliases[root], *rest]), node.lineno))
    return sorted(set(found), key=lambda use: (use.line, use.name))


def _imported(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node, name) for name in names if name.partition(".")[0] in LIBRARIES)


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each name that refers to a name of torch or Triton, and the full name.

    Names bound inside functions count for the whole file: none is bound twice to different things.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in LIBRARIES:
                    yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in LIBRARIES:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and (module := _named_module(node.value)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                yield target.id, module


def _named_module(value: ast.expr | None) -> str | None:
    """What ``importlib.import_module("torch.x")`` names."""
    match value:
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]):
            return name if name.partition(".")[0] in LIBRARIES else None
    return None


def _dotted(node: ast.Attribute) -> list[str]:
    parts = [node.attr]
    value = node.value
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    parts.append(value.id if isinstance(value, ast.Name) else "")
    return parts[::-1]


def missing(name: str) -> str | None:
    """The part of *name* that the running release does not have; None where it has all of it."""
    found: object = None
    parts = name.split(".")
    for depth, part in enumerate(parts, start=1):
        path = ".".join(parts[:depth])
        # Attributes of instances are tested where they are used; operators exist only once they are looked up.
        if found is not None and not isinstance(found, types.ModuleType | type):
            return None
        if isinstance(found, type(torch.ops)):
            return None
        try:
            found = importlib.import_module(path) if depth == 1 else getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return path
    return None


# Spelt with an underscore, and documented all the same as what users write against.
DOCUMENTED = (
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "torch._library.custom_ops.CustomOpDef",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree",
)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


def is_private(name: str) -> bool:
    if any(name == known or name.startswith(f"{known}.") for known in DOCUMENTED):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def may_be_private(file: Path) -> bool:
    """Whether *file* may use private names: the one module or folder for them, or the repair of a defect of torch."""
    return file.name == "_torch_compat.py" or file.parent.name in {"_torch_compat", "_repairs"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_torch_that_a_package_uses_exists(package: str) -> None:
    looked_at = [(file, use) for file in sources(package) for use in uses(file.read_text())]
    gone = [
        f"{file.relative_to(ROOT)}:{use.line} uses {use.name}, and torch {torch.__version__} has no {part}"
        for file, use in looked_at
        if (part := missing(use.name))
    ]

    assert gone == []
    private = [use.name for file, use in looked_at if may_be_private(file) and is_private(use.name)]
    assert len(private) > 10, "the private names of this package were not found"


@pytest.mark.parametrize("package", PACKAGES)
def test_private_names_are_used_in_one_place(package: str) -> None:
    elsewhere = [
        f"{file.relative_to(ROOT)}:{use.line} uses {use.name}"
        for file in sources(package)
        if not may_be_private(file)
        for use in uses(file.read_text())
        if is_private(use.name)
    ]

    assert elsewhere == []


@pytest.mark.parametrize(
    ("source", "gone"),
    [
        ("import torch\ntorch._C._no_such_name()", "torch._C._no_such_name"),
        ("from torch._inductor import ir\nir.no_such_name", "torch._inductor.ir.no_such_name"),
        ("def f():\n    from torch._inductor.no_such_module import x", "torch._inductor.no_such_module"),
        ("from torch._inductor.ir import NoSuchClass", "torch._inductor.ir.NoSuchClass"),
        (
            "import importlib\nm = importlib.import_module('torch._inductor.compile_fx')\nm._gone = 1",
            "torch._inductor.compile_fx._gone",
        ),
        ("from triton.runtime import jit\njit.NoSuchClass", "triton.runtime.jit.NoSuchClass"),
        ("from torch._library.custom_ops import CustomOpDef as C\nC.no_such", "torch._library.custom_ops.CustomOpDef"),
    ],
)
def test_a_name_that_disappeared_is_found(source: str, gone: str) -> None:
    found = [part for use in uses(source) if (part := missing(use.name))]

    assert found
    assert all(part.startswith(gone) for part in found)


def test_a_name_that_exists_is_not_reported() -> None:
    source = (
        "import torch\nfrom torch._inductor import ir as inductor\ntorch._C._increment_version\ninductor.IRNode.realize"
    )

    assert [missing(use.name) for use in uses(source)] == [None] * 4
