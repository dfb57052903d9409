# SPDX-License-Identifier: Apache-2.0
"""Generated source as data, and the one place that compiles it.

A compiled function shows its text in tracebacks, in `inspect.getsource` and in a debugger,
because its file name, `<magi_opschema exposed mylib.ops.norm>`, has an entry in `linecache`.
"""

from __future__ import annotations

import linecache
import re
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi_opschema import _environment as environment
from magi_opschema.errors import EnvironmentVariableError


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
