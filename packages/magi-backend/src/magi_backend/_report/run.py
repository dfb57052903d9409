# SPDX-License-Identifier: Apache-2.0
"""The report of a run, read from the folder that ``magi.report`` named, and two of them side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from magi_backend._records.collect import processes
from magi_backend._records.folder import Folder, entries, to_plain, with_texts
from magi_backend.errors import ReportError

from .compare import PairedRuns, paired
from .whole_run import WholeRun


@dataclass(frozen=True)
class RunReport(WholeRun):
    """What was compiled in a run, in all its processes.

    Attributes:
        entries: Each compilation by backend magi, in the order in which they started, numbered by ``index``.
        processes: Other work of each process: graphs of other backends, graph breaks.
    """

    def compared_with(self, after: RunReport) -> Comparison:
        """What changed from this run to *after*: graphs, passes, kernels, settings and times."""
        return Comparison(self, after, *paired(self.entries, after.entries))

    def to_text(self, width: int = 120) -> str:
        """The index, what to look at first, and each compilation as plain text."""
        from .text import as_text, run_as_renderable

        return as_text(run_as_renderable(self), width)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON."""
        return json.dumps(to_plain(self), indent=indent)

    def to_html(self) -> str:
        """The report as one HTML page that needs no other file."""
        from .html import run_as_html

        return run_as_html(self)

    def __str__(self) -> str:
        return self.to_text()


@dataclass(frozen=True)
class Comparison(PairedRuns):
    """Two runs, their compilations in pairs as far as they have a counterpart."""

    before: RunReport
    after: RunReport

    def to_text(self, width: int = 120) -> str:
        """What changed, as plain text."""
        from .text import as_text, comparison_as_renderable

        return as_text(comparison_as_renderable(self), width)

    def to_html(self) -> str:
        """What changed, with the graphs as diffs, as one HTML page."""
        from .compare_html import comparison_as_html

        return comparison_as_html(self)


def read_report(folder: str | Path) -> RunReport:
    """Read what ``magi.report``, or ``MAGI_COMPILE_REPORT``, wrote into *folder*; it may be called during the run.

    Raises:
        ReportError: The folder holds no compilation.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     compiled = torch.compile(torch.sin, backend="magi", options={"magi.report": folder})
        ...     _ = compiled(torch.ones(3))
        ...     report = read_report(folder)
        >>> len(report.entries)
        1
    """
    place = Path(folder)
    found = list(entries(place)) if place.is_dir() else []
    if not found:
        msg = (
            f"{place} holds no compilation. Run the program with MAGI_COMPILE_REPORT={place}; only what "
            'backend="magi" compiles is kept.'
        )
        raise ReportError(msg)
    text_of = Folder(place).text
    numbered = (
        replace(entry, compilation=replace(with_texts(entry.compilation, text_of), index=index))
        for index, entry in enumerate(found)
    )
    return RunReport(tuple(numbered), tuple(processes(place)))
