# SPDX-License-Identifier: Apache-2.0
"""The schemas of the installed torch, read from torchgen's packaged files without importing torch."""

from __future__ import annotations

import contextlib
import functools as ft
import gc
import importlib.metadata
import importlib.util
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi_opschema.aten.errors import MissingExtraError

from .names import python_name
from .schema import Base, Overload, Parameter, Return, Type, pair_overloads


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchgen.model import Argument, NativeFunction  # type: ignore[import-untyped]


_SCHEMA_FILE = "packaged/ATen/native/native_functions.yaml"
_TAGS_FILE = "packaged/ATen/native/tags.yaml"


_DEFAULT = re.compile(r"=(\[[^\]]*\]|[^,)]+)")

_KINDS = frozenset({"functional", "mutable", "out"})
"""In-place overloads are not on the surface, because `out=` does the same with any target."""


@dataclass(frozen=True)
class InstalledSchemas:
    """The ATen schemas of one torch.

    Attributes:
        torch_version: The version of the installed torch.
        out_counts: The number of out overloads, for each base that has any.
        other_names: The names of all other operators.
    """

    torch_version: str
    out_counts: dict[str, int]
    other_names: frozenset[str]
    _functions: dict[str, list[NativeFunction]]

    def base(self, name: str) -> Base:
        """The base *name* with all its overloads; *name* is one of `out_counts`."""
        return pair_overloads(name, [_overload(function) for function in self._functions[name]])


@ft.lru_cache(maxsize=1)
def installed_schemas() -> InstalledSchemas:
    """Read the ATen schemas of the installed torch.

    torchgen expands the entries that torch generates (`autogen: relu.out`) just as torch's own build does.

    Raises:
        MissingExtraError: pyyaml, torchgen or its packaged schema files are not installed.
    """
    folder = _torchgen_folder()
    parse = _parser()
    functions: dict[str, list[NativeFunction]] = defaultdict(list)
    names, out_counts = set(), Counter[str]()
    with _no_collection():
        native = parse(str(folder / _SCHEMA_FILE), str(folder / _TAGS_FILE)).native_functions
    for function in native:
        name = str(function.func.name.name)
        kind = function.func.kind().name
        names.add(name)
        out_counts[name] += kind == "out"
        if kind in _KINDS:
            functions[name].append(function)
    capable = {name: count for name, count in sorted(out_counts.items()) if count}
    return InstalledSchemas(_torch_version(), capable, frozenset(names - capable.keys()), dict(functions))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collection, which takes a third of the time of parsing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _torchgen_folder() -> Path:
    spec = importlib.util.find_spec("torchgen")
    if spec is None or spec.origin is None:
        msg = "torchgen, torch's code generator, is not installed; it comes with every torch wheel. Reinstall torch."
        raise MissingExtraError(msg)
    folder = Path(spec.origin).parent
    for name in (_SCHEMA_FILE, _TAGS_FILE):
        if not (folder / name).is_file():
            msg = f"torchgen in {folder} has no {name}, from which the schemas are read. Reinstall torch."
            raise MissingExtraError(msg)
    return folder


def _parser() -> Callable[[str, str], Any]:
    if importlib.util.find_spec("yaml") is None:
        msg = "Reading torch's schemas needs pyyaml: pip install 'magi-opschema[aten]'."
        raise MissingExtraError(msg)
    try:
        from torchgen.gen import parse_native_yaml  # type: ignore[import-untyped]
    except ImportError as error:
        msg = f"torchgen.gen cannot be imported ({error}); it comes with every torch wheel. Reinstall torch."
        raise MissingExtraError(msg) from error
    parse: Callable[[str, str], Any] = parse_native_yaml
    return parse


def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _overload(function: NativeFunction) -> Overload:
    func = function.func
    arguments = func.arguments
    keyword_only = {argument.name for argument in arguments.flat_kwarg_only}
    outs = {argument.name for argument in arguments.out}
    parameters = tuple(_parameter(a, kwarg_only=a.name in keyword_only) for a in arguments.flat_all)
    return Overload(
        base=str(func.name.name),
        name=func.name.overload_name,
        kind=func.kind().name,
        schema=str(func),
        params=tuple(p for p in parameters if p.schema_name not in outs),
        outs=tuple(p for p in parameters if p.schema_name in outs),
        returns=tuple(Return(r.name, Type(str(r.type)), _alias(r.annotation)) for r in func.returns),
        tags=tuple(sorted(function.tags - {"generated"})),
        autogen="generated" in function.tags,
        module=function.python_module,
        group=_DEFAULT.sub("", str(func.signature())),
    )


def _parameter(argument: Argument, *, kwarg_only: bool) -> Parameter:
    name = "input" if argument.name == "self" else python_name(argument.name)
    type_ = Type(str(argument.type))
    return Parameter(name, argument.name, type_, argument.default, kwarg_only, _alias(argument.annotation))


def _alias(annotation: object) -> str | None:
    return None if annotation is None else str(annotation)
