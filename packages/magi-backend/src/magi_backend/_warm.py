# SPDX-License-Identifier: Apache-2.0
"""What one process compiled, in a folder from which others start.

An entry is a file: a line of JSON that says what it is and what it was made for, and then its content. Its name is the
digest of both. So a file that was cut off or changed does not load, several processes may write at once, and one folder
may serve different machines.

What the code of a graph depends on, of the model, the settings, the passes and the operators, is in the keys of torch's
caches, as in every compilation. The entries of the kind "graph" choose no code: they say why a graph was not found, and
which sizes were hot.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import logging
import os
import platform
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import magi_opschema
import torch
from torch.fx import GraphModule

from . import _torch_compat
from ._passes import gradients_of
from ._records.folder import from_plain, write_whole
from ._records.log import CompilationLog
from ._settings import Request
from .errors import WarmStartError
from .records import OpUse, describe_input


logger = logging.getLogger("magi_backend")

FORMAT = 1
_NAME = re.compile(r"[0-9a-f]{64}")
_PACKAGES = ("magi_backend", "magi_opschema", "magi_passes", "magi_tritonwrap")
_OF_NO_CODE = frozenset({"report", "progress"})
"""Settings that change nothing about the code of a graph."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Entry:
    """One entry of a folder.

    Attributes:
        kind: ``"graph"``, ``"instructions"``, ``"file"`` of Inductor's folder, or a kind of torch's caches.
        name: What it is among those of its kind: a key, or a path.
        content: What it holds.
    """

    kind: str
    name: str
    content: bytes

    def packed(self) -> tuple[str, bytes]:
        """The name and the content of its file."""
        header = {"format": FORMAT, "kind": self.kind, "name": self.name, "made_for": made_for()}
        data = json.dumps(header, sort_keys=True).encode() + b"\n" + self.content
        return hashlib.sha256(data).hexdigest(), data


@dataclass(frozen=True)
class GraphFacts:
    """What decides the code of a captured graph, as far as a sentence can say it.

    Attributes:
        function: The qualified name of the function that was captured.
        place: Its file, without the folder, and first line.
        source: A digest of that file.
        graph: A digest of the operators that were captured.
        inputs: Shape and dtype of each input.
        ops: A digest of each registered operator in the graph.
        settings: Each setting of ours, and each of torch's that does not have its default value, as text.
    """

    function: str
    place: str
    source: str
    graph: str
    inputs: tuple[str, ...]
    ops: Mapping[str, str]
    settings: Mapping[str, str]

    def differences(self, then: GraphFacts) -> list[str]:
        """How this graph differs from an earlier one, in words."""
        said = [
            f"{name} was {then.settings.get(name, 'not set')} and is {self.settings.get(name, 'not set')}"
            for name in sorted({*self.settings, *then.settings})
            if self.settings.get(name) != then.settings.get(name)
        ]
        said += [f"the operator {name} has changed" for name in self.ops if self.ops[name] != then.ops.get(name)]
        if self.inputs != then.inputs:
            said.append(f"its inputs were {', '.join(then.inputs)} and are {', '.join(self.inputs)}")
        elif self.graph != then.graph and self.source == then.source:
            said.append("what it calls or reads has changed, so that other operators were captured")
        if self.source != then.source:
            said.append(f"the source has changed: {self.place}")
        return said


@dataclass(eq=False)
class WarmStart:
    """What was loaded from a folder, and what became of the compilations since; ``print`` shows it.

    Attributes:
        folder: The folder.
        loaded: The kind and the name of each entry that was loaded.
        refused: A sentence for each file that was not, which begins with its name.
        found: The functions whose graphs were found in the caches since then.
        compiled: A sentence for each graph that was compiled anew since then, with the reason.
    """

    folder: Path
    loaded: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    found: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        graphs = sum(name.startswith("graph ") for name in self.loaded)
        first = f"warm start from {self.folder}: {len(self.loaded)} entries loaded, {graphs} of them graphs"
        lines = [first, *(f"refused {sentence}" for sentence in self.refused)]
        lines += [f"found {name}" for name in self.found]
        return "\n".join([*lines, *(f"compiled anew {sentence}" for sentence in self.compiled)])


class _Known:
    """What this process has compiled and loaded. Compilations, `save` and `load` use it under the lock of Dynamo."""

    def __init__(self) -> None:
        self.compiled: dict[str, weakref.WeakSet[CompilationLog]] = {}
        """The logs of the compilations of each graph, by its facts as text."""
        self.hot: dict[str, set[tuple[int, ...]]] = {}
        """The sizes that had code of their own in an earlier process, by the facts of the graph."""
        self.starts: list[WarmStart] = []


_known = _Known()


@functools.cache
def made_for() -> dict[str, str]:
    """What compiled code depends on, of the machine and what is installed, each with a title for sentences.

    torch's keys have most of it for most entries, but not for the libraries that a C++ compiler makes for just this
    processor. Here it is the same for all, so that a sentence can say it.
    """
    driver = Path("/proc/driver/nvidia/version")
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""  # elsewhere than on Linux
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", processor, re.MULTILINE)
    cards = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "Triton": str(importlib.import_module("triton").__version__),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "the system": " ".join((platform.system(), platform.machine(), *platform.libc_ver())),
        "a processor with": " ".join(sorted(flags[1].split())) if flags else platform.processor(),
        "the cards": ", ".join(sorted(set(cards))) or "none",
        "the driver": driver.read_text().splitlines()[0] if driver.exists() else "none",
        "the toolkit": str(torch.version.cuda or torch.version.hip),
        "magi packages with the digest": _digest_of_packages(),
    }


def _digest_of_packages() -> str:
    found = hashlib.sha256()
    for name in _PACKAGES:
        folder = Path(inspect.getfile(importlib.import_module(name))).parent
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{name} {path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _unlike(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Why code that was made for *then* does not serve *now*; empty if it does."""
    for title in {**then, **now}:
        was, here = then.get(title, "unknown"), now.get(title, "unknown")
        if was == here:
            continue
        if title == "a processor with":
            lacks, has = (set(a.split()) - set(b.split()) for a, b in ((was, here), (here, was)))
            more = f"made for a processor with {' '.join(sorted(lacks))}, which this one lacks" if lacks else ""
            return more or f"made for a processor without {' '.join(sorted(has))}, which this one has"
        return f"made for {title} {was}, and here it is {here}"
    return ""


def unpacked(name: str, data: bytes) -> Entry:
    """The entry in a file.

    Raises:
        ValueError: It is not what `Entry.packed` made, or not for this machine. The message says why.
    """
    if name.endswith(".part"):
        raise ValueError("it is being written, or its writer was killed")
    if not _NAME.fullmatch(name):
        raise ValueError("it is not a file of magi_backend.save")
    if hashlib.sha256(data).hexdigest() != name:
        raise ValueError("it was cut off or changed after it was written: its digest is not its name")
    header, _, content = data.partition(b"\n")
    try:
        told = json.loads(header)
    except ValueError as error:
        raise ValueError("it has no header of magi_backend.save") from error
    if told["format"] != FORMAT:
        raise ValueError(f"its format is {told['format']}, and this release reads {FORMAT}")
    if unlike := _unlike(told["made_for"], made_for()):
        raise ValueError(unlike)
    return Entry(told["kind"], told["name"], content)


def save(folder: str | os.PathLike[str]) -> int:
    """Write what this process has compiled, or has found in caches, to *folder*, for `load` in another process.

    Call it after a warm-up: all that was compiled for this process is saved, of every model, with the kernels, the
    choices of ``magi.tune``, and the hot sizes. Entries that are there already stay; several processes may save to one
    folder at once.

    Args:
        folder: It is made if it does not exist, for its owner only. It will hold code that `load` runs.

    Returns:
        The number of entries that this process has.

    Raises:
        WarmStartError: Nothing was compiled, or torch's caches took none of it; or the folder cannot be written to.

    Example:
        >>> import tempfile, torch
        >>> y = torch.compile(torch.sin, backend="magi")(torch.ones(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder) > 0
        True
    """
    place = Path(folder)
    with _torch_compat.state.compile_lock():
        entries = list(_entries())
    if not any(entry.kind == "graph" for entry in entries):
        msg = f"save({str(place)!r}): this process has compiled no graph. Call the compiled model first, then save."
        raise WarmStartError(msg)
    if all(entry.kind in ("graph", "instructions") for entry in entries):
        raise WarmStartError(
            f"save({str(place)!r}): torch's caches have taken none of the graphs of this process, so nothing can be "
            "saved. They are off (force_disable_caches, fx_graph_cache), or every graph calls what has no cache key."
        )
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in entries:
            name, data = entry.packed()
            write_whole(place / name, data)
    except OSError as error:
        msg = f"save({str(place)!r}): it cannot be written to: {error}. Give a folder that this user may write to."
        raise WarmStartError(msg) from error
    return len(entries)


def _entries() -> Iterator[Entry]:
    for kind, key, content in _torch_compat.compiling.cache_entries():
        yield Entry(kind, key, content)
    for path in _files():
        yield Entry("file", str(path.relative_to(_cache())), path.read_bytes())
    if sets := _torch_compat.compiling.vector_instructions():
        yield Entry("instructions", " ".join(sets), json.dumps(sets).encode())
    for text, logs in _known.compiled.items():
        outcomes = [log.counts["sizes"]() for log in logs if "sizes" in log.counts]
        hot = {tuple(n for _, n in use.sizes) for each in outcomes for use in each.uses if use.has_code}
        facts = json.loads(text)
        yield Entry("graph", facts["function"], json.dumps({"facts": facts, "hot": sorted(hot)}).encode())


def _cache() -> Path:
    return Path(_torch_compat.compiling.inductor_cache()).resolve()


def _files() -> Iterator[Path]:
    """What this process uses of Inductor's folder besides torch's entries: libraries, and choices of ``magi.tune``."""
    cache, maps = _cache(), Path("/proc/self/maps")
    if maps.exists():
        lines = maps.read_text().splitlines()
        mapped = {path for line in lines if "/" in line and (path := Path(line.split(maxsplit=5)[5])).exists()}
        yield from sorted(path for path in mapped if path.is_relative_to(cache))
    else:  # elsewhere than on Linux; these may be of other processes
        yield from sorted(cache.rglob("*.so"))
    yield from sorted((cache / "magi_passes").glob("*.json"))


def load(folder: str | os.PathLike[str]) -> WarmStart:
    """Put what `save` wrote to *folder* into the caches of this process, where compilations find it.

    Call it before the first call of a compiled model, in the process that compiles, since it asks the driver for the
    cards. Nothing else changes: Dynamo captures each function again and guards it, and code is used if its key is that
    of the captured graph. An entry that was made for another torch, Triton, Python, system, processor, card, driver or
    release of these packages is refused, and so is a file that was cut off, changed, or written by something else. A
    graph that is compiled anew is logged as a warning, with the reason.

    Loading runs code: load only what you have made, from a folder that only you can write to.

    Args:
        folder: A folder of `save`. It may be read-only. If there is none yet, nothing is loaded, with a warning.

    Returns:
        What was loaded and what was refused. It grows with the compilations that follow.

    Raises:
        WarmStartError: *folder* is a file.
    """
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise WarmStartError(f"load({str(place)!r}): it is a file. Give the folder that magi_backend.save has written.")
    paths = sorted(place.iterdir()) if place.exists() else []
    if not paths:
        logger.warning("load: %s has no entries yet, so everything is compiled. magi_backend.save writes them.", place)
    loaded, refused = list[str](), list[str]()
    with _torch_compat.state.compile_lock():
        for path in paths:
            try:
                entry = unpacked(path.name, path.read_bytes())
                _put(entry)
                loaded.append(f"{entry.kind} {entry.name}")
            except FileNotFoundError:
                continue  # a writer has renamed it
            except (OSError, ValueError) as error:
                refused.append(f"{path.name}: {error}")
    for sentence in refused:
        logger.warning("load: %s refused: %s", place, sentence)
    start = WarmStart(place, tuple(loaded), tuple(refused))
    _known.starts.append(start)
    return start


def _put(entry: Entry) -> None:
    if entry.kind == "graph":
        saved = json.loads(entry.content)
        _known.hot.setdefault(_text(saved["facts"]), set()).update(map(tuple, saved["hot"]))
    elif entry.kind == "instructions":
        _torch_compat.compiling.take_vector_instructions(json.loads(entry.content))
    elif entry.kind == "file":
        path = (_cache() / entry.name).resolve()
        if not path.is_relative_to(_cache()):
            raise ValueError(f"it names {entry.name}, which is outside of the folder of the caches")
        if not path.exists():  # a library may be in use
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, entry.content)
    else:
        _torch_compat.compiling.put_cache_entry(entry.kind, entry.name, entry.content)


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True)


@contextlib.contextmanager
def noted(facts: GraphFacts | None, log: CompilationLog) -> Iterator[frozenset[tuple[int, ...]]]:
    """A context for the compilation of a graph that notes it for `save`; its value are sizes that were hot earlier.

    If something was loaded and the graph is compiled anew, the reason is logged and goes into the record. Without
    *facts*, nothing is noted.
    """
    if facts is None:
        yield frozenset()
        return
    text = _text(asdict(facts))
    hot = frozenset(_known.hot.get(text, ()))
    before = _torch_compat.compiling.cache_counts()
    yield hot
    hits, misses, _ = (now - then for now, then in zip(_torch_compat.compiling.cache_counts(), before, strict=True))
    _known.compiled.setdefault(text, weakref.WeakSet()).add(log)
    starts = _known.starts
    if not starts:
        return
    if hits and not misses:  # what passes the caches by then was compiled to measure something
        starts[-1].found.append(facts.function)
        return
    passed_by = "torch's caches do not take it, so each process compiles it"
    reason = passed_by if not misses else _why_anew(facts, _known.hot, sum(len(start.refused) for start in starts))
    starts[-1].compiled.append(f"{facts.function}: {reason}")
    log.update(anew=reason)
    logger.warning("%s (%s) was compiled anew: %s", log.label, facts.function, reason)


def _why_anew(now: GraphFacts, earlier: Iterable[str], refused: int) -> str:
    """Why *now* was not among the graphs *earlier*, whose facts are texts, when *refused* files were."""
    loaded = (from_plain(GraphFacts, json.loads(each)) for each in earlier)
    same = [now.differences(then) for then in loaded if then.function == now.function]
    but = f" ({refused} files were refused)" if refused else ""
    if not same:
        return f"no graph of this function was loaded{but}"
    if said := min(same, key=len):
        return "; ".join(said)
    return (
        f"its code was not among what was loaded{but}"
        if refused
        else "the code of an operator, a gradient or a pass has changed, or what it calls or reads"
    )


def graph_facts(gm: GraphModule, request: Request, ops: Iterable[OpUse]) -> GraphFacts:
    """The facts of *gm*, which Dynamo captures now on this thread."""
    frame = _torch_compat.frames.captured_frame()
    file = Path(frame.place.rpartition(":")[0])
    texts = (part.code for part in gm.modules() if isinstance(part, GraphModule))
    settings: dict[str, object] = {
        f"magi.{name}": value for name, value in request.config.items() if name not in _OF_NO_CODE
    }
    settings |= {**request.inductor, **_torch_compat.compiling.changed_configs(), "threads": torch.get_num_threads()}
    state = vars(_torch_compat.state.CompileState.now())
    settings |= {f"mode {name}": value for name, value in state.items() if name != "configs"}
    return GraphFacts(
        function=frame.function,
        place=Path(frame.place).name,
        source=_digest(file.read_bytes()) if file.is_file() else "",
        graph=_digest("\0".join(texts).encode()),
        inputs=tuple(_input(node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder")),
        ops={op.name: _digest(_source(op.name).encode()) for op in ops},
        settings={name: _value(value) for name, value in settings.items()},
    )


def _input(value: object) -> str:
    """*value*, an input of a captured graph, as text: shape, dtype, and what of it is not as it is most often."""
    parts = [describe_input(value)]
    if isinstance(value, torch.Tensor):
        parts += [] if value.device.type == "cpu" else [str(value.device)]
        parts += [] if value.is_contiguous() else [f"with strides {tuple(map(str, value.stride()))}"]
        parts += ["that requires grad"] if value.requires_grad else []
    return " ".join(parts)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _source(op: str) -> str:
    """The source of what a user wrote for the operator *op*."""
    definition = magi_opschema.op_def(op)
    texts = []
    for function in (definition.fn, *gradients_of(definition)):
        with contextlib.suppress(OSError, TypeError):  # typed into an interpreter, or no function
            texts.append(inspect.getsource(function))
    return "".join(texts)


def _value(value: object) -> str:
    """*value* as text that is the same in another process; a pass is its uuid."""
    uuid = getattr(value, "uuid", None)
    return str(uuid()) if callable(uuid) and not isinstance(value, type) else _ADDRESS.sub("", repr(value))
