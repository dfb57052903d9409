# SPDX-License-Identifier: Apache-2.0
"""ATen schemas as torchgen reads them, without importing torch, and the names that they have here.

A base is all overloads of one name. Each of its *variants* is a pair of the functional overload and the overload that
writes into `out=`. `add` has two, `(add.Tensor, add.out)` and `(add.Scalar, add.Scalar_out)`. If ATen has only one of
the pair, the other form is composed from it: `std(x, out=o)` copies the functional result.

`linalg_norm` is `linalg.norm`, `special_erf` is `special.erf`, `_softmax` is `internal.softmax`; a name that Python or
this package already uses gets a trailing underscore: parameter `from` is `from_`. The map of operators has an inverse.
"""

from __future__ import annotations

import ast
import functools as ft
import gc
import importlib.metadata
import importlib.util
import keyword
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi_opschema._text import closest
from magi_opschema.aten.errors import AllowlistError, MissingExtraError, VerificationError


if TYPE_CHECKING:
    from torchgen.model import Argument, NativeFunction, Type  # type: ignore[import-untyped]


ATEN_SLOT = 8
METADATA_FILE = "torch_ops_metadata.json"
METADATA_VERSION = 1

SUBMODULES = ("fft", "internal", "linalg", "special")

_RESERVED = frozenset(
    {
        *SUBMODULES,
        "errors",
        "load",
        "metadata",
        "op_names",
        "pin",
        "prepare_out",
        "register_slot",
        "slots",
        "testing",
        "unregister_slot",
        "use_slot",
    }
)
"""What `magi_opschema.aten` itself defines; an operator of the same name gets a trailing underscore."""

OPTIONS = ("dtype", "layout", "device", "pin_memory")
"""Parameters of a factory that its `out` overload does not have, because `out` determines them."""

_SYMBOLS = {
    "Mean": "1",  # at::Reduction::Mean, in ATen/core/Reduction.h
    "Sum": "2",
    "contiguous_format": "torch.contiguous_format",
    "long": "torch.int64",
}


def python_name(name: str, reserved: frozenset[str] = frozenset()) -> str:
    """*name*, with an underscore appended if Python does not allow it, or it is *reserved*: `from` is `from_`."""
    stem = name.rstrip("_")
    return f"{name}_" if keyword.iskeyword(stem) or stem in reserved else name


def parameter_name(name: str) -> str:
    """The name in Python of a parameter of a schema: `self` is `input`."""
    return "input" if name == "self" else python_name(name)


def split_base(base: str) -> tuple[str | None, str]:
    """The submodule and the name in it: `linalg_norm` is `("linalg", "norm")`, `add` is `(None, "add")`."""
    prefix, _, rest = base.partition("_")
    if not prefix:
        return "internal", python_name(rest)
    if prefix in SUBMODULES and rest:
        return prefix, python_name(rest)
    return None, python_name(base, _RESERVED)


def canonical_name(base: str) -> str:
    """The name under `magi_opschema.aten`: `linalg_norm` is `linalg.norm`."""
    submodule, name = split_base(base)
    return name if submodule is None else f"{submodule}.{name}"


def base_name(canonical: str) -> str:
    """The ATen name of a canonical one, the inverse of `canonical_name`."""
    submodule, _, name = canonical.rpartition(".")
    stem = name.rstrip("_")
    if name.endswith("_") and (keyword.iskeyword(stem) or (not submodule and stem in _RESERVED)):
        name = name[:-1]
    if not submodule:
        return name
    return f"_{name}" if submodule == "internal" else f"{submodule}_{name}"


def base_and_overload(name: str) -> tuple[str, str | None]:
    """The ATen name and the overload in *name*: `mul.Tensor` and `linalg.norm.out` have one, `linalg.norm` has none."""
    parts = name.split(".")
    count = 2 if parts[0] in SUBMODULES else 1
    return base_name(".".join(parts[:count])), ".".join(parts[count:]) or None


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'softmax'?"`, or an empty string if no known name is close."""
    close = closest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def is_optional(type_: Type) -> bool:
    """Whether a type allows None. For torchgen, a list that can hold None is nullable too."""
    return str(type_).endswith("?")


def takes_one(type_: Type) -> bool:
    """Whether a single element is accepted for a list: `dim=1` for `int[1] dim`, but not for `SymInt[1]`."""
    listed = type_.is_list_like()
    return listed is not None and listed.size is not None and str(listed.elem) == "int"


@dataclass(frozen=True)
class Parameter:
    """One parameter of an overload.

    Attributes:
        argument: What torchgen read, with the name in the schema: `self`, `from`.
        kwarg_only: Whether it is after the `*`.
    """

    argument: Argument
    kwarg_only: bool

    @ft.cached_property
    def name(self) -> str:
        """Its name in Python: `self` is `input`, `from` is `from_`."""
        return parameter_name(self.argument.name)

    @property
    def type(self) -> Type:
        """Its type."""
        return self.argument.type

    @property
    def required(self) -> bool:
        """Whether a call must give the parameter."""
        return self.argument.default is None

    @property
    def default_text(self) -> str:
        """The default of an optional parameter as a Python expression: `[-2,-1]` is `(-2, -1)`, `Mean` is `1`.

        The dispatcher repeats a single number for an `int[2]`, but not for a `SymInt[2]`, whose default is written in
        full.
        """
        default, listed = str(self.argument.default), self.type.is_list_like()
        if default in _SYMBOLS:
            return _SYMBOLS[default]
        if default[0] in "'\"":
            return '"' + default[1:-1] + '"'
        value = ast.literal_eval(default)
        if isinstance(value, list):
            return repr(tuple(value))
        if listed is not None and listed.size and type(value) is int and not takes_one(self.type):
            return repr((value,) * listed.size)
        return default


@dataclass(frozen=True)
class Overload:
    """One ATen overload.

    Attributes:
        function: What torchgen read.
        params: The parameters in order, without the out arguments.
        outs: The out arguments in order; empty unless `kind` is `out`.
    """

    function: NativeFunction
    params: tuple[Parameter, ...]
    outs: tuple[Parameter, ...]

    @staticmethod
    def of(function: NativeFunction) -> Overload:
        arguments = function.func.arguments
        keyword_only = {argument.name for argument in arguments.flat_kwarg_only}
        outs = {argument.name for argument in arguments.out}
        parameters = [Parameter(argument, argument.name in keyword_only) for argument in arguments.flat_all]
        return Overload(
            function,
            tuple(p for p in parameters if p.argument.name not in outs),
            tuple(p for p in parameters if p.argument.name in outs),
        )

    @property
    def kind(self) -> str:
        """`functional`, `out`, or `mutable` (it returns new tensors and writes into an argument too)."""
        return str(self.function.func.kind().name)

    @property
    def schema(self) -> str:
        """The whole schema as torchgen prints it."""
        return str(self.function.func)

    @property
    def is_autogen(self) -> bool:
        """Whether torch generates this overload from another one (functional call, resize, copy)."""
        return "generated" in self.function.tags

    @property
    def name(self) -> str:
        """The name after the dot, `Scalar_out`; empty for the default overload."""
        return str(self.function.func.name.overload_name)

    @property
    def qualified(self) -> str:
        """`add.Tensor`, as the dispatcher prints it."""
        return str(self.function.func.name)

    @property
    def attribute(self) -> str:
        """The attribute of `torch.ops.aten.<base>`: `default` for the unnamed overload."""
        return self.name or "default"


@dataclass(frozen=True)
class Variant:
    """The functional and the out overload that belong together; one of them may be missing, but not both."""

    functional: Overload | None
    out: Overload | None

    @property
    def leading(self) -> Overload:
        """The overload that callers see: the functional one if there is one, otherwise the out overload."""
        return self.overloads[0]

    @property
    def params(self) -> tuple[Parameter, ...]:
        """The parameters that a caller can give, without `out`."""
        return self.leading.params

    @property
    def overloads(self) -> tuple[Overload, ...]:
        """The overloads of the variant that exist."""
        return tuple(overload for overload in (self.functional, self.out) if overload is not None)

    @property
    def out_count(self) -> int:
        """How many tensors `out=` takes; 0 for one list of any length."""
        written = self.out.outs if self.out is not None else ()
        types = [each.type for each in written or self.leading.function.func.returns]
        return 0 if types and types[0].is_list_like() else len(types)


@dataclass(frozen=True)
class Base:
    """Every overload of one ATen name, as variants in the order of the installed schemas."""

    name: str
    variants: tuple[Variant, ...]

    @property
    def canonical(self) -> str:
        """The name under `magi_opschema.aten`."""
        return canonical_name(self.name)

    @property
    def function(self) -> str:
        """The name of the generated function in its module."""
        return split_base(self.name)[1]

    @property
    def overloads(self) -> tuple[Overload, ...]:
        """All overloads, the functional one of a variant before its out."""
        return tuple(overload for variant in self.variants for overload in variant.overloads)

    @property
    def tags(self) -> frozenset[str]:
        """The tags of all overloads."""
        return frozenset(tag for overload in self.overloads for tag in overload.function.tags)


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
        overloads = [Overload.of(function) for function in self._functions[name]]
        outs = [overload for overload in overloads if overload.kind == "out"]
        variants: list[Variant] = []
        for overload in overloads:
            if overload.kind != "out":
                partner = next((out for out in outs if _group(out) == _group(overload)), None)
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


def _group(overload: Overload) -> str:
    """A value that is equal for the overloads of one variant."""
    return _DEFAULT.sub("", str(overload.function.func.signature()))


def _require_yaml(task: str) -> None:
    if importlib.util.find_spec("yaml") is None:
        raise MissingExtraError(f"{task} needs pyyaml: pip install 'magi-opschema[aten]'.")


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
        raise AllowlistError(f"the allowlist {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AllowlistError(f"the allowlist {path} is not YAML: {error}") from error
    if not isinstance(entries, list) or not entries:
        kind = type(entries).__name__
        raise AllowlistError(f"the allowlist {path} must be a YAML list of base names such as '- softmax', not {kind}")
    served: list[tuple[str, bool]] = []
    for place, entry in enumerate(entries, start=1):
        name, releases = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, "")
        if not isinstance(name, str):
            msg = f"the allowlist {path}: entry {place} is {name!r}, not a name; quote it where YAML misreads it"
            raise AllowlistError(msg)
        served.append((name, _serves(releases, f"the allowlist {path}: entry {place}, {name!r},")))
    repeated = sorted(name for name, count in Counter(name for name, _ in served).items() if count > 1)
    if repeated:
        raise AllowlistError(f"the allowlist {path} names {', '.join(repeated)} more than once")
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
        raise AllowlistError(f"the allowlist {source} does not fit torch {schemas.torch_version}:\n  {listed}")
    return [schemas.base(name) for name in sorted(names)]


def verify(bases: list[Base]) -> int:
    """Compare every overload of *bases* with the dispatcher's schema, which imports torch; returns how many there are.

    Raises:
        VerificationError: One or more differ, or are not registered; all of them in one error.
    """
    from magi_opschema.aten._torch_compat import dispatcher_schemas, parsed_schema

    registered = {str(schema).partition("(")[0]: schema for schema in dispatcher_schemas()}
    overloads = [overload for base in bases for overload in base.overloads]
    problems = []
    for overload in overloads:
        schema = registered.get(f"aten::{overload.qualified}")
        if schema is None:
            problems.append(f"aten::{overload.qualified} is not registered")
        elif str(schema) != str(parsed_schema(f"aten::{overload.schema}")):
            problems.append(f"torchgen reads aten::{overload.schema}, the dispatcher has {schema}")
    if problems:
        listed = "\n  ".join(problems)
        msg = f"torchgen and the dispatcher disagree on {len(problems)} of {len(overloads)} overloads:\n  {listed}"
        raise VerificationError(msg)
    return len(overloads)
