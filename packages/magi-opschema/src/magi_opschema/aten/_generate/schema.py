# SPDX-License-Identifier: Apache-2.0
"""ATen schemas as plain data, free of torch and of torchgen, and the names that they have here.

A base is all overloads of one name. Each of its *variants* is a pair of the functional overload and the overload that
writes into `out=`. `add` has two, `(add.Tensor, add.out)` and `(add.Scalar, add.Scalar_out)`. If ATen has only one of
the pair, the other form is composed from it: `std(x, out=o)` copies the functional result.

`linalg_norm` is `linalg.norm`, `special_erf` is `special.erf`, `_softmax` is `internal.softmax`; a name that Python or
this package already uses gets a trailing underscore: parameter `from` is `from_`. The map of operators has an inverse.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


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


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'softmax'?"`, or an empty string if no known name is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class Type:
    """One schema type, for example `SymInt[2]?`."""

    text: str

    @cached_property
    def optional(self) -> bool:
        """Whether this type allows None."""
        return self.text.endswith("?")

    @cached_property
    def is_list(self) -> bool:
        """Whether the values are sequences."""
        return self.text.removesuffix("?").endswith("]")

    @cached_property
    def sized(self) -> bool:
        """Whether a single element is accepted for a list: `dim=1` for `int[1] dim`, but not for `SymInt[1]`."""
        return re.fullmatch(r"int\[\d+\]\??", self.text) is not None

    @cached_property
    def length(self) -> int | None:
        """The fixed length of a list type, 2 for `SymInt[2]`; None for any length."""
        found = re.search(r"\[(\d+)\]\??$", self.text)
        return int(found[1]) if found else None

    @cached_property
    def element(self) -> str:
        """The type inside the list, with its own `?`; for any other type, that type without `?`."""
        text = self.text.removesuffix("?")
        return text[: text.rindex("[")] if self.is_list else text


@dataclass(frozen=True)
class Parameter:
    """One parameter of an overload.

    Attributes:
        name: Its name in Python: `self` is `input`, `from` is `from_`.
        schema_name: Its name in the schema.
        type: Its type.
        default: The default as text of the schema; None if there is none.
        kwarg_only: Whether it is after the `*`.
        alias: The alias annotation without parentheses, `a!`; None if there is none.
    """

    name: str
    schema_name: str
    type: Type
    default: str | None
    kwarg_only: bool
    alias: str | None

    @property
    def required(self) -> bool:
        """Whether a call must give the parameter."""
        return self.default is None

    @property
    def default_text(self) -> str:
        """The default of an optional parameter as a Python expression: `[-2,-1]` is `(-2, -1)`, `Mean` is `1`.

        The dispatcher repeats a single number for an `int[2]`, but not for a `SymInt[2]`, whose default is written in
        full.
        """
        default, type_ = str(self.default), self.type
        if default in _SYMBOLS:
            return _SYMBOLS[default]
        if default[0] in "'\"":
            return '"' + default[1:-1] + '"'
        value = ast.literal_eval(default)
        if isinstance(value, list):
            return repr(tuple(value))
        if isinstance(value, int) and not isinstance(value, bool) and type_.length and not type_.sized:
            return repr((value,) * type_.length)
        return default


@dataclass(frozen=True)
class Return:
    """One return of an overload; `name` is None where the schema gives none."""

    name: str | None
    type: Type
    alias: str | None


@dataclass(frozen=True)
class Overload:
    """One ATen overload.

    Attributes:
        base: The name before the dot, `add`.
        name: The name after the dot, `Scalar_out`; empty for the default overload.
        kind: `functional`, `out`, or `mutable` (it returns new tensors and writes into an argument too).
        schema: The whole schema as torchgen prints it.
        params: The parameters in order, without the out arguments.
        outs: The out arguments in order; empty unless `kind` is `out`.
        returns: The returns.
        tags: torch's tags, sorted.
        autogen: Whether torch generates this overload from another one (functional call, resize, copy).
        module: torch's Python module for it, `nn` or `linalg`; None if there is none.
        group: A value that is equal for the overloads of one variant.
    """

    base: str
    name: str
    kind: str
    schema: str
    params: tuple[Parameter, ...]
    outs: tuple[Parameter, ...]
    returns: tuple[Return, ...]
    tags: tuple[str, ...]
    autogen: bool
    module: str | None
    group: str

    @property
    def qualified(self) -> str:
        """`add.Tensor`, as the dispatcher prints it."""
        return f"{self.base}.{self.name}" if self.name else self.base

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
        returns = self.leading.returns
        if self.out is not None and self.out.outs:
            return 0 if self.out.outs[0].type.is_list else len(self.out.outs)
        return 0 if returns and returns[0].type.is_list else len(returns)


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
        return frozenset(tag for overload in self.overloads for tag in overload.tags)
