# SPDX-License-Identifier: Apache-2.0
"""What holds between the packages: their version, what they import of each other and of torch, and what pages name."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest
import torch
from _layers import LAYERS, PAGE, drawn, folder_of
from _public_surface import FILE, public_surface
from packaging.requirements import Requirement
from packaging.version import Version
from typing_extensions import deprecated


ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
IMPORT_NAMES = {package: package.replace("-", "_") for package in PACKAGES}
VERSION = (ROOT / "VERSION").read_text().strip()
# The three leaves never import each other; the backend may import all of them.
ALLOWED = {"magi-backend": {"magi_opschema", "magi_passes", "magi_tritonwrap"}}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_declares_and_holds(package: str) -> None:
    folder = ROOT / "packages" / package
    described = tomllib.loads((folder / "pyproject.toml").read_text())
    project = described["project"]
    siblings = [each for text in project["dependencies"] if (each := Requirement(text)).name in PACKAGES]

    assert project["dynamic"] == ["version"]
    assert (folder / described["tool"]["hatch"]["version"]["path"]).resolve() == ROOT / "VERSION"
    assert {IMPORT_NAMES[sibling.name] for sibling in siblings} == ALLOWED.get(package, set())
    for sibling in siblings:
        assert sibling.url is None
        assert sibling.specifier.contains(VERSION), f"{package} refuses {sibling.name} {VERSION}"
        assert not sibling.specifier.contains("99.0")
    assert (project["license"], project["requires-python"]) == ("Apache-2.0", ">=3.11")
    assert {text.split(" :: ")[-1] for text in project["classifiers"] if " :: 3." in text} == {"3.11", "3.12", "3.13"}
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


GRAPH = grimp.build_graph(*IMPORT_NAMES.values(), cache_dir=None)


@pytest.mark.parametrize("name", LAYERS)
def test_no_module_imports_from_a_layer_above_its_own(name: str) -> None:
    highest_first = LAYERS[name][::-1]

    assert {child.rpartition(".")[2] for child in GRAPH.find_children(name)} <= set(highest_first)
    assert GRAPH.find_illegal_dependencies_for_layers(layers=highest_first, containers={name}) == set()
    assert GRAPH.find_illegal_dependencies_for_layers(layers=LAYERS[name], containers={name}), "the other way round"
    # The package's own __init__ is above all layers.
    assert [each for each in GRAPH.find_modules_that_directly_import(name) if each.startswith(f"{name}.")] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_is_declared(package: str) -> None:
    """Also inside a function: the suites run where everything is installed."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    declared = {
        Requirement(text).name for text in (*project["dependencies"], *(each for extra in extras for each in extra))
    }
    # What comes with torch and pydantic-settings, and a distribution with another name than its module.
    allowed = {"torchgen", "sympy", "filelock", "typing_extensions", "pydantic"}
    allowed |= {name.replace("-", "_") for name in declared}
    allowed |= {"yaml"} if "pyyaml" in declared else set()
    graph = grimp.build_graph(IMPORT_NAMES[package], include_external_packages=True, cache_dir=None)
    imported = {name for name in graph.modules if "." not in name} - {IMPORT_NAMES[package]}

    assert "torch" in imported
    assert imported <= allowed | sys.stdlib_module_names


def names(source: str, libraries: Collection[str]) -> Iterator[tuple[str, int]]:
    """The full names of *libraries* that *source* imports or reads, such as ``torch._C._increment_version``, and lines.

    Names that are bound inside functions count for the whole file: none is bound twice to different things.
    """
    tree = ast.parse(source)
    known: dict[str, str] = {}
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for each in aliases:
                    top = each.name.partition(".")[0]
                    known[each.asname or top] = each.name if each.asname else top
                    found.append((each.name, node.lineno))
            case ast.ImportFrom(module=str(module), level=0, names=aliases):
                for each in aliases:
                    known[each.asname or each.name] = f"{module}.{each.name}"
                    found.append((f"{module}.{each.name}", node.lineno))
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]),
            ):
                known[name] = module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in known and rest.replace(".", "").isidentifier():
                found.append((f"{known[root]}.{rest}", node.lineno))
    return (each for each in found if each[0].partition(".")[0] in libraries)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize(
    "place", [*(f"packages/{package}/src" for package in PACKAGES), "tests", "examples", "benchmarks"]
)
def test_our_packages_are_used_through_public_names_only(place: str) -> None:
    """By each other, and by whatever is outside of them."""
    package = place.split("/")[1] if "/" in place else ""
    allowed = ALLOWED.get(package, set()) if package else set(IMPORT_NAMES.values())
    others = set(IMPORT_NAMES.values()) - {IMPORT_NAMES.get(package)}
    files = sorted((ROOT / place).rglob("*.py"))
    trespasses = [
        f"{file.relative_to(ROOT)}:{line} uses {name}"
        for file in files
        for name, line in names(file.read_text(), others)
        if name.partition(".")[0] not in allowed or is_private(name)
    ]

    assert files
    assert trespasses == []


# Spelt with an underscore, and documented all the same as what users write against.
DOCUMENTED = (
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "torch._library.custom_ops.CustomOpDef",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree",
)


def exists(name: str) -> bool:
    """Whether the running release has *name*. Attributes of instances are tested where they are used."""
    found: Any = None
    parts = name.split(".")
    for depth, part in enumerate(parts, start=1):
        if depth > 1 and (not isinstance(found, types.ModuleType | type) or isinstance(found, type(torch.ops))):
            return True
        if depth > 1 and hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(".".join(parts[:depth]))
        except ImportError:
            return False
    return True


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_torch_exist_and_the_private_ones_are_used_in_one_place(package: str) -> None:
    """A name that torch drops or moves is found with its file and line, whatever the other tests execute."""
    wrong, private = [], 0
    for file in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
        may_be_private = file.name == "_torch_compat.py" or file.parent.name in {"_torch_compat", "_repairs"}
        for name, line in names(file.read_text(), {"torch", "triton"}):
            if not exists(name):
                wrong.append(f"{file.relative_to(ROOT)}:{line} uses {name}, which torch {torch.__version__} has not")
            # Of a documented name, its modules are read on the way.
            if is_private(name) and not any(
                f"{known}.".startswith(f"{name}.") or f"{name}.".startswith(f"{known}.") for known in DOCUMENTED
            ):
                private += 1
                if not may_be_private:
                    wrong.append(f"{file.relative_to(ROOT)}:{line} uses {name}")

    assert wrong == []
    assert private > 10, "the private names of this package were not found"


def test_the_page_on_architecture_draws_these_layers_and_names_modules_that_exist() -> None:
    page = PAGE.read_text()
    chapters = re.sub(r"<!--.*?-->", "", page).split("\n## ")[1:]
    named = {
        folder_of(chapter.partition(":")[0].replace("-", "_")) / path
        for chapter in chapters
        for path in re.findall(r"\b[\w/]*\w\.py\b", chapter)
    }

    assert page == drawn(page), "run python tests/_layers.py"
    assert len(named) > 40
    assert [str(path.relative_to(ROOT)) for path in sorted(named) if not path.is_file()] == []


def is_in_the_code(name: str) -> bool:
    """Whether *name* is a module, or what a module or a class in it has; a field of a class need not have a value."""
    try:
        pkgutil.resolve_name(name)
    except AttributeError:
        owner, _, field = name.rpartition(".")
        return any(field in inspect.get_annotations(base) for base in pkgutil.resolve_name(owner).__mro__)
    return True


def test_the_glossary_names_what_is_in_the_code() -> None:
    chapter = (ROOT / "docs" / "concepts.md").read_text().partition("\n## Glossary\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in chapter.splitlines() if line[:1] == "|"]
    words = {word: re.findall(r"`([^`]+)`", code) for word, _, code in rows if word != "word" and "---" not in word}

    assert len(words) > 40
    assert {word: named for word, named in words.items() if not named or not all(map(is_in_the_code, named))} == {}


def test_the_citation_names_this_version() -> None:
    assert f"version: {VERSION}" in (ROOT / "CITATION.cff").read_text().splitlines()


def test_the_public_surface_is_the_one_on_file() -> None:
    on_file, now = FILE.read_text().splitlines(), public_surface().splitlines()
    changes = "\n".join(difflib.unified_diff(on_file, now, "on file", "now", n=0, lineterm=""))

    assert not changes, (
        f"{changes}\n`python tests/_public_surface.py` writes the file again; a line that is removed or changed breaks "
        "users, so it needs a fragment for CHANGELOG.md and a new major version, before 1.0 a minor one."
    )


def test_every_error_is_of_its_package_and_a_builtin_one_too() -> None:
    names = re.findall(r"^([\w.]+\.errors\.\w+Error)\(", FILE.read_text(), re.MULTILINE)
    classes = [pkgutil.resolve_name(name) for name in names]
    builtin = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
    roots = {cls.__name__: cls for cls in classes if not issubclass(cls, builtin)}

    assert list(roots) == ["BackendError", "AtenError", "OpSchemaError", "MagiPassesError", "TritonWrapError"]
    assert all(issubclass(cls, tuple(roots.values())) for cls in classes)


def deprecation_flaw(found: object, version: Version) -> str | None:
    """What is wrong with the deprecation of *found* in a release of *version*; None if nothing is, or there is none."""
    function = getattr(found, "fget", getattr(found, "func", found))  # of a property, or of a cached one
    message = getattr(function, "__deprecated__", None)
    if message is None:
        return None
    form = re.fullmatch(r"deprecated since \d+\.\d+, gone in (\d+\.\d+): use \S.* instead", message)
    if form is None:
        return f"not in the form of CONTRIBUTING.md: {message}"
    return f"overdue in {version}: {message}" if version >= Version(form[1]) else None


def test_a_deprecated_name_says_what_to_use_and_is_gone_when_it_says() -> None:
    # A line with a bracket is of a function or a class, which exist at run time; a field may be one of instances only.
    callables = [line.partition("(")[0] for line in FILE.read_text().splitlines() if re.match(r"[\w.]+\(", line)]
    flaws = {name: deprecation_flaw(pkgutil.resolve_name(name), Version(VERSION)) for name in callables}

    assert len(flaws) > 200
    assert {name: flaw for name, flaw in flaws.items() if flaw} == {}


@pytest.mark.parametrize(
    ("message", "version", "flaw"),
    [
        ("deprecated since 0.2, gone in 0.4: use new instead", "0.3.9", None),
        ("deprecated since 0.2, gone in 0.4: use new instead", "0.4.0", "overdue in 0.4.0"),
        ("deprecated since 0.2, gone in 0.10: use new instead", "0.9.0", None),
        ("deprecated since 0.2: use new instead", "0.3.0", "not in the form"),
        ("use new", "0.3.0", "not in the form"),
    ],
)
def test_an_overdue_or_unclear_deprecation_is_found(message: str, version: str, flaw: str | None) -> None:
    @deprecated(message)
    def planted(_: object) -> None: ...

    for found in (planted, property(planted), functools.cached_property(planted)):
        said = deprecation_flaw(found, Version(version))
        assert said is None if flaw is None else str(said).startswith(flaw)
