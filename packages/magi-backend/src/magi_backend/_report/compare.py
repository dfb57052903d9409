# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: what changed in graphs, passes, kernels and times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .sections import DiffLine, called, changed_lines, diff_lines, total_seconds


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from magi_backend._records.folder import Entry
    from magi_backend.records import Compilation, GraphRecord

    from .whole_run import WholeRun


@dataclass(frozen=True)
class Pair:
    """One compilation of each run, of the same function."""

    before: Compilation
    after: Compilation

    @property
    def changed(self) -> tuple[str, ...]:
        """What differs, one word for each kind; times are left out, because they always differ."""
        parts = {
            "inputs": self.before.inputs != self.after.inputs,
            "graphs": self.before.captured != self.after.captured or _lowered(self.before) != _lowered(self.after),
            "passes": _passes(self.before) != _passes(self.after),
            "kernels": _kernels(self.before) != _kernels(self.after),
            "repairs": _repairs(self.before) != _repairs(self.after),
            "settings": _settings(self.before) != _settings(self.after),
        }
        return tuple(name for name, differs in parts.items() if differs)

    @property
    def ratio(self) -> float:
        """The time after over the time before; 0 if there is no time before."""
        before = total_seconds(self.before)
        return total_seconds(self.after) / before if before else 0.0

    def lines(self) -> Iterator[str]:
        """What changed, one sentence for each change."""
        for name, lines in self.graph_diffs():
            added, removed = changed_lines(lines)
            yield f"{name}: {added} lines added, {removed} removed"
        yield from _told("pass", _passes(self.before), _passes(self.after))
        yield from _told("repair", _repairs(self.before), _repairs(self.after))
        yield from _told("setting", _settings(self.before), _settings(self.after))
        for kernel, count in (_kernels(self.after) - _kernels(self.before)).items():
            yield f"kernel {kernel}: new" + (f", {count} times" if count > 1 else "")
        for kernel, count in (_kernels(self.before) - _kernels(self.after)).items():
            yield f"kernel {kernel}: gone" + (f", {count} times" if count > 1 else "")

    def graph_diffs(self) -> Iterator[tuple[str, list[DiffLine]]]:
        """The captured graph and each lowered graph that differ, by name."""
        old, new = _lowered(self.before), _lowered(self.after)
        texts = [("captured graph", self.before.captured, self.after.captured)]
        texts += [(f"graph {t}, lowered", old.get(t, ""), new.get(t, "")) for t in dict.fromkeys((*old, *new))]
        for name, before, after in texts:
            if before != after:
                yield name, diff_lines(before, after)


def _told(what: str, before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield f"{what} {name}: {before.get(name, 'not there')} -> {after.get(name, 'not there')}"


def _lowered(compilation: Compilation) -> dict[str, str]:
    return {graph.title: graph.lowered for graph in compilation.graphs}


def _of_graphs(compilation: Compilation, told: Callable[[GraphRecord], dict[str, str]]) -> dict[str, str]:
    return {f"{name} on {graph.title}": text for graph in compilation.graphs for name, text in told(graph).items()}


def _passes(compilation: Compilation) -> dict[str, str]:
    def told(graph: GraphRecord) -> dict[str, str]:
        return {p.name: f"{'ran' if p.ran else 'did not run'} ({p.reason})" for p in graph.passes}

    return _of_graphs(compilation, told)


def _repairs(compilation: Compilation) -> dict[str, str]:
    return _of_graphs(compilation, lambda graph: {r.name: f"{r.times} times" for r in graph.repairs})


def _settings(compilation: Compilation) -> dict[str, str]:
    # Each run has another folder.
    return {name: value for name, value, _ in compilation.settings if name != "report"}


def _kernels(compilation: Compilation) -> Counter[str]:
    return Counter(name for graph in compilation.graphs for name in (*graph.kernels, *graph.externs))


@dataclass(frozen=True)
class PairedRuns:
    """Two runs, with their compilations in pairs if they have a counterpart."""

    before: WholeRun
    after: WholeRun
    pairs: tuple[Pair, ...]
    only_before: tuple[Compilation, ...]
    only_after: tuple[Compilation, ...]


def paired(
    before: Sequence[Entry], after: Sequence[Entry]
) -> tuple[tuple[Pair, ...], tuple[Compilation, ...], tuple[Compilation, ...]]:
    """Pair the compilations of two runs: by rank, function and inputs; then the others by rank and function.

    After the pairs come the compilations that only the run *before* has, then those that only the run *after* has.
    """
    left, right = list(before), list(after)
    pairs: list[tuple[Entry, Entry]] = []
    for same in (_same_inputs, _same_function):
        pairs += _take_pairs(left, right, same)
    pairs.sort(key=lambda pair: pair[0].compilation.index)
    return (
        tuple(Pair(old.compilation, new.compilation) for old, new in pairs),
        tuple(entry.compilation for entry in left),
        tuple(entry.compilation for entry in right),
    )


def _take_pairs(
    left: list[Entry], right: list[Entry], same: Callable[[Entry], Sequence[object]]
) -> Iterator[tuple[Entry, Entry]]:
    for old in list(left):
        new = next((entry for entry in right if same(entry) == same(old)), None)
        if new is not None:
            left.remove(old)
            right.remove(new)
            yield old, new


def _same_function(entry: Entry) -> Sequence[object]:
    return entry.process.rank, called(entry.compilation)


def _same_inputs(entry: Entry) -> Sequence[object]:
    return *_same_function(entry), entry.compilation.inputs
