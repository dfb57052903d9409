# SPDX-License-Identifier: Apache-2.0
"""What the installed torch has: its schemas, read without importing torch, and the bases that an allowlist takes."""

from __future__ import annotations

import functools as ft
import gc
import importlib.metadata
import importlib.util
import operator
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi_opschema.aten.errors import AllowlistError, MissingExtraError, VerificationError

from .schema import Base, Overload, Parameter, Return, Type, Variant, nearest, parameter_name


if TYPE_CHECKING:
    from torchgen.model import NativeFunction  # type: ignore[import-untyped]


SHIPPED = Path(__file__).parents[1] / "aten_ops.yaml"
"""The allowlist that `magi_opschema.aten` generates from."""

_SCHEMA_FILE = "packaged/ATen/native/native_functions.yaml"
_TAGS_FILE = "packaged/ATen/native/tags.yaml"

_DEFAULT = re.compile(r"=(\[[^\]]*\]|[^,)]+)")

_KINDS = frozenset({"functional", "mutable", "out"})
"""In-place overloads are not on the surface, because `out=` does the same with any target."""

_COMPARISONS = {"<": operator.lt, ">=": operator.ge}


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
        """The base *name* with all its overloads, paired to variants; *name* is one of `out_counts`."""
        overloads = [_overload(function) for function in self._functions[name]]
        outs = [overload for overload in overloads if overload.kind == "out"]
        variants: list[Variant] = []
        for overload in overloads:
            if overload.kind != "out":
                partner = next((out for out in outs if out.group == overload.group), None)
                if partner is not None:
                    outs.remove(partner)
                variants.append(Variant(overload, partner))
        return Base(name, (*variants, *(Variant(None, out) for out in outs)))


@ft.lru_cache(maxsize=1)
def installed_schemas() -> InstalledSchemas:
    """Read the ATen schemas of the installed torch.

    torchgen expands the entries that torch generates (`autogen: relu.out`) just as torch's own build does.
    """
    spec = importlib.util.find_spec("torchgen")
    if spec is None or spec.origin is None:
        msg = "torchgen, torch's code generator, is not installed; it comes with every torch wheel. Reinstall torch."
        raise MissingExtraError(msg)
    folder = Path(spec.origin).parent
    for name in (_SCHEMA_FILE, _TAGS_FILE):
        if not (folder / name).is_file():
            msg = f"torchgen in {folder} has no {name}, from which the schemas are read. Reinstall torch."
            raise MissingExtraError(msg)
    _require_yaml("Reading torch's schemas")
    try:
        from torchgen.gen import parse_native_yaml  # type: ignore[import-untyped]
    except ImportError as error:
        msg = f"torchgen.gen cannot be imported ({error}); it comes with every torch wheel. Reinstall torch."
        raise MissingExtraError(msg) from error
    collects = gc.isenabled()
    gc.disable()  # collecting garbage takes a third of the time of parsing
    try:
        native = parse_native_yaml(str(folder / _SCHEMA_FILE), str(folder / _TAGS_FILE)).native_functions
    finally:
        if collects:
            gc.enable()
    functions: dict[str, list[NativeFunction]] = defaultdict(list)
    out_counts = Counter[str]()
    for function in native:
        name = str(function.func.name.name)
        kind = function.func.kind().name
        out_counts[name] += kind == "out"
        if kind in _KINDS:
            functions[name].append(function)
    capable = {name: count for name, count in sorted(out_counts.items()) if count}
    other_names = frozenset(out_counts.keys() - capable.keys())
    return InstalledSchemas(importlib.metadata.version("torch"), capable, other_names, dict(functions))


def _overload(function: NativeFunction) -> Overload:
    func = function.func
    arguments = func.arguments
    keyword_only = {argument.name for argument in arguments.flat_kwarg_only}
    outs = {argument.name for argument in arguments.out}
    parameters = tuple(
        Parameter(
            name=parameter_name(argument.name),
            schema_name=argument.name,
            type=Type(str(argument.type)),
            default=argument.default,
            kwarg_only=argument.name in keyword_only,
            alias=_alias(argument.annotation),
        )
        for argument in arguments.flat_all
    )
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


def _alias(annotation: object) -> str | None:
    return None if annotation is None else str(annotation)


def _require_yaml(task: str) -> None:
    if importlib.util.find_spec("yaml") is None:
        msg = f"{task} needs pyyaml: pip install 'magi-opschema[aten]'."
        raise MissingExtraError(msg)


def read_allowlist(path: Path) -> list[str]:
    """Read a YAML list of base names, and return those for the installed torch.

    An entry is a name, `softmax`, or a name with the releases of torch that have it: `cholesky: "<2.14"`,
    `new: ">=2.12"`, both ends with a comma.

    Raises:
        AllowlistError: The file is missing, is not YAML, is not a list of such entries, or holds a name twice.
        MissingExtraError: pyyaml is not installed.
    """
    _require_yaml(f"Reading {path}")
    import yaml

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"the allowlist {path} cannot be read: {error.strerror}"
        raise AllowlistError(msg) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        msg = f"the allowlist {path} is not YAML: {error}"
        raise AllowlistError(msg) from error
    if not isinstance(entries, list) or not entries:
        kind = type(entries).__name__
        msg = f"the allowlist {path} must be a YAML list of base names such as '- softmax', not {kind}"
        raise AllowlistError(msg)
    served: list[tuple[str, bool]] = []
    for place, entry in enumerate(entries, start=1):
        name, releases = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, "")
        if not isinstance(name, str):
            msg = f"the allowlist {path}: entry {place} is {name!r}, not a name; quote it where YAML misreads it"
            raise AllowlistError(msg)
        served.append((name, _serves(releases, f"the allowlist {path}: entry {place}, {name!r},")))
    repeated = sorted(name for name, count in Counter(name for name, _ in served).items() if count > 1)
    if repeated:
        msg = f"the allowlist {path} names {', '.join(repeated)} more than once"
        raise AllowlistError(msg)
    return [name for name, serves in served if serves]


def _serves(releases: Any, where: str) -> bool:
    """Whether the installed torch is one of *releases*, `<2.14` or `>=2.12,<2.14`; an empty text is all of them."""
    if releases == "":
        return True
    bounds = [re.fullmatch(r"(<|>=)(\d+)\.(\d+)", part) for part in str(releases).replace(" ", "").split(",")]
    if not all(bounds):
        msg = f"{where} has the releases {releases!r}; write them as '<2.14', '>=2.12' or '>=2.12,<2.14'"
        raise AllowlistError(msg)
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    running = (int(major), int(minor))
    return all(_COMPARISONS[bound[1]](running, (int(bound[2]), int(bound[3]))) for bound in bounds if bound)


def select_bases(names: list[str], schemas: InstalledSchemas, source: Path) -> list[Base]:
    """The schemas of *names*, sorted by name."""
    problems = []
    for name in names:
        base, dot, _ = name.partition(".")
        if name in schemas.other_names:
            problems.append(f"{name!r} has no overload that writes into out=")
        elif dot and base in schemas.out_counts:
            problems.append(f"{name!r} is one overload; name the base {base!r}, which brings all of them")
        elif name not in schemas.out_counts:
            problems.append(f"no operator {name!r}{nearest(name, schemas.out_counts)}")
    if problems:
        listed = "\n  ".join(problems)
        msg = f"the allowlist {source} does not fit torch {schemas.torch_version}:\n  {listed}"
        raise AllowlistError(msg)
    return [schemas.base(name) for name in sorted(names)]


def verify(bases: list[Base]) -> int:
    """Compare every overload of *bases* with the dispatcher's schema, which imports torch; returns how many there are.

    Raises:
        VerificationError: One or more differ, or are not registered; all of them in one error.
    """
    from magi_opschema.aten._torch_compat import dispatcher_schemas, parsed_schema

    registered = {(schema.name, schema.overload_name): schema for schema in dispatcher_schemas()}
    overloads = [overload for base in bases for overload in base.overloads]
    problems = []
    for overload in overloads:
        schema = registered.get((f"aten::{overload.base}", overload.name))
        if schema is None:
            problems.append(f"aten::{overload.qualified} is not registered")
        elif str(schema) != str(parsed_schema(f"aten::{overload.schema}")):
            problems.append(f"torchgen reads aten::{overload.schema}, the dispatcher has {schema}")
    if problems:
        listed = "\n  ".join(problems)
        msg = f"torchgen and the dispatcher disagree on {len(problems)} of {len(overloads)} overloads:\n  {listed}"
        raise VerificationError(msg)
    return len(overloads)
