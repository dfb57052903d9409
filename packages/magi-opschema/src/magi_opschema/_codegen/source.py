# SPDX-License-Identifier: Apache-2.0
"""Generated source: the lines of one function, the objects that its names stand for, and the place that compiles it.

A compiled function shows its text in tracebacks, in `inspect.getsource` and in a debugger,
because its file name, `<magi_opschema exposed mylib.ops.norm>`, has an entry in `linecache`.
"""

from __future__ import annotations

import builtins
import linecache
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from magi_opschema import _environment as environment
from magi_opschema._model.tree import Leaf, Node
from magi_opschema.errors import EnvironmentVariableError


Reject = Callable[[Node | None], Callable[[object], None]]
"""A function from a node to the function that generated code calls with a refused value; None stands for `-> None`."""

INDENT = "    "
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class Writer:
    """Lines of one function, and the objects that its reserved names stand for."""

    prefix: str
    reject: Reject
    title: str = ""
    """What errors about the op begin with."""
    location: str = ""
    """Where the op is defined."""
    is_traced: bool = False
    """True for code that Dynamo traces, which must make instances by their constructors."""
    is_description: bool = False
    """True for code that describes the op instead of running it, and uses a stand-in for an object."""
    lines: list[str] = field(default_factory=list)
    globals: dict[str, object] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)
    are_locals_reserved: bool = False
    """True if what is written must not touch a parameter of the function, whatever its name."""

    def line(self, text: str) -> None:
        """Add one line."""
        self.lines.append(text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Add the line *head*, and indent by one level what the `with` statement adds."""
        self.line(head)
        start = len(self.lines)
        yield
        self.lines[start:] = [INDENT + line for line in self.lines[start:]]

    def of_output(self, reject: Reject) -> Writer:
        """A writer of the same function, for the lines that take the body's output apart.

        *reject* makes what a refused output calls. The parameters keep their values, because an output may be named
        like one of them.
        """
        return replace(self, reject=reject, are_locals_reserved=True)

    def bind(self, name: str, value: object) -> str:
        """A reserved name for *value*; if another value has the name, a number is appended."""
        candidate, count = f"{self.prefix}{name}", 1
        while candidate in self.locals or self.globals.setdefault(candidate, value) is not value:
            count += 1
            candidate = f"{self.prefix}{name}_{count}"
        return candidate

    def temporary(self, name: str) -> str:
        """A reserved name for a local variable; the same one for each call with *name*."""
        candidate, count = f"{self.prefix}{name}", 1
        while candidate in self.globals:
            count += 1
            candidate = f"{self.prefix}{name}_{count}"
        self.locals.add(candidate)
        return candidate

    def builtin(self, name: str) -> str:
        """A reserved name for a builtin, because a parameter of the user may shadow its own name."""
        return self.bind(name, getattr(builtins, name))

    def expression(self, leaf: Leaf, text: str, value: str) -> str:
        """*text*, an expression of the codec of *leaf*, for *value*, with its constants bound."""
        names = {
            name: self.builtin(name)
            if getattr(builtins, name, None) is constant
            else self.bind(f"{leaf.name}_{name}", constant)
            for name, constant in leaf.codec.constants.items()
            if f"{{{name}}}" in text
        }
        if "{reject}" in text:
            names["reject"] = self.bind(f"reject_{leaf.name}", self.reject(leaf))
        if "{title}" in text:
            names["title"] = self.bind("title", self.title)
        return text.format(value=value, **names)

    def local(self, name: str, value: str) -> str:
        """A local name for *value*, an expression, unless that is a name already."""
        if value == name or IDENTIFIER.match(value):
            return value
        if self.are_locals_reserved:
            name = self.temporary(name)
        self.line(f"{name} = {value}")
        return name


_lock = threading.Lock()
_names: dict[tuple[str, str], str] = {}
"""The file name of each text, by title and text."""
_counts: dict[str, int] = {}


@dataclass(frozen=True)
class Source:
    """Text of one generated function, the objects its names are bound to, and what it is called."""

    text: str
    globals: Mapping[str, object]
    entry: str
    title: str
    """The purpose of the function and its owner: `exposed mylib.ops.norm`."""


def compile_source(source: Source) -> types.FunctionType:
    """Compile *source* and return its function, with its text in `__source__`.

    With the environment variable `MAGI_OPSCHEMA_DUMP` set to a folder, the text is written there too.

    Raises:
        EnvironmentVariableError: that folder cannot be written.
    """
    filename = _enter_in_linecache(source)
    namespace: dict[str, Any] = dict(source.globals)
    exec(compile(source.text, filename, "exec", dont_inherit=True), namespace)  # noqa: S102
    function = namespace[source.entry]
    assert isinstance(function, types.FunctionType)
    function.__source__ = source.text  # type: ignore[attr-defined]
    if (folder := environment.folder(environment.DUMP)) is not None:
        _dump(source, folder, filename)
    return function


def compile_at_first_call(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """A function that becomes the result of *make* when it is first called, and costs nothing more afterwards.

    Compiling takes a third of a decoration, and many ops of a library are never called. At the first call, the code,
    defaults and globals of the compiled function are put into the function that was returned.
    """
    function = types.FunctionType(_compile_and_call.__code__, {})
    lock = threading.Lock()

    def compile_now() -> Callable[..., Any]:
        with lock:
            if function.__code__ is _compile_and_call.__code__:
                made: Any = make()
                function.__globals__.update(made.__globals__)
                function.__defaults__, function.__kwdefaults__ = made.__defaults__, made.__kwdefaults__
                function.__code__ = made.__code__  # set last, because another thread may call the function now
        return function

    function.__globals__["compile_now"] = compile_now
    return function


def _compile_and_call(*args: Any, **kwargs: Any) -> Any:
    """The code of a function that is not compiled yet; `compile_now` is a global of that function only."""
    return compile_now()(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _enter_in_linecache(source: Source) -> str:
    """Enter *source* in `linecache`, and return its file name; the same text keeps the same name."""
    with _lock:
        if (name := _names.get((source.title, source.text))) is not None:
            return name
        _counts[source.title] = count = _counts.get(source.title, 0) + 1
        name = f"<magi_opschema {source.title}>" if count == 1 else f"<magi_opschema {source.title}-{count}>"
        _names[source.title, source.text] = name
        # Without a modification time, linecache.checkcache() keeps the entry.
        linecache.cache[name] = (len(source.text), None, source.text.splitlines(keepends=True), name)
        return name


def _dump(source: Source, folder: Path, filename: str) -> None:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", filename.strip("<>"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.py").write_text(source.text, encoding="utf-8")
    except OSError as error:
        text = f"{environment.DUMP}={folder} is not a folder that can be written: {error.strerror or error}."
        raise EnvironmentVariableError(f"{text} Name another folder, or unset it.") from error
