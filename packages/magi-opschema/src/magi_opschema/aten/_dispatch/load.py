# SPDX-License-Identifier: Apache-2.0
"""Loading a generated surface: one from a folder, or that of the shipped allowlist, generated once for each torch."""

from __future__ import annotations

import functools as ft
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi_opschema._environment import CACHE_DIR, refuse_unknown_variables
from magi_opschema._environment import folder as folder_named
from magi_opschema._text import show_with_type
from magi_opschema.aten._generate.allowlist import SHIPPED
from magi_opschema.aten._generate.metadata import FILE_NAME, SCHEMA_VERSION
from magi_opschema.aten._generate.names import SUBMODULES, nearest
from magi_opschema.aten.errors import OutputError, SurfaceError, UnknownOpError

from .registry import check_environment


if TYPE_CHECKING:
    from types import ModuleType


def load(folder: str | os.PathLike[str]) -> ModuleType:
    """Load the surface that `magi-opschema aten gen --out FOLDER` wrote.

    Loaded surfaces share their slots: a kernel registered for `softmax` serves it in all of them.

    Args:
        folder: The folder.

    Returns:
        The surface as a module: `surface.softmax(x, -1)`, `surface.linalg.norm(x)`.

    Raises:
        SurfaceError: *folder* holds no surface, or one for another torch; or it is not a path.
        SlotError: A variable `MAGI_SLOT_<base>` in the environment names no operator, or no slot.
    """
    try:
        path = Path(folder).absolute()
    except TypeError:
        msg = f"a surface is given by its folder, not by {show_with_type(folder)}"
        raise SurfaceError(msg) from None
    surface = _load(path)
    check_environment()
    return surface


def read_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a generated surface, checked against the installed torch.

    Raises:
        SurfaceError: There is no surface, it cannot be read, or it is for another torch.
    """
    path = folder / FILE_NAME
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        written, version = document["torch"], document["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{folder} is not a generated surface ({FILE_NAME}: {error})"
        raise SurfaceError(f"{why}; write one with `magi-opschema aten gen --out`") from error
    installed = importlib.metadata.version("torch")
    if written != installed or version != SCHEMA_VERSION:
        msg = (
            f"the surface in {folder} was generated for torch {written}, and torch {installed} is installed; "
            "run `magi-opschema aten gen --out` again"
        )
        raise SurfaceError(msg)
    return document


@ft.cache
def default_surface() -> ModuleType:
    """The surface of the shipped allowlist for the installed torch, generated into the cache at the first use."""
    surface = _load(default_folder())
    check_environment(is_complete=True)
    return surface


@ft.cache
def default_folder() -> Path:
    """The cache folder of the shipped allowlist's surface, which is generated if it is missing.

    Raises:
        OutputError: The cache cannot be written.
        MissingExtraError: It must be generated, and pyyaml is missing.
    """
    refuse_unknown_variables()
    folder = _cache_root() / f"aten-{_fingerprint()}"
    if (folder / FILE_NAME).is_file():
        return folder
    from magi_opschema.aten._generate.files import write_folder
    from magi_opschema.aten._generate.surface import generate

    files = generate(SHIPPED)
    try:
        write_folder(files, folder)
    except OutputError as error:
        if (folder / FILE_NAME).is_file():  # another process was faster, and its files are identical
            return folder
        msg = f"{error}. The ATen surface is kept there; name another folder in {CACHE_DIR}"
        raise OutputError(msg) from error
    return folder


def attribute(name: str) -> Any:
    """An attribute of the default surface: a function or a submodule.

    Raises:
        UnknownOpError: There is none of that name.
    """
    surface = default_surface()
    if name in surface.__all__:
        return getattr(surface, name)
    known = [*surface.__all__, *(f"{sub}.{op}" for sub in SUBMODULES for op in _names_of(surface, sub))]
    msg = f"magi_opschema.aten has no operator {name!r}{nearest(name, known)}"
    raise UnknownOpError(msg)


def submodule_attribute(submodule: str, name: str) -> Any:
    """An attribute of a submodule of the default surface.

    Raises:
        UnknownOpError: There is none of that name.
    """
    module = getattr(default_surface(), submodule)
    if name not in module.__all__ and not (name.startswith("__") and hasattr(module, name)):
        msg = f"magi_opschema.aten.{submodule} has no operator {name!r}{nearest(name, module.__all__)}"
        raise UnknownOpError(msg)
    return getattr(module, name)


def _names_of(surface: ModuleType, submodule: str) -> list[str]:
    module = getattr(surface, submodule, None)
    return list(module.__all__) if module is not None else []


@ft.cache
def _load(folder: Path) -> ModuleType:
    read_metadata(folder)
    name = f"_magi_aten_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        msg = f"{folder} cannot be imported"
        raise SurfaceError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]
        if isinstance(error, (SyntaxError, ImportError, OSError)):
            msg = f"the surface in {folder} cannot be imported: {error}"
            raise SurfaceError(msg) from error
        raise
    return module


def _cache_root() -> Path:
    if (named := folder_named(CACHE_DIR)) is not None:
        return named
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "magi-opschema"


def _fingerprint() -> str:
    """The version of torch, and a hash of everything else that the generated bytes depend on."""
    digest = hashlib.sha256()
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    for path in [*sources, SHIPPED]:
        digest.update(path.read_bytes())
    return f"{importlib.metadata.version('torch')}-{digest.hexdigest()[:12]}"
