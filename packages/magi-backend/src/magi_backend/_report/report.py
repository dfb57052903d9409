# SPDX-License-Identifier: Apache-2.0
"""What happened when a function was compiled and run, to read in a terminal, in a browser, or in a program."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magi_backend._records.folder import to_plain


if TYPE_CHECKING:
    from rich.console import RenderableType

    from magi_backend.records import Compilation

    from .sections import CallRecord


@dataclass(frozen=True)
class Report:
    """What :func:`explain` found.

    Attributes:
        target: Name of the explained function or module.
        torch: Version of torch.
        calls: The explained calls so far.
        compilations: Every graph that the backend compiled for them.
    """

    target: str
    torch: str
    calls: tuple[CallRecord, ...]
    compilations: tuple[Compilation, ...]

    @property
    def title(self) -> str:
        """What the report is about, in one line."""
        return f"{self.target}, compiled by magi"

    @property
    def agrees(self) -> bool:
        """Whether every output and gradient of every call agrees with eager."""
        return all(difference.agrees for call in self.calls for difference in call.differences)

    def to_text(self, width: int = 120) -> str:
        """The report as plain text, at most *width* columns wide."""
        from .text import as_text

        return as_text(self.__rich__(), width)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON; infinite differences become the string "inf"."""
        return json.dumps(to_plain(self), indent=indent)

    def to_html(self) -> str:
        """The report as one HTML page that needs no other file."""
        from .html import as_html

        return as_html(self.title, self.torch, self.calls, self.compilations)

    def __str__(self) -> str:
        return self.to_text()

    def __rich__(self) -> RenderableType:
        from .text import as_renderable

        return as_renderable(self.title, self.torch, self.calls, self.compilations)
