# SPDX-License-Identifier: Apache-2.0
"""A folder in which each compilation has a file, written as it happens; and the folder read again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magi_backend import _torch_compat
from magi_backend.errors import ConfigError

from .plain import from_plain, to_plain
from .records import Compilation


if TYPE_CHECKING:
    from collections.abc import Iterator


logger = logging.getLogger("magi_backend")

CAP = 256 * 2**20
"""Bytes that a folder may hold. What comes after is not written, and the log says so once."""


@dataclass(frozen=True)
class Process:
    """Who compiled.

    Attributes:
        pid: The number of the process.
        rank: Its rank, as `torchrun` tells it; empty where it has none.
        program: What was run.
        torch: The version of torch.
    """

    pid: int
    rank: str
    program: str
    torch: str


@dataclass(frozen=True)
class Entry:
    """One compilation of a run.

    Attributes:
        process: Who compiled.
        started: Seconds since the epoch.
        finished: Whether the backend returned; false where the process ended before.
        compilation: What is known of it. It holds shapes and dtypes of tensors, never their values.
    """

    process: Process
    started: float
    finished: bool
    compilation: Compilation


class EntryFile:
    """The file of one compilation: a whole new one takes its place at each write, so that a crash leaves the last."""

    def __init__(self, folder: str) -> None:
        self._folder = _private(Path(folder))
        self._started = time.time()
        self._path = self._folder / f"{time.time_ns()}-{os.getpid()}-{threading.get_ident()}.json"
        self._lock = threading.Lock()

    def write(self, compilation: Compilation, *, finished: bool) -> None:
        """Put *compilation* as it is now into the file. A folder that cannot be written to is a warning in the log."""
        process = Process(os.getpid(), os.environ.get("RANK", ""), " ".join(sys.argv), _torch_compat.torch_text())
        text = json.dumps(to_plain(Entry(process, self._started, finished, compilation)))
        with self._lock:
            try:
                if _size(self._folder) + len(text) > CAP:
                    _warn_once(f"{self._folder} holds {CAP // 2**20} MiB, so compilations are no longer written there.")
                    return
                part = self._path.with_suffix(".part")
                part.write_text(text)
                part.replace(self._path)
            except OSError as error:
                _warn_once(f"magi.report: {self._folder} cannot be written to, and this run goes on without: {error}")

    def remove(self) -> None:
        """Take the file away."""
        with self._lock:
            self._path.unlink(missing_ok=True)


def _private(folder: Path) -> Path:
    """*folder*, which nobody else may read: it says what a program is made of.

    Raises:
        ConfigError: It cannot be made, or it belongs to someone else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        msg = f"magi.report = {str(folder)!r} cannot be a folder that only you can read: {error}"
        raise ConfigError(msg) from error
    return folder


def _size(folder: Path) -> int:
    size = 0
    for entry in os.scandir(folder):
        # Another process may have put the file that it was writing into its place in between.
        with contextlib.suppress(FileNotFoundError):
            size += entry.stat().st_size
    return size


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)


def entries(folder: Path) -> Iterator[Entry]:
    """The compilations in *folder*, in the order in which they started."""
    for path in sorted(folder.glob("*.json")):
        yield from_plain(Entry, json.loads(path.read_text()))
