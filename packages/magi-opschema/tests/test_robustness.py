# SPDX-License-Identifier: Apache-2.0
"""Hostile names, values and lives of a process: a fuzz of generated code, threads, reloads, shutdown, memory.

The fuzz makes signatures whose every name and text tries to be something else in generated code, and asks that the
body gets exactly what was passed. `fuzz.json` is its report: the outcome of each of 2,000 cases. The first of them are
run in every suite, all of them by `nox -s full`, and `pytest --accept -m slow` writes the report anew.
"""

from __future__ import annotations

import ctypes
import enum
import gc
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from magi_opschema import errors, magi_register_custom_op, op_def
from torch import Tensor


X = torch.arange(3.0)
REPORT = Path(__file__).with_name("fuzz.json")

WORDS = [
    *(
        "_m_",
        "_m_torch_op",
        "_m_output",
        "_m_dispatch",
        "_m_fn",
        "_m_check",
        "_m_translate_error",
        "_m_error",
        "_m_new",
    ),
    *("__m_x", "torch_op", "dispatch", "fn", "check", "output", "item", "there", "key", "part", "pair", "values"),
    *("self", "cls", "args", "kwargs", "ctx", "x", "is_some", "present", "Ellipsis", "NoneType", "Tensor", "inf"),
    *("len", "type", "isinstance", "tuple", "object", "print", "RuntimeError", "__import__", "__build_class__"),
    *("__class__", "__dict__", "__doc__", "__eq__x", "__hash__x", "__call__", "__slots__x", "match", "case", "_"),
    *("größe", "ﬁ", "名前", "µ", "ñ_ñ", "a__b", "a", "b", "__", "a_", "packed_float", "packed_Tensor_present"),
]
TEXTS = [
    *("", '"', "'", '"""', "'''", "\\", "\\n", "\n", "\r\n", "\0", "{x}", "{value}", "%s", "${x}", "#", "\u2028"),
    *("); import os; (", "None", "\N{SNOWMAN}", "é" * 3, "x" * 10_000, "\\" * 999 + '"', '"\n' * 5_000),
]
NUMBERS = [0, -0.0, 5e-324, float("inf"), float("nan"), 2**63 - 1, -(2**63), 1e308]


class Trap:
    """A value whose every answer is an exception."""

    def _trap(self, *_: Any) -> Any:
        raise AssertionError("a hostile value was asked")

    __repr__ = __str__ = __eq__ = __ne__ = __bool__ = __iter__ = __len__ = __format__ = _trap
    __getattr__ = __index__ = __float__ = __contains__ = __lt__ = _trap

    def __hash__(self) -> int:
        self._trap()
        return 0


class Kind(enum.Enum):
    """Values that are texts of code."""

    A = '"'
    B = "_m_output = None\n"
    C = "x" * 1000


def hostile_methods() -> dict[str, Any]:
    """Of a record: what it says of itself is an exception, and it is never asked."""
    trap = Trap._trap
    return {"__repr__": trap, "__eq__": trap, "__hash__": trap, "__bool__": trap, "__len__": trap}


@dataclass
class Fuzz:
    """One random source of signatures and values."""

    chance: random.Random
    names: list[str] = field(default_factory=list)

    def text(self) -> str:
        return self.chance.choice(TEXTS) + self.chance.choice(TEXTS[:16])

    def name(self, taken: set[str], of_field: bool = False) -> str:
        """A word that Python takes as a parameter or field, in the form in which Python itself writes it."""
        while True:
            word = unicodedata.normalize("NFKC", self.chance.choice(WORDS))
            # dataclasses take what a class has already, such as __doc__, for the default of a field.
            if word not in taken and not (of_field and (hasattr(type, word) or word in {"__dict__", "__slots__"})):
                taken.add(word)
                return word

    def leaf(self) -> tuple[Any, Any]:
        chance = self.chance
        text, other = self.text(), self.text()
        return chance.choice([
            (str, text),
            (str | None, chance.choice([None, text])),
            (list[str], [text, other]),
            (float, float(chance.choice(NUMBERS))),
            (int, chance.choice([0, 2**63 - 1, -(2**63)])),
            (bool, chance.choice([True, False])),
            (complex, complex(chance.choice([0.0, 1e308]), -0.0)),
            (Literal[text, other, 1], chance.choice([text, 1])),
            (Literal[text, f"{text}'"], text),
            (Kind, chance.choice(list(Kind))),
            (tuple[Kind, ...], (Kind.A, Kind.C)),
            (Tensor, X + 1),
            (Tensor | None, chance.choice([None, X])),
            (list[Tensor | None], [None, X]),
        ])  # fmt: skip

    def tree(self, depth: int) -> tuple[Any, Any]:
        if depth == 0 or self.chance.random() < 0.3:
            return self.leaf()
        taken: set[str] = set()
        parts = [(self.name(taken, of_field=True), self.tree(depth - 1)) for _ in range(self.chance.randint(0, 5))]
        fields = [(name, annotation) for name, (annotation, _) in parts]
        # Python mangles __name in the __slots__ of a class.
        slots = self.chance.random() < 0.3 and not any(name.startswith("__") for name, _ in fields)
        named = self.name(set(), of_field=True)
        methods = hostile_methods()
        cls = make_dataclass(named, fields, frozen=True, eq=False, repr=False, slots=slots, namespace=methods)
        value = cls(*[value for _, (_, value) in parts])
        if self.chance.random() < 0.3:
            return cls | None, self.chance.choice([None, value])
        return cls, value

    def signature(self) -> tuple[list[str], list[Any], list[Any]]:
        taken = {"first_"}
        parts = [(self.name(taken), self.tree(3)) for _ in range(self.chance.randint(1, 4))]
        names = [name for name, _ in parts]
        return names, [annotation for _, (annotation, _) in parts], [value for _, (_, value) in parts]


def identical(left: Any, right: Any) -> bool:
    """Equal without asking either; nan is nan, and -0.0 is not 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(identical, left, right))
    if hasattr(type(left), "__dataclass_fields__"):
        return all(identical(getattr(left, name), getattr(right, name)) for name in type(left).__dataclass_fields__)
    return bool(left == right)


def make_body(names: list[str], annotations: list[Any], values: list[Any], seen: list[Any]) -> Callable[..., Any]:
    """A function of these parameters, the values as defaults."""
    listed = ", ".join(names)
    keeper = next(name for name in map("keep{}".format, itertools.count()) if name not in names)
    namespace: dict[str, Any] = {keeper: seen}
    exec(f"def body(first_, {listed}):\n    {keeper}.append([{listed}])\n    return first_ * 2\n", namespace)
    body: Callable[..., Any] = namespace["body"]
    body.__annotations__ = {"first_": Tensor, **dict(zip(names, annotations, strict=True)), "return": Tensor}
    body.__defaults__ = tuple(values)
    return body


def run_case(number: int, ns: str) -> str:
    """What became of one case: `refused` where two names make one flat name, else `right`."""
    names, annotations, values = Fuzz(random.Random(number)).signature()
    seen: list[Any] = []
    try:
        op = magi_register_custom_op(f"{ns}::op{number}", infer_output_meta_fn=["first_"])(
            make_body(names, annotations, values, seen)
        )
    except errors.SignatureError as error:
        if any("have the same flat name" not in problem.sentence for problem in error.problems):
            raise
        return "refused"
    for args, kwargs in (((X, *values), {}), ((), {"first_": X, **dict(zip(names, values, strict=True))}), ((X,), {})):
        assert torch.equal(op(*args, **kwargs), X * 2), number
        assert all(map(identical, seen.pop(), values)), (number, names)
    trapped = random.Random(number).randrange(len(values))
    # The dispatcher asks a value whether it is a number; what the value answers then is its own.
    with pytest.raises((TypeError, ValueError, RuntimeError, AssertionError)):
        op(X, *values[:trapped], Trap(), *values[trapped + 1 :])
    assert not seen
    source = getattr(op, "__source__", "")
    assert source.isascii() or not all(name.isascii() for name in names + field_names(annotations))
    assert len(source) < 100_000
    return "right"


def field_names(annotations: list[Any]) -> list[str]:
    found: list[str] = []
    for annotation in annotations:
        for cls in (annotation, *getattr(annotation, "__args__", ())):
            if hasattr(cls, "__dataclass_fields__"):
                found += [cls.__name__, *cls.__dataclass_fields__]
                found += field_names([part.type for part in cls.__dataclass_fields__.values()])
    return found


def report(cases: int, ns: str) -> dict[str, Any]:
    """What became of the cases with the seeds 0 to *cases*: `.` is right, `r` refused for a clash of names."""
    outcomes, failures = [], {}
    for seed in range(cases):
        try:
            outcomes.append("." if run_case(seed, ns) == "right" else "r")
        except Exception as error:  # noqa: BLE001 (every failing seed is to be named)
            outcomes.append("F")
            failures[str(seed)] = f"{type(error).__name__}: {error}"
    text = "".join(outcomes)
    return {
        "cases": cases,
        "right": text.count("."),
        "refused": text.count("r"),
        "failures": failures,
        "outcomes": textwrap.wrap(text, 100),
    }


@pytest.mark.parametrize("cases", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_fuzz_of_generated_code(ns: str, cases: int, request: pytest.FixtureRequest) -> None:
    found = report(cases, ns)
    assert found["failures"] == {}
    if cases == 2000 and request.config.getoption("--accept"):
        REPORT.write_text(json.dumps(found, indent=1) + "\n")
    published = json.loads(REPORT.read_text())
    assert (published["cases"], published["failures"]) == (2000, {})
    assert published["right"] + published["refused"] == 2000
    assert published["right"] > 2000 * 0.7
    assert "".join(published["outcomes"]).startswith("".join(found["outcomes"]))


def test_32_threads_register_and_call(ns: str) -> None:
    """Each its own op, all one shared op, and all the same new name, of which one thread gets it."""

    @dataclass(frozen=True)
    class Config:
        factor: float

    def make(name: str) -> Callable[[Tensor, Config], Tensor]:
        @magi_register_custom_op(name, infer_output_meta_fn=["x"], backward_fn=lambda ctx, grad: (grad * 5, None))
        def scale(x: Tensor, cfg: Config) -> Tensor:
            return x * cfg.factor

        return scale

    shared = make(f"{ns}::shared")
    failures: list[BaseException] = []
    winners: list[int] = []
    start = threading.Barrier(32)

    def work(number: int) -> None:
        try:
            start.wait()
            try:
                make(f"{ns}::contested")
                winners.append(number)
            except errors.DuplicateOpError:
                pass
            own = make(f"{ns}::own{number}")
            for step in range(20):
                x = torch.full((2,), float(number), requires_grad=step % 2 == 0)
                for op in (shared, own):
                    y = op(x, Config(float(step)))
                    assert y.tolist() == [float(number * step)] * 2
                    if x.requires_grad:
                        (grad,) = torch.autograd.grad(y.sum(), x)
                        assert grad.tolist() == [5.0, 5.0]
            assert op_def(f"{ns}::own{number}").exposed_op is own
        except BaseException as error:  # noqa: BLE001  (it is reported by the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(winners) == 1


OPS = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import Tensor
from magi_opschema import magi_register_custom_op

@dataclass(frozen=True)
class Config:
    factor: float = FACTOR

@magi_register_custom_op("NAMESPACE::scale", override=OVERRIDE, infer_output_meta_fn=["x"])
def scale(x: Tensor, cfg: Config = Config()) -> Tensor:
    return x * cfg.factor
"""


def test_reload(ns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / f"{ns}_ops.py"

    def write(factor: float, override: bool) -> None:
        text = OPS.replace("FACTOR", str(factor)).replace("NAMESPACE", ns).replace("OVERRIDE", str(override))
        path.write_text(text)

    write(2.0, True)
    module: Any = importlib.import_module(path.stem)

    def call(x: Tensor) -> Any:
        return module.scale(x)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert module.scale(X).tolist() == compiled(X).tolist() == (X * 2).tolist()
    old_scale, old_config = module.scale, module.Config
    write(30.0, True)
    importlib.reload(module)
    assert module.scale(X).tolist() == compiled(X).tolist() == (X * 30).tolist()
    with pytest.raises(errors.ArgumentError, match="expected a Config, not a subclass or a look-alike"):
        module.scale(X, old_config())
    assert old_scale(X, old_config(7.0)).tolist() == (X * 7).tolist()
    write(4.0, False)
    with pytest.raises(errors.DuplicateOpError, match="pass override=True to replace it, as after a reload"):
        importlib.reload(module)
    assert old_scale(X, old_config(7.0)).tolist() == (X * 7).tolist()
    del sys.modules[path.stem]


@pytest.mark.parametrize(
    "end", ["return", "thread", *(pytest.param(end, marks=pytest.mark.slow) for end in ("exit", "atexit"))]
)
def test_interpreter_shutdown_with_ops_alive(tmp_path: Path, end: str) -> None:
    endings = {
        "return": "",
        "exit": "sys.exit(0)",
        "thread": "threading.Thread(target=lambda: [scale(x) for _ in range(2000)]).start()",
        "atexit": "atexit.register(lambda: print(scale(x).tolist()))",
    }
    script = tmp_path / "script.py"
    text = OPS.replace("FACTOR", "2.0").replace("NAMESPACE", "shutdown").replace("OVERRIDE", "True")
    body = f"""
        import atexit, sys, threading
        x = torch.ones(2, requires_grad=True)
        class Holds:
            def __del__(self):
                scale(torch.ones(2))
        holds = Holds()
        torch.compile(scale, fullgraph=True, backend="aot_eager")(x.detach())
        for _ in range(3):
            exec(open(__file__).read().split("# again")[0])
        {endings[end]}
    """
    script.write_text(f"{text}# again\n{textwrap.dedent(body)}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    assert run.stdout.strip() == ("[2.0, 2.0]" if end == "atexit" else "")


def _resident() -> int:
    """Bytes of memory of this process that are in use, without those that were freed and not given back yet."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@dataclass(frozen=True)
class Pair:
    weight: Tensor
    bias: Tensor | None = None
    factor: float = 2.0


def make_pair(ns: str) -> Callable[[Tensor, Pair], Tensor]:
    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1].weight)

    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], {"weight": grad}

    options: Any = {"infer_output_meta_fn": ["x"], "setup_context_fn": save, "backward_fn": backward}

    @magi_register_custom_op(f"{ns}::pair", **options)
    def pair(x: Tensor, cfg: Pair) -> Tensor:
        return x * cfg.weight * cfg.factor

    return pair


@pytest.mark.slow
def test_ten_thousand_calls_leak_nothing(ns: str) -> None:
    pair = make_pair(ns)
    weight = torch.ones(2048, requires_grad=True)

    def call(times: int) -> None:
        for _ in range(times):
            pair(X.new_ones(2048), Pair(weight, factor=1.0)).sum().backward()
            weight.grad = None
            with torch.no_grad():
                pair(weight, Pair(weight))
            with pytest.raises(errors.ArgumentError):
                pair(X, 3)  # type: ignore[arg-type]
            with pytest.raises(errors.ArgumentError):
                pair(X, Pair(weight, factor="x"))  # type: ignore[arg-type]

    call(500)
    objects, memory = _objects(), _resident()
    call(2_500)  # four calls each
    assert _objects() - objects < 200
    # One of the Tensors is 8 KiB: a leak of one a call would be 20 MiB.
    assert _resident() - memory < 8 * 2**20


def kept_by_compilations(backend: str, fn: Callable[[Tensor, Pair], Tensor]) -> tuple[float, float]:
    """Objects and bytes that stay of one compilation, the mean of 500."""
    weight = torch.ones(3, requires_grad=True)

    def compile_and_call(times: int) -> None:
        for _ in range(times):
            torch.compiler.reset()
            compiled = torch.compile(lambda x, w: fn(x, Pair(w)), fullgraph=True, backend=backend)
            compiled(X, weight).sum().backward()
            weight.grad = None
        torch.compiler.reset()

    compile_and_call(50)
    objects, memory = _objects(), _resident()
    compile_and_call(500)
    return (_objects() - objects) / 500, (_resident() - memory) / 500


def print_what_compilations_keep(backend: str) -> None:
    """With an op and without it, for the test below: what ran before in its process would change the numbers."""
    ours = kept_by_compilations(backend, make_pair("kept"))
    sys.stdout.write(json.dumps((ours, kept_by_compilations(backend, lambda x, cfg: x * cfg.weight * cfg.factor))))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_thousand_compilations_leak_nothing(backend: str) -> None:
    script = f"import runpy; runpy.run_path({__file__!r})['print_what_compilations_keep']({backend!r})"
    run = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    # torch itself keeps something of a compilation, counters and log entries: as much of one without an op.
    ours, torchs = json.loads(run.stdout)
    # Dynamo leaves a finalizer with its stack on each object that it guards, and an op has three of them more: about
    # 45 objects by types, none of them a node, a Tensor or a function of an op. One graph would be some hundreds.
    assert ours[0] < torchs[0] + 60
    # 21 kB were seen with aot_eager, of which Python's own 9 kB come from Dynamo's guards.
    assert ours[1] < torchs[1] + 32_000


def test_an_op_that_is_replaced_is_freed(ns: str) -> None:
    """As in a notebook where a cell is run again and again."""

    def replace() -> None:
        @magi_register_custom_op(f"{ns}::op", override=True)
        def op(x: Tensor, cfg: Pair) -> Tensor:
            return x * 2

        op(X, Pair(X))

    for _ in range(20):
        replace()
    objects = _objects()
    for _ in range(100):
        replace()
    assert _objects() - objects < 100 * 20
