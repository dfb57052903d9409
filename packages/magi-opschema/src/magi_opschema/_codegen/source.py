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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magi_opschema import _environment as environment
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import SCHEMA_TYPES
from magi_opschema._model.tree import Leaf, ListOrTuple, MaskedList, Node, Optional, Sequence, dotted
from magi_opschema._text import show_with_type
from magi_opschema._torch_compat import is_dynamo_compiling
from magi_opschema.errors import (
    ArgumentError,
    ArgumentValueError,
    EnvironmentVariableError,
    OpSchemaError,
)


INDENT = "    "
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def rejection(
    trees: SignatureLowering, node: Node | None, *, returned: type[OpSchemaError] | None = None, of: str = ""
) -> Callable[[object], None]:
    """The function that generated code calls with a refused value of *node*; None stands for `-> None`.

    *returned* is the error class if the value is the body's output, and *of* stands before the path in the error.
    """
    path, expected = ("output", "None") if node is None else (dotted(node.path), _expected(node))
    is_value = isinstance(node, Leaf) and bool(node.codec.expected) and not node.is_opaque
    error = returned or (ArgumentValueError if is_value else ArgumentError)
    refusal = node.codec.refusal if isinstance(node, Leaf) else None
    title, location = trees.title, trees.location

    def reject(value: object) -> None:
        if refusal is not None:
            error_class, text = refusal(value, expected)
            raise error_class(f"{title}: {of}'{path}' {text} ({location})")
        raise error(f"{title}: {of}'{path}' is {_shown(value)}, expected {expected}. ({location})")

    return reject


def _shown(value: object) -> str:
    name = type(value).__name__
    if is_dynamo_compiling():  # Dynamo traces this too, and supports the repr of constants only.
        return f"{value!r} ({name})" if isinstance(value, (str, int, float, type(None))) else f"of class {name}"
    return show_with_type(value)


def _class_of(schema_type: str) -> str:
    """The words for a value of *schema_type*: `a list with each item a float, or None` for `float[]?`."""
    base = schema_type.removesuffix("?")
    kind = base.removesuffix("[]")
    item = SCHEMA_TYPES[kind][0]
    text = item if kind == base else f"a list with each item {item}"
    return text if base == schema_type else f"{text}, or None"


def _expected(node: Node) -> str:
    match node:
        case Leaf():
            schema_type = node.schema_type.removesuffix("?") if node.is_padded else node.schema_type
            return node.codec.expected or _class_of(schema_type)
        case Sequence():
            return f"a tuple of {len(node.items)}, {node.label}"
        case Optional():
            return f"{_expected(node.inner)}, or None"
        case ListOrTuple():
            return f"a list or a tuple, {node.label}"
        case MaskedList():
            return node.label
    if node.kind == "typeddict":
        return f"a dict with exactly the keys {', '.join(repr(part.name) for part in node.fields)}"
    text = f"a {node.cls.__name__}, not a subclass or a look-alike, because the op rebuilds it from its fields"
    return f"{text}; or the handle that register_object() gave for one" if node.handle is not None else text


@dataclass(frozen=True)
class Writer:
    """Lines of one function, and the objects that its reserved names stand for."""

    trees: SignatureLowering
    """The op that the function is about."""
    is_traced: bool = False
    """True for code that Dynamo traces, which must make instances by their constructors."""
    is_description: bool = False
    """True for code that describes the op instead of running it, and uses a stand-in for an object."""
    returned: type[OpSchemaError] | None = None
    """The error class for a refused value if it is the body's output."""
    of: str = ""
    """What stands before the path of a refused value in the error."""
    lines: list[str] = field(default_factory=list)
    globals: dict[str, object] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)
    are_locals_reserved: bool = False
    """True if what is written must not touch a parameter of the function, whatever its name."""

    def line(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Add the line *head*, and indent by one level what the `with` statement adds."""
        self.line(head)
        start = len(self.lines)
        yield
        self.lines[start:] = [INDENT + line for line in self.lines[start:]]

    def reject(self, node: Node | None) -> Callable[[object], None]:
        """What generated code calls with a refused value of *node*; see `rejection`."""
        return rejection(self.trees, node, returned=self.returned, of=self.of)

    def bind(self, name: str, value: object) -> str:
        """A reserved name for *value*; if another value has the name, a number is appended."""
        candidate, count = f"{self.trees.prefix}{name}", 1
        while candidate in self.locals or self.globals.setdefault(candidate, value) is not value:
            count += 1
            candidate = f"{self.trees.prefix}{name}_{count}"
        return candidate

    def temporary(self, name: str) -> str:
        """A reserved name for a local variable; the same one for each call with *name*."""
        candidate, count = f"{self.trees.prefix}{name}", 1
        while candidate in self.globals:
            count += 1
            candidate = f"{self.trees.prefix}{name}_{count}"
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
            names["title"] = self.bind("title", self.trees.title)
        return text.format(value=value, **names)

    def local(self, name: str, value: str) -> str:
        """A local name for *value*, an expression, unless that is a name already."""
        if value == name or IDENTIFIER.match(value):
            return value
        if self.are_locals_reserved:
            name = self.temporary(name)
        self.line(f"{name} = {value}")
        return name

    def function(self, name: str, parameters: Iterable[str], doc: str, title: str) -> types.FunctionType:
        """The function *name* of the written lines, with its text in `__source__`.

        *title* is its purpose and its owner: `exposed mylib.ops.norm`. With the environment variable
        `MAGI_OPSCHEMA_DUMP` set to a folder, the text is written there too.
        """
        body = "\n".join(INDENT + line for line in [f'"""{doc}"""', *self.lines])
        text = f"def {name}({', '.join(parameters)}):\n{body}\n"
        filename = _enter_in_linecache(title, text)
        namespace: dict[str, Any] = dict(self.globals)
        exec(compile(text, filename, "exec", dont_inherit=True), namespace)  # noqa: S102
        function = namespace[name]
        assert isinstance(function, types.FunctionType)
        function.__source__ = text  # type: ignore[attr-defined]
        if (folder := environment.folder(environment.DUMP)) is not None:
            _dump(text, folder, filename)
        return function


_lock = threading.Lock()
_names: dict[tuple[str, str], str] = {}
"""The file name of each text, by title and text."""
_counts: dict[str, int] = {}


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
                become(function, make())
        return function

    function.__globals__["compile_now"] = compile_now
    return function


def become(function: Any, made: Any) -> None:
    """Make *function* do what the generated function *made* does, wherever it is held."""
    function.__globals__.update(made.__globals__)
    function.__defaults__, function.__kwdefaults__ = made.__defaults__, made.__kwdefaults__
    function.__code__ = made.__code__  # set last, because another thread may call the function now


def _compile_and_call(*args: Any, **kwargs: Any) -> Any:
    """The code of a function that is not compiled yet; `compile_now` is a global of that function only."""
    return compile_now()(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _enter_in_linecache(title: str, text: str) -> str:
    """Enter *text* in `linecache`, and return its file name; the same text keeps the same name."""
    with _lock:
        if (name := _names.get((title, text))) is not None:
            return name
        _counts[title] = count = _counts.get(title, 0) + 1
        name = f"<magi_opschema {title}>" if count == 1 else f"<magi_opschema {title}-{count}>"
        _names[title, text] = name
        # Without a modification time, linecache.checkcache() keeps the entry.
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return name


def _dump(text: str, folder: Path, filename: str) -> None:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", filename.strip("<>"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.py").write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"{environment.DUMP}={folder} is not a folder that can be written: {error.strerror or error}."
        raise EnvironmentVariableError(f"{what} Name another folder, or unset it.") from error
