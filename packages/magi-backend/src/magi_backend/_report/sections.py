# SPDX-License-Identifier: Apache-2.0
"""What every report says, as lines and tables: numbers, names and sentences; and how a terminal shows them."""

from __future__ import annotations

import difflib
import io
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from magi_backend.records import Compilation, GraphRecord, Recompilation


@dataclass(frozen=True)
class Line:
    """A paragraph of a report; *style* is "bold" or "italic" for titles, "yellow" for notes, "red" for errors."""

    text: str
    style: str = ""
    indent: int = 0


@dataclass(frozen=True)
class Table:
    """A table of a report, which is left out if it has no rows."""

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[str]]


Kind = Literal["same", "added", "removed", "skipped"]


@dataclass(frozen=True)
class DiffLine:
    """A line of a diff; *text* of a skipped one says how many lines are left out."""

    kind: Kind
    text: str


def diff_lines(before: str, after: str, around: int = 2) -> list[DiffLine]:
    """The lines that differ, each with *around* equal lines before and after it.

    Example:
        >>> texts = ("a b c".replace(" ", chr(10)), "a c".replace(" ", chr(10)))
        >>> [(line.kind, line.text) for line in diff_lines(*texts, around=1)]
        [('same', 'a'), ('removed', 'b'), ('same', 'c')]
    """
    old, new, lines = before.splitlines(), after.splitlines(), list[DiffLine]()
    # Equal lines at both ends are most of a graph, and difflib is slow for them.
    count, shorter = len(old), min(len(old), len(new))
    head = next((at for at in range(shorter) if old[at] != new[at]), shorter)
    tail = next((at for at in range(shorter - head) if old[-1 - at] != new[-1 - at]), shorter - head)
    start, kept = max(head - around, 0), max(tail - around, 0)
    old, new = old[start : len(old) - kept], new[start : len(new) - kept]
    shown = 0
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(around):
        skipped = start + group[0][1] - shown
        if skipped:
            lines.append(DiffLine("skipped", f"{skipped} lines"))
        for kind, old_start, old_end, new_start, new_end in group:
            lines += [DiffLine("same" if kind == "equal" else "removed", text) for text in old[old_start:old_end]]
            lines += [DiffLine("added", text) for text in new[new_start:new_end] if kind != "equal"]
        shown = start + group[-1][2]
    if shown and shown < count:
        lines.append(DiffLine("skipped", f"{count - shown} lines"))
    return lines


def changed_lines(lines: list[DiffLine]) -> tuple[int, int]:
    """How many lines were added, and how many removed."""
    return sum(line.kind == "added" for line in lines), sum(line.kind == "removed" for line in lines)


def compilation_phases(compilation: Compilation) -> tuple[tuple[str, float], ...]:
    """The parts of the time from the start of the capture to a callable function, without later backwards."""
    before = compilation.capture_seconds + compilation.seconds
    return (
        ("capture", compilation.capture_seconds),
        ("AOTAutograd", max(compilation.seconds - compilation.inductor_seconds, 0.0)),
        ("Inductor", compilation.inductor_seconds),
        ("guards", max(compilation.frame_seconds - before, 0.0) if compilation.frame_seconds else 0.0),
    )


def graph_phases(graph: GraphRecord) -> tuple[tuple[str, float], ...]:
    """The parts of Inductor's work on one graph."""
    known = sum(seconds for _, seconds in graph.phases)
    return (*graph.phases, ("other", max(graph.seconds - known, 0.0))) if known else ()


def total_seconds(compilation: Compilation) -> float:
    """The total time of the compilation in seconds, including a backward that was compiled later."""
    later = max(sum(graph.seconds for graph in compilation.graphs) - compilation.inductor_seconds, 0.0)
    finished = compilation.inductor_seconds or compilation.seconds
    return sum(seconds for _, seconds in compilation_phases(compilation)) + (later if finished else 0.0)


_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")


def called(compilation: Compilation) -> str:
    """The label of the user if there is one, otherwise the name of the function.

    Example:
        >>> from magi_backend.records import Compilation
        >>> called(Compilation(0, "graph 0", 1, (), (), function="torch_dynamo_resume_in_step_at_12"))
        'step, after line 12'
    """
    if not compilation.function or not compilation.label.startswith("graph "):
        return compilation.label
    found = _RESUMED.search(compilation.function)
    return f"{found[1]}, after line {found[2]}" if found else compilation.function.replace(".<locals>", "")


def short(place: str) -> str:
    """The end of a path with a line, such as ``model.py:12``."""
    return PurePath(place).name


def summary(inputs: tuple[str, ...], shown: int = 3) -> str:
    """The first inputs, and how many more there are, because parameters make the list long."""
    more = f" and {len(inputs) - shown} more" if len(inputs) > shown else ""
    return ", ".join(inputs[:shown]) + more if inputs else "none"


def state(compilation: Compilation, *, finished: bool = True) -> str:
    """How the compilation ended, in a word or two; empty if it succeeded in the first way."""
    fell_back = any(graph.fell_back for graph in compilation.graphs)
    if compilation.error or (not fell_back and any(graph.error for graph in compilation.graphs)):
        return "failed"
    if fell_back:
        return "fell back"
    if not finished:
        return "not finished"
    if any(not check.agrees for check in compilation.checks):
        return "differs from eager"
    return ""


SLOW = 30.0
"""Seconds from which on the report mentions the time of a capture."""


def capture_line(compilation: Compilation) -> str:
    """A line on how long Dynamo traced, and what helps if sizes are symbols; empty for a fast capture."""
    if compilation.capture_seconds < SLOW:
        return ""
    said = f"Dynamo traced for {compilation.capture_seconds:.0f} s before it called the backend."
    symbols = sorted({symbol for given in compilation.inputs for symbol in re.findall(r"\bs\d+\b", given)})
    if not symbols:
        return said
    return (
        f"{said} Sizes are symbols ({', '.join(symbols)}), and questions about them can take most of that, as in "
        "models that cut images into windows. Let only the batch vary: torch._dynamo.mark_dynamic(images, 0), and "
        "torch.compile(..., dynamic=False)."
    )


# The advice for a guard refers to the groups of the match by number.
_ZERO_OR_ONE = (
    "Dimension {1} of {0} is 0 or 1 in some calls, and such a size always has a graph of its own. Call with it "
    "while warming up, or pad it."
)
_ADVICE = {
    r"a value from before the graph break": (
        "The code before a graph break made this value. Mend the break, which has a note of its own."
    ),
    r"tensor '(.+?)' size mismatch at index (\d+).*mark_static": "mark_static({0}, {1}) gives each size its own graph.",
    r"_has_dynamo_dim_marking|_dynamo_\w*indices": "Mark the tensor before the first call, or in no call.",
    r"tensor '(.+?)' size mismatch at index (\d+)\. expected (?:[01],|\d+, actual [01]\b)": _ZERO_OR_ONE,
    r"^2 <= (\S+?)\.size\(\)\[(\d+)\]$": _ZERO_OR_ONE,
    r"tensor '(.+?)' size mismatch at index (\d+)": (
        "Mark the size before the first call, torch._dynamo.mark_dynamic({0}, {1}), and that of each input that "
        "shares it, and one graph serves all from 2 on. A ConstraintViolationError then names the line that needs one "
        "number, or an input without a mark. Where few sizes come back, "
        'options={{"magi.hot_sizes": 4}} also gives each of them code of its own.'
    ),
    r"tensor '(.+?)' dispatch key set mismatch.*ADInplaceOrView": (
        "{0} was made under torch.inference_mode in some calls only, or the function was called under it. Make and use "
        "the inputs in one mode, also while warming up; each mode has a graph."
    ),
    r"tensor '(.+?)' (?:stride|storage offset) mismatch": (
        "The layout of {0} differs between calls: pass {0}.contiguous(), or always the same layout."
    ),
    r"tensor '(.+?)' (?:rank mismatch|dispatch key set mismatch|dtype mismatch|device mismatch|Tensor device)": (
        "{0} comes in another form: the same number of dimensions, dtype and device in each call need one graph. Cast "
        "or reshape it before the call, {0}.to(...), or accept a graph for each form."
    ),
    r"tensor '(.+?)' (?:requires_grad mismatch|dtype|.*requires_grad)": (
        "{0} requires gradients in some calls only; each of the two gets a graph."
    ),
    r"(?:\d+ <= |== )?(\S+?)\.size\(\)\[(\d+)\]": (
        "The program asks about this size, so code for one answer does not serve the other. A size of 0 or 1 always "
        "has a graph of its own. For others, look for an if, an assert or a shape that needs the number."
    ),
    r"___check_global_state|grad_mode|GRAD_MODE|autocast|torch_function": (
        "The calls differ in what is set around them: grad mode, autocast, the default dtype or the number of threads. "
        "Call it under the same settings, or accept a graph for each."
    ),
    r"len\((.+?)\)|(.+?)\.__len__": (
        "A list or a dict has another length. Dynamo unrolls it: pass a tensor with a dimension for the items."
    ),
    r"___check_type_id\((.+?),|type\((.+?)\)": (
        "An argument has another type in this call. Pass the same types, or compile a function for each."
    ),
    r"^(\S+) is (?:not )?None": "{0} is None in some calls and not in others, and each of the two has a graph.",
    r"^(\S+) == (?:True|False)": "{0} is a bool, and each of its two values has a graph.",
    r"___check_obj_id\((.+?),|id\((.+?)\)| is ": (
        "It is another object than before, such as a function, a class or a module created again in each call. Make it "
        "once and pass it again."
    ),
    r"BACKEND_MATCH": "The same function was compiled by two backends, or with other options.",
    r"^the global (\S+) == …": (
        "{0} is a global of the program, and each of its values has a graph. Make it a Tensor, torch.tensor({0}), or "
        "an argument."
    ),
    r"^(\S+\.\S+) == …": (
        "{0} is a number, and its value is part of the code. An int on a module is open after its first change with "
        "torch._dynamo.config.allow_unspec_int_on_nn_module = True, and a float on a module without that; a float "
        "field of a record stays part of the code. An argument, or a Tensor without dimensions, is open as well."
    ),
    r"^(\S+) == …": (
        "{0} is a number, and its value is part of the code. After the first change Dynamo leaves it open, where the "
        "program permits that; a Tensor without dimensions, torch.tensor({0}), is open from the first call on."
    ),
    r"^(\S+) == '": "{0} is a string, and the code is for one of its values. Compile a function for each value.",
    r"Duplicate tensor|duplicate tensor": (
        "The same tensor is passed twice in some calls and not in others. Pass a copy, or always the same way."
    ),
}
_OTHERWISE = "TORCH_LOGS=recompiles_verbose says which guards failed, and where the program needs them."


def advice_on(found: Recompilation) -> str:
    """On how to avoid the recompilation *found*.

    Example:
        >>> from magi_backend.records import Recompilation
        >>> advice_on(Recompilation("0/0", "tensor 'x' size mismatch at index 0. expected 3, actual 5"))[:60]
        'Mark the size before the first call, torch._dynamo.mark_dyna'
    """
    advice = _OTHERWISE
    for pattern, sentences in _ADVICE.items():
        if match := re.search(pattern, found.guard):
            advice = sentences.format(*(group or "it" for group in match.groups()))
            break
    return " ".join(dict.fromkeys((advice, *map(advice_on, found.others))))


def compilation_lines(one: Compilation, *, full: bool = False) -> Iterator[Line]:
    """What to know of *one* before its tables; *full* adds what only a page has room for."""
    if slow := capture_line(one):
        yield Line(slow)
    if again := one.recompiled:
        of = f" It is a guard of compilation {again.of}." if full and again.of else ""
        yield Line(f"compiled again: {again}{of} {advice_on(again)}", "yellow")
    if one.eager:
        yield Line(str(one.eager))
    if one.anew:
        yield Line(f"compiled anew, although magi_backend.load had loaded code: {one.anew}", "yellow")
    if stopped := one.stopped:
        yield Line(" ".join((f"ends at a graph break: {stopped}", *(stopped.hints if full else ()))), "yellow")
    if one.error:
        yield Line(f"failed: {one.error}", "red")
    yield from (Line(sentence, "yellow") for sentence in one.uncut)
    yield from map(Line, one.regions)
    for graph in one.graphs:
        if graph.fell_back:
            yield Line(f"fell back: {graph.title} was {graph.fell_back}", "yellow")
        if graph.unrecorded:
            yield Line(f"no CUDA graph of {graph.title}: {graph.unrecorded}", "yellow")


def compilation_tables(one: Compilation, *, full: bool = False) -> Iterator[Table | Line]:
    """The tables about *one*; *full* adds what only a page has room for."""
    yield Table(
        "Graphs",
        ("graph", "operators", "symbols", "kernels", "library calls", "compiled in"),
        (
            (
                graph.title,
                "" if graph.cached else str(graph.nodes),
                "" if graph.cached else ", ".join(graph.symbols) or "none",
                str(len(graph.kernels)),
                ", ".join(f"{name} x{count}" for name, count in Counter(graph.externs).items()) or "none",
                f"failed: {graph.error}" if graph.error else "from a cache" if graph.cached else shown(graph.seconds),
            )
            for graph in one.graphs
        ),
    )
    yield Table(
        "Passes",
        ("graph", "pass", "ran", "why", *(["time"] if full else [])),
        (
            (graph.title, p.name, "yes" if p.ran else "no", p.reason, *([shown(p.seconds)] if full else []))
            for graph in one.graphs
            for p in graph.passes
        ),
    )
    yield Table(
        "Configuration changes",
        ("graph", "key", "before", "after"),
        ((graph.title, c.key, c.before, c.after) for graph in one.graphs for c in graph.changes),
    )
    yield Table(
        "Repairs",
        ("graph", "repair", "against", "what it does", "times"),
        (
            (graph.title, r.name, f"{r.severity}: {r.effect}", r.repair, str(r.times))
            for graph in one.graphs
            for r in graph.repairs
        ),
    )
    yield Table(
        "Checks against eager",
        ("piece", "compared", "largest difference", "agree"),
        ((c.piece, str(c.compared), f"{c.largest:.1e}", "yes" if c.agrees else "NO") for c in one.checks),
    )
    if sizes := one.sizes:
        yield Table(
            "Sizes",
            (
                *(f"{symbol} = {path}" for symbol, path in sizes.symbols),
                *("calls", "with code of its own", "has it now", "note"),
            ),
            (
                (
                    *(str(number) for _, number in use.sizes),
                    str(use.calls),
                    str(use.hits),
                    f"yes, compiled in {use.seconds:.1f} s" if use.has_code else "no",
                    use.note,
                )
                for use in sizes.uses
            ),
        )
        if sizes.forgotten:
            yield Line(f"{sizes.forgotten} more sizes are not remembered.")
        if sizes.symbolic:
            yield Line(f"Only the code for any size: {sizes.symbolic}.")
        if sizes.advice:
            yield Line(sizes.advice)
    yield Table(
        "Buckets",
        ("size", "buckets", "calls", "too large", "do not fit", "added rows", "note"),
        (
            (
                f"{use.symbol} = {use.path}",
                ", ".join(map(str, use.buckets)),
                *(str(use.calls), str(use.too_large), str(use.unfit), f"{use.wasted:.0%}", use.note),
            )
            for use in one.buckets
        ),
    )
    for each in one.recordings:
        yield Table(
            f"CUDA graphs, {each.kind}",
            ("sizes", "calls", "with a graph", "has one now", "note"),
            (
                (
                    ", ".join(f"{name}={number}" for name, number in use.sizes) or "all fixed",
                    str(use.calls),
                    str(use.hits),
                    "yes" if use.has_code else "no",
                    use.note,
                )
                for use in each.sizes.uses
            ),
        )
        if each.sizes.advice:
            yield Line(each.sizes.advice)
    yield Table("Settings", ("name", "value", "from"), (row for row in one.settings if full or row[2] != "default"))


def spread(seconds: tuple[float, ...]) -> str:
    """The median of *seconds* as text, with the smallest and the largest."""
    if not seconds:
        return "not run"
    median = statistics.median(seconds)
    return shown(median) if len(seconds) == 1 else f"{shown(median)} ({shown(min(seconds))} to {shown(max(seconds))})"


def shown(seconds: float) -> str:
    """*seconds* as text in a suitable unit."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def counted(number: int, thing: str) -> str:
    """``1 kernel``, ``2 kernels``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def as_text(report: Iterable[Line | Table], width: int) -> str:
    """*report* without colours, at most *width* columns wide."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, legacy_windows=False).print(as_renderable(report))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def as_renderable(report: Iterable[Line | Table]) -> RenderableType:
    """*report* for ``rich.print``."""
    return Group(*(part for section in report for part in _parts(section)))


def _parts(section: Line | Table) -> Iterator[RenderableType]:
    if isinstance(section, Line):
        text = Text(section.text, style=section.style)
        yield Padding(text, (0, 0, 0, section.indent)) if section.indent else text
        return
    table = RichTable(
        title=section.title, title_justify="left", title_style="italic", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in section.columns:
        table.add_column(column, overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))
    if table.row_count:
        yield table


def compilation_as_text(one: Compilation) -> Iterator[Line | Table]:
    """What a terminal shows of *one*."""
    cache = one.cache
    used = f"caches: {cache.hits} hits, {cache.misses} misses" if cache.hits or cache.misses else "caches passed by"
    where = f" ({one.place})" if one.place else ""
    facts = f"{called(one)}{where}, {counted(one.nodes, 'operator')} captured, {shown(one.seconds)}, {used}"
    yield Line(f"Compilation {one.index}: {facts}", "bold")
    yield Line(f"inputs {summary(one.inputs)}")
    yield from compilation_lines(one)
    if one.pieces:
        runs = [(piece, len(list(same))) for piece, same in itertools.groupby(one.pieces)]
        yield Line("pieces " + " | ".join(piece if times == 1 else f"{times} times {piece}" for piece, times in runs))
    for op in one.ops:
        yield from (Line(""), Line(op.text, indent=2))
    yield Line("")
    yield from compilation_tables(one)
