# SPDX-License-Identifier: Apache-2.0
"""What is known of a compilation: plain data, from which every report is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OpUse:
    """A registered operator in a graph.

    Attributes:
        name: ``namespace::op``.
        path: The path of the operator's signature: "direct", "lowered" or "flattened".
        calls: How many nodes call it.
        description: Signature, schema, mapping tree and notes, as ``print(op_def(op))`` shows them.
        boundary: Whether graphs are split at it.
        compute_sensitive: Whether its outputs are saved rather than recomputed.
        stays: Whether compiled code calls the operator itself, so that nothing of its body is in a graph.
        floats: Paths of the float parameters and fields, each of which is a constant of a graph.
    """

    name: str
    path: str
    calls: int
    description: str
    boundary: bool = False
    compute_sensitive: bool = False
    stays: bool = False
    floats: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The lines of a report about the operator."""
        kept = ", of the operator itself: nothing of its body is in the compiled code" if self.stays else ""
        lines = [self.description, f"calls      {self.calls}{kept}"]
        if self.floats:
            way_out = "compiles a graph of its own; a Tensor without dimensions varies within one graph"
            lines.append(f"floats     {', '.join(self.floats)}: each value {way_out}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ConfigChange:
    """An Inductor key that a pass changed for one graph; ``repr`` of both values."""

    key: str
    before: str
    after: str


@dataclass(frozen=True)
class PassOutcome:
    """One graph pass, asked about one graph: whether it ran and why, and what it changed."""

    name: str
    ran: bool
    reason: str
    changes: tuple[ConfigChange, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class RepairOutcome:
    """A repair of a known defect of torch that changed something in one graph."""

    name: str
    severity: str
    effect: str
    repair: str
    times: int


@dataclass(frozen=True)
class GraphChange:
    """What one pass did to a graph.

    Attributes:
        name: The pass.
        before: The graph as text.
        after: The graph as text after the pass returned.
    """

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class KernelRun:
    """What ``magi.profile`` measured of one kernel of a graph.

    Attributes:
        name: The kernel.
        calls: How often it ran in one call of the graph.
        seconds: Time on the device, of one call of the kernel.
        bytes: Bytes of the tensors that it was given, each counted once.
        share: Bytes a second over the bytes that the device copies in a second; 0 if that is not known.
    """

    name: str
    calls: int
    seconds: float
    bytes: int
    share: float


@dataclass(frozen=True)
class FallBack:
    """Why a graph was compiled without our passes, options and repairs.

    *error* was raised with them, and *passes* had run by then or raised it.
    """

    error: str
    passes: tuple[str, ...]

    def __str__(self) -> str:
        error, passes = self.error.partition("\n")[0], ", ".join(self.passes) or "none"
        return (
            f"compiled once more without the passes, options and repairs of magi. With them: {error} (passes: {passes})"
        )


@dataclass(frozen=True)
class GraphRecord:
    """One graph of ATen operators that Inductor compiled.

    Attributes:
        kind: "inference", "forward" or "backward".
        nodes: Number of operator calls.
        symbols: The symbolic sizes among the inputs, for example ``("s27", "s53")``; empty if all are fixed.
        passes: Each pass that was asked.
        repairs: Each repair of torch that changed something.
        kernels: Names of the kernels that Inductor generated.
        externs: Names of the library functions that the generated code calls.
        seconds: Time to compile.
        piece: Which piece of a split graph it belongs to; empty when it was not split.
        error: The message of the exception that ended the compilation, or empty.
        given: The graph as text as Inductor got it; empty if it was not kept.
        changed: The change of each pass that changed the graph, or the joint graph.
        lowered: The graph as text as it was lowered, after all passes.
        code: The generated code.
        phases: The parts of Inductor's work, with the seconds of each.
        runs: What ``magi.profile`` measured.
        cached: Whether it came from AOTAutograd's cache; then only the code is known of it.
        fell_back: Why it was compiled without our passes, options and repairs; None if it was not.
        unrecorded: Why no CUDA graph can be recorded of it; empty if one can, or if none was asked for.
    """

    kind: str
    nodes: int
    symbols: tuple[str, ...]
    passes: tuple[PassOutcome, ...]
    repairs: tuple[RepairOutcome, ...]
    kernels: tuple[str, ...]
    externs: tuple[str, ...]
    seconds: float
    piece: str = ""
    error: str = ""
    given: str = ""
    changed: tuple[GraphChange, ...] = ()
    lowered: str = ""
    code: str = ""
    phases: tuple[tuple[str, float], ...] = ()
    runs: tuple[KernelRun, ...] = ()
    cached: bool = False
    fell_back: FallBack | None = None
    unrecorded: str = ""

    @property
    def title(self) -> str:
        """The piece and the kind."""
        return f"{self.piece} {self.kind}".strip()

    @property
    def changes(self) -> tuple[ConfigChange, ...]:
        """What the passes changed in Inductor's configuration for this graph."""
        return tuple(change for outcome in self.passes for change in outcome.changes)


@dataclass(frozen=True)
class CacheUse:
    """How often one compilation hit, missed or bypassed Inductor's and AOTAutograd's caches."""

    hits: int = 0
    misses: int = 0
    bypasses: int = 0


@dataclass(frozen=True)
class CheckOutcome:
    """The first call of one compiled piece against eager, under ``magi.check``.

    Attributes:
        piece: Name of the piece.
        compared: How many outputs, written inputs and gradients.
        largest: The largest absolute difference among them.
        agrees: Whether all are within the tolerance of their dtype.
    """

    piece: str
    compared: int
    largest: float
    agrees: bool


@dataclass(frozen=True)
class SizeUse:
    """One size that a graph was called with.

    Attributes:
        sizes: Each symbol and its value.
        calls: Calls with this size.
        hits: Those that ran code of its own.
        has_code: Whether it has code of its own now.
        seconds: Time to compile that.
        note: Whether it was named by the user, how often it was made, or why it could not be made; often empty.
    """

    sizes: tuple[tuple[str, int], ...]
    calls: int
    hits: int
    has_code: bool
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class SizesOutcome:
    """The sizes that one captured graph with symbols was called with.

    Attributes:
        symbols: Each symbol and the argument it comes from, for example ``("s27", "x.size()[0]")``.
        uses: The sizes that are remembered, those with most calls first.
        calls: All calls.
        hits: Those that ran code for their size.
        forgotten: How many other sizes there were, which are not remembered.
        symbolic: Why no more code for single sizes is made, or empty.
        advice: What to set if a size that comes back runs the code for any size, or empty.
    """

    symbols: tuple[tuple[str, str], ...]
    uses: tuple[SizeUse, ...]
    calls: int
    hits: int
    forgotten: int = 0
    symbolic: str = ""
    advice: str = ""


@dataclass(frozen=True)
class BucketUse:
    """A size that is padded with ``magi.buckets``.

    Attributes:
        path: The dimension that was named, for example ``x.shape[0]``.
        symbol: Its symbol.
        buckets: The sizes that it is padded to.
        calls: All calls.
        rows: The sum of the sizes in these calls.
        run: The sum of the sizes that ran.
        too_large: The calls with a size above the largest bucket, which ran as they were.
        unfit: The calls that ran as they were because the code does not hold for the bucket.
        note: Why no call is padded, or empty.
    """

    path: str
    symbol: str
    buckets: tuple[int, ...]
    calls: int
    rows: int
    run: int
    too_large: int = 0
    unfit: int = 0
    note: str = ""

    @property
    def wasted(self) -> float:
        """The share of the rows that were added."""
        return 1 - self.rows / self.run if self.run else 0.0


@dataclass(frozen=True)
class RecordingOutcome:
    """The CUDA graphs of one captured graph with ``magi.graphs``.

    Attributes:
        kind: "forward" for an inference too, or "backward".
        recorded: How many were recorded, with those that were dropped.
        sizes: The sizes of the calls; a hit is a call with a graph.
    """

    kind: str
    recorded: int
    sizes: SizesOutcome


@dataclass(frozen=True)
class EagerOutcome:
    """What ``magi.first_call="eager"`` did for one captured graph.

    Attributes:
        calls: How many calls eager has answered.
        note: Why it answers still, or why it answered none; empty when code answers.
    """

    calls: int
    note: str = ""

    def __str__(self) -> str:
        answered = f"eager answered {self.calls} {'call' if self.calls == 1 else 'calls'}"
        return f"{answered}: {self.note}" if self.note else answered


@dataclass(frozen=True)
class GraphBreak:
    """Where and why Dynamo stopped, ran a line in Python, and captured the rest as another graph.

    Attributes:
        place: ``model.py:12``, with the whole path.
        function: What the line is in.
        reason: One line.
        hints: What torch advises.
    """

    place: str
    function: str
    reason: str
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.place}, in {self.function}: {self.reason}" if self.function else f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class Recompilation:
    """Why existing code could not be used, so that the function was captured again.

    Attributes:
        of: Dynamo's number of that compilation, such as ``0/0``.
        guard: The guard that failed, without the values that it compares.
        place: The line of the program that needs the guard, or empty.
        others: The same of earlier graphs that failed for another reason.
    """

    of: str
    guard: str
    place: str = ""
    others: tuple[Recompilation, ...] = ()

    def __str__(self) -> str:
        said = f"{self.guard}." + (f" It is needed at {self.place}." if self.place else "")
        return " ".join((said, *(f"Nor does graph {other.of} fit: {other}" for other in self.others)))


@dataclass(frozen=True)
class Compilation:
    """One graph that Dynamo captured and gave to the backend.

    Attributes:
        index: Position among the compilations of a report.
        label: ``model_tag`` or the name of what was compiled.
        nodes: Number of operator calls that Dynamo captured.
        inputs: Shape and dtype of each input, for example ``"float32[1, 4, s0, s1]"``.
        ops: Registered operators in the graph.
        graphs: The graphs of ATen operators that it became; a backward is added when it is compiled.
        checks: What ``magi.check`` compared, once the pieces were called.
        pieces: Names of the pieces and boundary operators in order, when the graph was split.
        uncut: A sentence for each boundary operator at which the graph could not be split.
        regions: A sentence for each class of block that repeats in the graph: compiled once, or why not.
        settings: Dotted name, value and origin of each setting.
        cache: Use of the caches.
        sizes: The sizes of its calls; None if no input is a size, or if they are not counted.
        eager: The calls that eager answered; None without ``magi.first_call="eager"``.
        buckets: The sizes that are padded, with ``magi.buckets``.
        recordings: The CUDA graphs that were recorded of its code, and for which sizes, with ``magi.graphs``.
        seconds: Time from the call of the backend to its return, or of the work on another thread; a backward compiled
            later is not in it.
        capture_seconds: Time that Dynamo traced before it called the backend; 0 if torch does not report it.
        error: The message of the exception that ended the compilation, or empty.
        compile_id: Dynamo's number of the compilation, such as ``0/1``; empty if Dynamo did not start it.
        function: The qualified name of the function that was captured.
        place: Its file and first line.
        captured: The captured graph as text; empty if it was not kept.
        recompiled: Why it was captured again; None at the first time.
        stopped: The graph break at which the capture ended; None if it reached the end of the function.
        inductor_seconds: The part of *seconds* in which Inductor compiled graphs; the rest is AOTAutograd's and ours.
        frame_seconds: Time from the start of the capture until the guards were built; 0 until then.
        report_seconds: Time that this record took, to write graphs as text and to write files.
        anew: Why its code was not among what `magi_backend.load` had loaded; empty if it was, or if nothing was loaded.
    """

    index: int
    label: str
    nodes: int
    inputs: tuple[str, ...]
    ops: tuple[OpUse, ...]
    graphs: tuple[GraphRecord, ...] = ()
    checks: tuple[CheckOutcome, ...] = ()
    pieces: tuple[str, ...] = ()
    uncut: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    cache: CacheUse = field(default_factory=CacheUse)
    sizes: SizesOutcome | None = None
    eager: EagerOutcome | None = None
    buckets: tuple[BucketUse, ...] = ()
    recordings: tuple[RecordingOutcome, ...] = ()
    seconds: float = 0.0
    capture_seconds: float = 0.0
    error: str = ""
    compile_id: str = ""
    function: str = ""
    place: str = ""
    captured: str = ""
    recompiled: Recompilation | None = None
    stopped: GraphBreak | None = None
    inductor_seconds: float = 0.0
    frame_seconds: float = 0.0
    report_seconds: float = 0.0
    anew: str = ""


def describe_input(value: Any) -> str:
    """``float32[1, 4, s0, s1]`` for a tensor, its ``str`` for anything else."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())  # a DeviceMesh has a shape
    if dtype is None:
        return str(value)
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(str(size) for size in shape)}]"
