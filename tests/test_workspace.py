# SPDX-License-Identifier: Apache-2.0
"""What holds between the packages: one version, ranges that admit it, and who may import whom."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from _layers import LAYERS, PAGE, drawn, folder_of, imported, layers_on_disk, upward_imports
from packaging.requirements import Requirement


ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
IMPORT_NAMES = {package: package.replace("-", "_") for package in PACKAGES}
CONCEPTS = ROOT / "docs" / "concepts.md"
VERSION = (ROOT / "VERSION").read_text().strip()
# The three leaves never import each other; the backend may import all of them.
ALLOWED = {"magi-backend": {"magi_opschema", "magi_passes", "magi_tritonwrap"}}


def project(package: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def dotted(file: Path) -> str:
    """The module that *file* is, from the folder that holds its package."""
    top = next(folder for folder in file.parents if not (folder / "__init__.py").is_file())
    parts = file.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


def test_there_are_four_packages() -> None:
    assert PACKAGES == ["magi-backend", "magi-opschema", "magi-passes", "magi-tritonwrap"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_version_comes_from_the_root(package: str) -> None:
    described = project(package)

    assert described["project"]["dynamic"] == ["version"]
    assert (ROOT / "packages" / package / described["tool"]["hatch"]["version"]["path"]).resolve() == ROOT / "VERSION"


@pytest.mark.parametrize("package", PACKAGES)
def test_ranges_of_siblings_admit_the_version(package: str) -> None:
    requirements = [Requirement(text) for text in project(package)["project"]["dependencies"]]
    siblings = [requirement for requirement in requirements if requirement.name in PACKAGES]

    assert {IMPORT_NAMES[sibling.name] for sibling in siblings} == ALLOWED.get(package, set())
    for sibling in siblings:
        assert sibling.url is None
        assert sibling.specifier.contains(VERSION), f"{package} refuses {sibling.name} {VERSION}"
        assert not sibling.specifier.contains("99.0")


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata_is_complete(package: str) -> None:
    described = project(package)["project"]
    pythons = {text.split(" :: ")[-1] for text in described["classifiers"] if " :: 3." in text}

    assert described["license"] == "Apache-2.0"
    assert described["license-files"] == ["LICENSE"]
    assert described["readme"] == "README.md"
    assert described["requires-python"] == ">=3.11"
    assert {"description", "authors", "keywords"} <= described.keys()
    assert "Typing :: Typed" in described["classifiers"]
    assert pythons == {"3.11", "3.12", "3.13"}
    assert described.get("urls") == project(PACKAGES[0])["project"].get("urls"), "the packages share one repository"


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_imported_through_public_names_only(package: str) -> None:
    own, others = IMPORT_NAMES[package], set(IMPORT_NAMES.values()) - {IMPORT_NAMES[package]}
    trespasses = []
    for file in sources(package):
        for module, line in imported(file, dotted(file)):
            top, *rest = module.split(".")
            if top in others and (top not in ALLOWED.get(package, set()) or any(part.startswith("_") for part in rest)):
                trespasses.append(f"{file.relative_to(ROOT)}:{line} imports {module}")

    assert sources(package), f"{own} has no sources"
    assert trespasses == []


@pytest.mark.parametrize("name", LAYERS)
def test_every_module_and_folder_is_in_a_layer(name: str) -> None:
    assert sorted(LAYERS[name]) == sorted(layers_on_disk(folder_of(name)))


@pytest.mark.parametrize("name", LAYERS)
def test_no_module_imports_from_a_layer_above_its_own(name: str) -> None:
    assert upward_imports(name, folder_of(name)) == []


@pytest.mark.parametrize(
    "line",
    [
        "from magi_opschema._ops.decorator import magi_register_custom_op",
        "import magi_opschema._ops.decorator",
        "from .._ops import decorator",
        "def late() -> None:\n    from magi_opschema._autograd.functions import anything",
        "if TYPE_CHECKING:\n    from magi_opschema._ops import decorator",
        "from magi_opschema import magi_register_custom_op",
    ],
)
def test_a_planted_upward_import_is_found(tmp_path: Path, line: str) -> None:
    copy = tmp_path / "magi_opschema"
    shutil.copytree(folder_of("magi_opschema"), copy, ignore=shutil.ignore_patterns("__pycache__"))
    planted = copy / "_model" / "tree.py"
    planted.write_text(f"{planted.read_text()}\n{line}\n")

    (found,) = upward_imports("magi_opschema", copy)
    assert found.startswith("_model/tree.py:")


@pytest.mark.parametrize(
    "folder", [file.parent for p in PACKAGES for file in sources(p) if file.match("_*/__init__.py")]
)
def test_a_folder_says_what_lives_there_and_holds_nothing_else(folder: Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text())
    said = ast.get_docstring(tree)

    assert said is not None
    assert len(said.splitlines()) <= 15
    for statement in tree.body[1:]:
        exports = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
        assert exports or isinstance(statement, (ast.Import, ast.ImportFrom)), ast.unparse(statement)


def test_the_page_on_architecture_draws_these_layers() -> None:
    page = PAGE.read_text()
    assert page == drawn(page), "run python tests/_layers.py"


def test_the_page_on_architecture_names_modules_that_exist() -> None:
    chapters = re.sub(r"<!--.*?-->", "", PAGE.read_text()).split("\n## ")[1:]
    named = {
        folder_of(package) / path
        for chapter in chapters
        for package in [chapter.partition(":")[0].replace("-", "_")]
        for path in re.findall(r"\b[\w/]*\w\.py\b", chapter)
    }

    assert len(named) > 40
    assert [str(path.relative_to(ROOT)) for path in sorted(named) if not path.is_file()] == []


def glossary() -> dict[str, list[str]]:
    """The names in code of each word in the glossary."""
    chapter = CONCEPTS.read_text().partition("\n## Glossary\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in chapter.splitlines() if line[:1] == "|"]
    return {word: re.findall(r"`([^`]+)`", code) for word, _, code in rows if word != "word" and "---" not in word}


def is_in_the_code(name: str) -> bool:
    """Whether *name* is a module, or what a module or a class in it has; a field of a class need not have a value."""
    parts = name.split(".")
    try:
        found: Any = importlib.import_module(parts.pop(0))
        for part in parts:
            if hasattr(found, part):
                found = getattr(found, part)
            elif isinstance(found, type):
                return part == parts[-1] and any(
                    part in vars(base).get("__annotations__", {}) for base in found.__mro__
                )
            else:
                found = importlib.import_module(f"{found.__name__}.{part}")
    except ModuleNotFoundError:
        return False
    return True


def test_the_glossary_names_what_is_in_the_code() -> None:
    words = glossary()

    assert len(words) > 40
    assert {word: names for word, names in words.items() if not names or not all(map(is_in_the_code, names))} == {}


@pytest.mark.parametrize(
    "name",
    [
        "magi_opschema.lower_signatures",
        "magi_opschema._model.trees",
        "magi_opschema._model.tree.Leaf.names",
        "magi_opschema.SignatureLowering.signature.text",
        "magi_opschemas.OpDef",
    ],
)
def test_a_name_that_is_not_in_the_code_is_found(name: str) -> None:
    assert not is_in_the_code(name)


def test_no_module_is_longer_than_600_lines() -> None:
    long = {
        str(file.relative_to(ROOT)): lines
        for package in PACKAGES
        for file in sources(package)
        if (lines := len(file.read_text().splitlines())) > 600
    }

    assert long == {}


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_nothing_outside_the_packages_imports_a_private_module(folder: str) -> None:
    private = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for module, line in imported(file, dotted(file))
        if module.split(".")[0] in IMPORT_NAMES.values() and any(part.startswith("_") for part in module.split("."))
    ]

    assert private == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_complete(package: str) -> None:
    folder = ROOT / "packages" / package
    source = folder / "src" / IMPORT_NAMES[package]

    for file in (folder / "README.md", folder / "LICENSE", source / "py.typed", source / "errors.py"):
        assert file.is_file(), f"{file.relative_to(ROOT)} is missing"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_every_source_names_its_licence_first() -> None:
    folders = ("packages", "tests", "examples", "benchmarks")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]

    missing = [
        str(file.relative_to(ROOT))
        for file in files
        if not file.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert missing == []
