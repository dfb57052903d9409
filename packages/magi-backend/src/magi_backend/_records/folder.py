# SPDX-License-Identifier: Apache-2.0
"""Records as plain data for JSON and back, and a folder with a file for each compilation, written while it compiles.

FOLDER/<when>-<process>-<thread>.json   one compilation
FOLDER/texts/<digest>.txt               a graph or generated code; the same text of all compilations is one file
FOLDER/processes/<when>-<process>.json  other graphs of one process: of other backends, graph breaks, failures
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter

from magi_backend.errors import ConfigError
from magi_backend.records import Compilation


T = TypeVar("T")
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def write_whole(path: Path, data: bytes) -> None:
    """Make the file *path* with *data*, so that another process sees all of it or none."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def to_plain(value: Any) -> Any:
    """*value* as dicts, lists and numbers; a float that JSON does not have becomes a string.

    Example:
        >>> to_plain({"largest": float("inf"), "sizes": (1, 2)})
        {'largest': 'inf', 'sizes': [1, 2]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: type[T], data: Any) -> T:
    """The record of class *kind* that *data* was made from; fields that *data* lacks get their defaults."""
    record: T = _adapter(kind).validate_python(data)
    return record


logger = logging.getLogger("magi_backend")

CAP = 256 * 2**20
"""Bytes that a folder may hold. Later records are not written, and the log says so once."""

_REFERENCE = re.compile(r"text:([0-9a-f]{24})")
"""What a record holds instead of a text that is in a file."""


@dataclass(frozen=True)
class Process:
    """Who compiled; *rank* is as `torchrun` set it, or empty."""

    pid: int
    rank: str
    program: str
    torch: str


@dataclass(frozen=True)
class Entry:
    """One compilation of a run, which holds shapes and dtypes of tensors, never their values."""

    process: Process
    started: float
    """Seconds since the epoch."""
    finished: bool
    """Whether the backend returned; false if the process ended before."""
    compilation: Compilation


@functools.cache
def folder_of(place: str) -> Folder:
    """The folder at *place*, one object for all that this process writes there."""
    return Folder(Path(place))


class Folder:
    """A folder that only its owner may read, and that takes no more than `CAP` bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._size, self._counted = 0, -1

    def make(self) -> Folder:
        """Make the folder if it does not exist, for its owner only, because it shows the code of a program.

        Raises:
            ConfigError: It cannot be made, or it belongs to another user.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.path.stat().st_mode & 0o077:
                self.path.chmod(0o700)
        except OSError as error:
            msg = f"magi.report = {str(self.path)!r} cannot be a folder that only you can read: {error}"
            raise ConfigError(msg) from error
        return self

    def write(self, path: Path, text: str) -> None:
        """Replace the file *path* of this folder by one with *text*.

        If the folder is full, or cannot be written to, a warning is logged.
        """
        data = text.encode()
        with self._lock:
            try:
                if not self._takes(len(data)):
                    _warn_once(f"{self.path} holds {CAP // 2**20} MiB, so compilations are no longer written there.")
                    return
                path.parent.mkdir(exist_ok=True, mode=0o700)
                write_whole(path, data)
            except OSError as error:
                _warn_once(f"magi.report: {self.path} cannot be written to, and this run goes on without: {error}")

    def _takes(self, more: int) -> bool:
        """Whether *more* bytes fit. What other processes write is counted again after each 32nd of the limit."""
        if self._counted < 0 or self._counted + more > CAP // 32:
            self._size, self._counted = _size(self.path), 0
        self._size += more
        self._counted += more
        return self._size <= CAP

    def keep(self, text: str) -> str:
        """Write *text* to a file of its own, unless there is one. Returns the reference to it for a record."""
        if not text:
            return ""
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        path = self.path / "texts" / f"{name}.txt"
        if not path.exists():
            self.write(path, text)
        return f"text:{name}"

    def text(self, reference: str) -> str:
        """The text of *reference*, a reference of a record; any other text as it is."""
        found = _REFERENCE.fullmatch(reference)
        if found is None:
            return reference
        path = self.path / "texts" / f"{found[1]}.txt"
        return path.read_text() if path.exists() else ""


class EntryFile:
    """The file of one compilation. Each write replaces it as a whole, so that a crash leaves the last one."""

    def __init__(self, place: str) -> None:
        self.folder = folder_of(place).make()
        self._started = time.time()
        self._path = self.folder.path / f"{file_stem()}-{threading.get_ident()}.json"

    def write(self, compilation: Compilation, *, finished: bool) -> None:
        """Write *compilation* as it is now to the file."""
        entry = Entry(this_process(), self._started, finished, compilation)
        self.folder.write(self._path, json.dumps(to_plain(entry)))

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def file_stem() -> str:
    """A name, without its suffix, for a new file of this process."""
    return f"{time.time_ns()}-{os.getpid()}"


def this_process() -> Process:
    """This process, as records name it."""
    return Process(os.getpid(), os.environ.get("RANK", ""), " ".join(sys.argv), str(torch.__version__))


def _size(folder: Path) -> int:
    """The bytes of all files in *folder*."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process has renamed the file that it was writing
            size += path.stat().st_size
    return size


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def entries(place: Path) -> Iterator[Entry]:
    """The compilations in the folder *place* with their texts, in the order in which they started."""
    folder = Folder(place)

    def with_texts(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: folder.text(value) if isinstance(value, str) else value for name, value in fields.items()}

    for path in sorted(place.glob("*.json")):
        yield from_plain(Entry, json.loads(path.read_text(), object_hook=with_texts))
