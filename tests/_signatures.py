# SPDX-License-Identifier: Apache-2.0
"""Signatures, records and ways to run an op that the tests of magi-opschema share."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


T = TypeVar("T")
X = torch.arange(3.0)


class Mode(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2.5


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Alike(enum.Enum):
    ONE = 1
    TWO = 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 0


class Sizes(TypedDict):
    height: int
    width: int


@dataclass(frozen=True)
class Inner:
    scale: float = 1.0
    mode: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T


@dataclass(frozen=True)
class Doubling:
    """What it is made of, twice."""

    x: float
    y: float = float("nan")

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x * 2)


@dataclass(frozen=True)
class Moded:
    scale: float = 1.0
    mode: Mode = Mode.RMS


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


SHOWN = "<a Unshowable whose __repr__ fails>"


try:
    from torch._library.opaque_object import register_opaque_type as register_opaque_type
    from torch._opaque_base import OpaqueBase

    class Stateful(OpaqueBase):
        """An object that torch takes as it is, an input of a graph."""

        def __init__(self, number: int) -> None:
            self.number = number

    class Constant(Stateful):
        """One that is a constant of a graph."""

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Constant) and self.number == other.number

        def __hash__(self) -> int:
            return hash(self.number)

        def __fx_repr__(self) -> tuple[str, dict[str, type]]:
            return f"Constant({self.number})", {"Constant": Constant}

    register_opaque_type(Stateful, typ="reference")
    register_opaque_type(Constant, typ="value")
except (ImportError, TypeError):  # torch 2.10
    Stateful = Constant = register_opaque_type = None  # type: ignore[assignment,misc]


def shown(value: object) -> str:
    """A test id: the same in every process, so without addresses."""
    return re.sub(r" at 0x[0-9a-f]+| id='\d+'", "", str(value))[:60]


def located(fn: Callable[..., Any]) -> str:
    """The end of every error about *fn*: file and line of its `def`."""
    return f"({Path(fn.__code__.co_filename).name}:{fn.__code__.co_firstlineno})"


def with_annotation(annotation: object) -> Callable[..., Any]:
    def body(x: Tensor, value: Any) -> Tensor:
        return x * 2

    body.__annotations__["value"] = annotation
    return body


def returning(annotation: object) -> Callable[..., Any]:
    def body(x: Tensor) -> Any:
        return x * 2

    del body.__annotations__["return"]
    if annotation is not inspect.Signature.empty:
        body.__annotations__["return"] = annotation
    return body


def plain(x: Tensor) -> Tensor:
    return x * 2


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3


def make_function(parameters: dict[str, Any], seen: list[Any], name: str = "body") -> Callable[..., Any]:
    """A function whose parameters have these names and annotations; it keeps what it is called with."""
    names = ", ".join(parameters)
    namespace: dict[str, Any] = {"keep_seen": seen}
    exec(f"def {name}({names}):\n    keep_seen.append(({names},))\n    return keep_seen[-1][0] * 2\n", namespace)
    fn: Callable[..., Any] = namespace[name]
    # Python itself writes a name in its NFKC form: µ as μ.
    fn.__annotations__ = {**dict(zip(fn.__code__.co_varnames, parameters.values(), strict=False)), "return": Tensor}
    return fn


def same(left: Any, right: Any) -> bool:
    """Equal, of the same classes all the way down; nan is nan, and -0.0 is not 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)
    if isinstance(left, enum.Enum) and not isinstance(left, enum.Flag):
        return left is right
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, part.name), getattr(right, part.name)) for part in dataclasses.fields(left))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


class Listening(TorchFunctionMode):
    """Keeps the functions that are called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Calls(torch.nn.Module):
    """A model of one function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def saved_and_loaded(program: torch.export.ExportedProgram) -> Any:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


def count_graphs(
    fn: Callable[..., Any], *, dynamic: bool | None = None, backend: str = "eager"
) -> tuple[Callable[..., Any], list[Any]]:
    """*fn* compiled whole, and the graphs that it has so far."""
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return torch.compile(fn, backend=counting, fullgraph=True, dynamic=dynamic), graphs
