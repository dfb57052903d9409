# SPDX-License-Identifier: Apache-2.0
"""The results of the harness: one row for each check, slot, overload and input."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        overload: The variant, by its leading overload: `add.Tensor`.
        slot: The slot that ran.
        check: The name of the check: `functional`, `out`, `out strided` ...
        dtype: The dtype of the inputs.
        layout: The layout of the inputs.
        sample: Where the input came from, and its number there.
        outcome: `pass`, `fail`, `xfail` (a known divergence of torch), `skip`.
        detail: Why, for anything but a pass.
        ran: The overloads that executed.
    """

    overload: str
    slot: int
    check: str
    dtype: str
    layout: str
    sample: str
    outcome: str
    detail: str = ""
    ran: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A key that identifies the row among all rows."""
        return f"{self.overload}|{self.slot}|{self.check}|{self.dtype}|{self.layout}|{self.sample}"

    def __str__(self) -> str:
        where = f"{self.overload} slot {self.slot} {self.check} [{self.dtype} {self.layout} {self.sample}]"
        return f"{where}: {self.outcome}{': ' + self.detail if self.detail else ''}"


@dataclass
class Report:
    """The rows of one run."""

    rows: list[Row] = field(default_factory=list)

    @property
    def failures(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if row.outcome == "fail"]

    @property
    def executed(self) -> set[str]:
        """Every overload that a check executed and whose result it compared."""
        return {overload for row in self.rows if row.outcome in {"pass", "fail", "xfail"} for overload in row.ran}

    @property
    def skips(self) -> Counter[str]:
        """How many rows each declared reason skipped."""
        return Counter(row.detail for row in self.rows if row.outcome == "skip")

    def summary(self) -> str:
        """The counts of each outcome in one line."""
        counts = Counter(row.outcome for row in self.rows)
        return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("pass", "fail", "xfail", "skip"))
