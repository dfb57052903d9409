# SPDX-License-Identifier: Apache-2.0
"""A warm start: what is loaded, what is refused and why, and that no answer is ever that of other code."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _python import python
from magi_backend import WarmStart, _warm, load, read_report, save
from magi_backend._torch_compat import compiling
from magi_backend.errors import WarmStartError
from torch._inductor import cpu_vec_isa
from torch.compiler._cache import CacheArtifactManager


Elsewhere = Callable[[], None]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """Go on as another process on a machine with empty caches, which each test begins as."""

    def go() -> None:
        torch.compiler.reset()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("caches")))
        monkeypatch.setattr(_warm, "_known", _warm._Known())
        CacheArtifactManager.clear()

    with CacheArtifactManager.with_fresh_cache():
        go()
        yield go


def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def compiled(x: torch.Tensor | None = None, **options: Any) -> None:
    """`wave`, compiled, gives what eager gives."""
    x = torch.arange(4.0) if x is None else x
    found = torch.compile(wave, backend="magi", dynamic=False, options=options)(x)
    torch.testing.assert_close(found, wave(x))


@pytest.fixture
def saved(tmp_path: Path, elsewhere: Elsewhere) -> Path:
    """A folder with `wave`, seen from another machine."""
    folder = tmp_path / "warm"
    compiled()
    assert save(folder) == len(list(folder.iterdir())) >= 3
    elsewhere()
    return folder


def largest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def with_digest(folder: Path, data: bytes) -> None:
    (folder / hashlib.sha256(data).hexdigest()).write_bytes(data)


def test_code_is_found_on_another_machine(saved: Path) -> None:
    start = load(saved)
    compiled()
    assert (start.refused, start.found, start.compiled) == ((), ["wave"], [])
    assert str(start).splitlines() == [
        f"warm start from {saved}: {len(start.loaded)} entries loaded, 1 of them graphs",
        "found wave",
    ]


def test_a_process_that_was_loaded_saves_all_that_it_used(saved: Path, tmp_path: Path, elsewhere: Elsewhere) -> None:
    load(saved)
    compiled()
    save(tmp_path / "again")
    elsewhere()
    start = load(tmp_path / "again")
    compiled()
    assert start.found == ["wave"]


def test_what_was_compiled_between_two_saves_is_added(tmp_path: Path, elsewhere: Elsewhere) -> None:
    folder = tmp_path / "warm"
    compiled()
    save(folder)
    compiled(torch.arange(5.0))
    save(folder)
    elsewhere()
    start = load(folder)
    compiled()
    compiled(torch.arange(5.0))
    assert start.found == ["wave", "wave"]


def test_load_twice_and_after_a_compilation(saved: Path) -> None:
    compiled()
    assert load(saved).loaded == load(saved).loaded
    torch.compiler.reset()
    compiled()


def cut(folder: Path) -> None:
    path = largest(folder)
    path.write_bytes(path.read_bytes()[:-100])


def flipped(folder: Path) -> None:
    path = largest(folder)
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


CHANGED = "it was cut off or changed after it was written: its digest is not its name"
FOREIGN = "it is not a file of magi_backend.save"
TORN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (cut, CHANGED),
    "a bit of the header": (flipped, CHANGED),
    "under another name": (lambda folder: largest(folder).rename(folder / ("0" * 64)), CHANGED),
    "of somebody else": (lambda folder: (folder / "README.md").write_text("notes"), FOREIGN),
    "a folder": (lambda folder: (folder / "inner").mkdir(), "Is a directory"),
    "killed while it was written": (
        lambda folder: largest(folder).rename(folder / f"{'0' * 64}.77-1.part"),
        "it is being written, or its writer was killed",
    ),
    "of a later release": (
        lambda folder: with_digest(folder, json.dumps({"format": 2}).encode() + b"\n"),
        "its format is 2, and this release reads 1",
    ),
    "no header": (lambda folder: with_digest(folder, b"notes"), "it has no header of magi_backend.save"),
    "leads out of the caches": (
        lambda folder: with_digest(folder, _warm.Entry("file", "../evil.so", b"").packed()[1]),
        "it names ../evil.so, which is outside of the folder of the caches",
    ),
}


@pytest.mark.parametrize("how", TORN)
def test_a_file_that_is_torn_or_foreign_is_refused(how: str, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    tear, why = TORN[how]
    tear(saved)
    start = load(saved)
    (refused,) = start.refused
    assert why in refused
    assert refused in caplog.text
    compiled()  # with what is left


ANOTHER: dict[str, tuple[str, str, str]] = {
    "torch": ("torch", "2.9.0 (abc)", "made for torch 2.9.0 (abc), and here it is "),
    "a title that is not known": ("the moon", "full", "made for the moon full, and here it is unknown"),
    "a processor that can more": (
        "a processor with",
        "{here} amx_moon",
        "made for a processor with amx_moon, which this one lacks",
    ),
    "a processor that can less": ("a processor with", "", "made for a processor without "),
}


@pytest.mark.parametrize("what", ANOTHER)
def test_what_was_made_for_another_machine_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Elsewhere
) -> None:
    title, other, why = ANOTHER[what]
    here = _warm.made_for()
    compiled()
    with monkeypatch.context() as patch:
        patch.setattr(_warm, "made_for", lambda: here | {title: other.format(here=here.get(title))})
        save(tmp_path / "warm")
    elsewhere()
    start = load(tmp_path / "warm")
    assert start.loaded == ()
    assert start.refused
    assert all(why in sentence for sentence in start.refused)
    compiled()
    assert start.compiled == [f"wave: no graph of this function was loaded ({len(start.refused)} files were refused)"]


def test_one_folder_serves_two_machines(saved: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Elsewhere) -> None:
    here = _warm.made_for()
    compiled()
    with monkeypatch.context() as patch:
        patch.setattr(_warm, "made_for", lambda: here | {"the cards": "NVIDIA Z1"})
        save(saved)
    elsewhere()
    start = load(saved)
    compiled()
    assert len(start.loaded) == len(start.refused)
    assert start.found == ["wave"]


def test_a_refused_entry_of_a_graph_is_named_when_it_is_missed(saved: Path) -> None:
    for path in saved.iterdir():
        if b'"kind": "graph"' not in path.read_bytes()[:200]:
            path.write_bytes(b"")
    start = load(saved)
    compiled()
    (sentence,) = start.compiled
    assert sentence == f"wave: its code was not among what was loaded ({len(start.refused)} files were refused)"


PROGRAM = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, str(Path(__file__).parent))
import model, ops, passes
from magi_backend import load, save

EDITED, folder = sys.argv[1] == "edited", Path(__file__).parent / "warm"
torch._inductor.config.fallback_by_default = True
start = load(folder) if EDITED else None
x = torch.arange(6.0).reshape(2, 3)
told = {}

def case(name, fn, *inputs, options={}):
    before = len(start.compiled) if EDITED else 0
    found = torch.compile(fn, backend="magi", dynamic=False, options={**options, "magi.strict": True})(*inputs)
    wanted = passes.wanted(fn, *inputs) if name == "pass" else fn(*inputs)
    is_right = torch.allclose(found, wanted)
    if wanted.requires_grad:
        grads = [torch.autograd.grad(out.sum(), inputs[0])[0] for out in (found, wanted)]
        is_right = is_right and torch.allclose(*grads)
    told[name] = is_right, "; ".join(start.compiled[before:]) if EDITED else ""

case("unchanged", model.unchanged, x)
case("source", ops.edited, x)
case("helper", model.calls_helper, x)
case("constant", model.reads_constant, x)
case("body", model.calls_body, x)
case("default", model.calls_default, x)
case("fake", model.calls_fake, x)
case("gradient", model.calls_gradient, x.clone().requires_grad_())
case("library", model.calls_library, x.clone().requires_grad_())
case("pass", model.passed, x, options={"post_grad_custom_post_pass": passes.Swap()})
case("setting", model.with_setting, x, options={"magi.memory_budget": 0.5 if EDITED else None})
case("option", model.with_option, x, options={"max_fusion_size": 32 if EDITED else 64})
with torch._inductor.config.patch({"max_fusion_size": 16} if EDITED else {}):
    case("configuration", model.with_configuration, x)
case("shape", model.shaped, x[:1] if EDITED else x)
case("dtype", model.typed, x.double() if EDITED else x)
case("strides", model.strided, torch.arange(6.0).reshape(3, 2).T if EDITED else x)
case("grad", model.with_grad, x.clone().requires_grad_() if EDITED else x)
with torch.autocast("cpu", enabled=EDITED):
    case("autocast", model.with_autocast, x)
if EDITED:
    case("new", model.new, x)
print(json.dumps(told))
if not EDITED:
    save(folder)
"""
MODEL = """
import helper, ops
def unchanged(x): return x.sin()
def calls_helper(x): return helper.shift(x)
def reads_constant(x): return x.cos() * helper.FACTOR
def calls_body(x): return ops.body(x.sin())
def calls_default(x): return ops.default(x.sin())
def calls_fake(x): return ops.fake(x.sin())
def calls_gradient(x): return ops.gradient(x.sin())
def calls_library(x): return ops.library(x.sin())
def passed(x): return x.tan().sin()
def with_setting(x): return x.exp()
def with_option(x): return x.exp() + 1
def with_configuration(x): return x.exp() + 2
def shaped(x): return x.exp() + 3
def typed(x): return x.exp() + 4
def strided(x): return x.exp() + 5
def with_grad(x): return x.exp() + 6
def with_autocast(x): return x.exp() + 7
def new(x): return x.exp() + 8
"""
HELPER = """
FACTOR = 3.0
def shift(x): return x + 1.0
def slope(x): return x * 2.0
"""
OPS = """
import helper, torch
from magi_backend import magi_register_custom_op
def edited(x): return x.sin() * 5.0
@magi_register_custom_op("magi_warm::body", infer_output_meta_fn=["x"])
def body(x: torch.Tensor) -> torch.Tensor:
    return x * 3.0
@magi_register_custom_op("magi_warm::default", infer_output_meta_fn=["x"])
def default(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor
@magi_register_custom_op("magi_warm::fake", infer_output_meta_fn=lambda x: x.new_empty(2, 3))
def fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((2, 3), 1.0)
@magi_register_custom_op(
    "magi_warm::gradient",
    infer_output_meta_fn=["x"],
    setup_context_fn=lambda ctx, inputs, output: None,
    backward_fn=lambda ctx, grad: (helper.slope(grad),),
)
def gradient(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0
@torch.library.custom_op("magi_warm::library", mutates_args=())
def library(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0
library.register_fake(lambda x: torch.empty_like(x))
library.register_autograd(lambda ctx, grad: helper.slope(grad))
"""
PASSES = """
from dataclasses import dataclass
import torch
from magi_passes import MagiInductorPass, Reason
INSTEAD = torch.ops.aten.cos.default
def wanted(fn, x): return x.tan().cos()
@dataclass(frozen=True)
class Swap(MagiInductorPass):
    def is_applicable(self, graph, context): return Reason(True, "always")
    def __call__(self, graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = INSTEAD
"""
EDITS = {
    "helper.py": (("x + 1.0", "x + 2.0"), ("3.0", "4.0"), ("x * 2.0", "x * 9.0")),
    "ops.py": (
        ("* 5.0", "* 6.0"),
        ("x * 3.0", "x * 7.0"),
        ("factor: float = 2.0", "factor: float = 8.0"),
        ("2, 3", "4, 2"),
    ),
    "passes.py": (("cos", "exp"),),
}
READS = "what it calls or reads has changed, so that other operators were captured"
BODY = "the code of an operator, a gradient or a pass has changed, or what it calls or reads"
STALE: dict[str, str] = {
    "unchanged": "",
    "source": "edited: the source has changed: ops.py:4",
    "helper": f"calls_helper: {READS}",
    "constant": f"reads_constant: {READS}",
    "body": "",  # the compiler does not see into it, so that the code calls the new one
    "default": "calls_default: the operator magi_warm::default has changed",
    "fake": "calls_fake: the operator magi_warm::fake has changed",
    "gradient": f"calls_gradient: {BODY}",  # a function that the gradient calls
    "library": f"calls_library: {BODY}",
    "pass": "passed: post_grad_custom_post_pass was Swap-",
    "setting": "with_setting: magi.memory_budget was None and is 0.5",
    "option": "with_option: max_fusion_size was 64 and is 32",
    "configuration": "with_configuration: torch._inductor.config.max_fusion_size was not set and is 16",
    "shape": "shaped: its inputs were float32[2, 3] and are float32[1, 3]",
    "dtype": "typed: its inputs were float32[2, 3] and are float64[2, 3]",
    "strides": "strided: its inputs were float32[2, 3] and are float32[2, 3] with strides ('1', '2')",
    "grad": "with_grad: its inputs were float32[2, 3] and are float32[2, 3] that requires grad",
    "autocast": "with_autocast: mode autocast was ",
    "new": "new: no graph of this function was loaded",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bool, str]]:
    """For each case whether the second process gave what eager gives, and why it compiled anew."""
    folder = tmp_path_factory.mktemp("program")
    texts = {"program.py": PROGRAM, "model.py": MODEL, "helper.py": HELPER, "ops.py": OPS, "passes.py": PASSES}
    for name, text in texts.items():
        (folder / name).write_text(text)
    first = _run(folder, "first")
    assert all(is_right for is_right, _ in first.values())
    for name, edits in EDITS.items():
        text = texts[name]
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return _run(folder, "edited")


def _run(folder: Path, how: str) -> dict[str, tuple[bool, str]]:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"caches of {how}"), "PYTHONDONTWRITEBYTECODE": "1"}
    printed = python(folder / "program.py", how, env=environment)
    result: dict[str, tuple[bool, str]] = json.loads(printed.splitlines()[-1])
    return result


@pytest.mark.parametrize("case", STALE)
def test_an_edit_is_compiled_anew_and_never_answered_by_earlier_code(
    case: str, told: dict[str, tuple[bool, str]]
) -> None:
    is_right, sentence = told[case]
    assert is_right
    assert sentence.startswith(STALE[case])
    assert bool(sentence) == bool(STALE[case])


class Instructions:
    """A set of vector instructions as Inductor has them: a check finds further ones, which the compiler is told of."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hashed = hash  # theirs have a function too

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.has_bfloat16 = True
        return True

    def flags(self) -> str:
        return f"-m{self.name}" + " -mbf16" * getattr(self, "has_bfloat16", False)


@torch._inductor.config.patch({"cpp.vec_isa_ok": None})  # or nothing is looked for
@pytest.mark.parametrize(("name", "allowed", "is_taken"), [("avx512", False, True), ("avx512 amx_tile", False, False)])
def test_instructions_are_taken_with_what_was_found_out_about_them(
    name: str, allowed: bool, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_process() -> Instructions:
        instructions = Instructions(name)
        monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [instructions])
        monkeypatch.setattr(
            cpu_vec_isa, "valid_vec_isa_list", functools.cache(lambda: [each for each in [instructions] if each])
        )
        return instructions

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: allowed)
    first = new_process()
    assert compiling.vector_instructions() == {}
    cpu_vec_isa.valid_vec_isa_list()
    saved = json.loads(json.dumps(compiling.vector_instructions()))
    second = new_process()
    compiling.take_vector_instructions(saved)
    assert (second.flags() == first.flags()) is is_taken
    assert list(map(str, cpu_vec_isa.valid_vec_isa_list())) == [name]
    assert second.flags() == first.flags()


def test_hot_sizes_are_hot_at_their_first_call(
    tmp_path: Path, elsewhere: Elsewhere, made: Callable[[], list[tuple[int, ...]]]
) -> None:
    def called(*sizes: int) -> list[tuple[int, ...]]:
        options: dict[str, Any] = {"magi.hot_sizes": 2, "magi.hot_after": 3}
        fn = torch.compile(wave, backend="magi", dynamic=True, options=options)
        for size in sizes:
            torch.testing.assert_close(fn(torch.arange(size)), wave(torch.arange(size)))
        return made()

    assert called(4, 5, 4, 5, 4, 5) == [(4,), (5,)]
    save(tmp_path)
    elsewhere()
    start = load(tmp_path)
    assert called(7, 5, 7, 4) == [(5,), (4,)]
    assert start.found == ["wave"]


def test_graph_breaks_and_training_in_the_report(saved: Path, tmp_path: Path, elsewhere: Elsewhere) -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x).relu()
            torch._dynamo.graph_break()
            out: torch.Tensor = self.linear(x).sin()
            return out

    def trained() -> None:
        model, x = Broken(), torch.randn(3, 4)
        torch.compile(model, backend="magi")(x).sum().backward()
        found = model.linear.weight.grad
        model.linear.weight.grad = None
        model(x).sum().backward()
        torch.testing.assert_close(found, model.linear.weight.grad)

    trained()
    save(saved)
    elsewhere()
    start = load(saved)
    trained()
    assert start.compiled == []
    assert len(start.found) == 2


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(WarmStartError, match=r"this process has compiled no graph\. Call the compiled model first"):
        save(tmp_path)


def test_caches_that_are_off(tmp_path: Path) -> None:
    compiled(force_disable_caches=True)
    with pytest.raises(WarmStartError, match=r"torch's caches have taken none of the graphs of this process"):
        save(tmp_path)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    compiled()
    (tmp_path / "file").touch()
    with pytest.raises(WarmStartError, match=r"it cannot be written to: .* Give a folder that this user may write to"):
        save(tmp_path / "file" / "warm")
    with pytest.raises(WarmStartError, match=r"it is a file\. Give the folder that magi_backend\.save has written"):
        load(tmp_path / "file")


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_entries(folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = load(tmp_path / folder)
    assert (start.loaded, start.refused) == ((), ())
    assert "has no entries yet, so everything is compiled. magi_backend.save writes them." in caplog.text
    compiled()
    assert start.compiled == ["wave: no graph of this function was loaded"]


def test_several_writers_at_once(tmp_path: Path, elsewhere: Elsewhere) -> None:
    compiled()
    writers = [threading.Thread(target=save, args=(tmp_path,)) for _ in range(8)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert all("being written" in sentence for sentence in load(tmp_path).refused)
    elsewhere()
    start = load(tmp_path)
    compiled()
    assert (start.refused, start.found) == ((), ["wave"])


def test_the_folder_is_for_its_owner(saved: Path) -> None:
    assert saved.stat().st_mode & 0o077 == 0
    assert isinstance(load(saved), WarmStart)


def test_a_graph_that_no_cache_takes(saved: Path) -> None:
    start = load(saved)
    compiled(force_disable_caches=True)
    assert start.compiled == ["wave: torch's caches do not take it, so each process compiles it"]


def test_the_report_of_a_run_says_why(saved: Path, tmp_path: Path) -> None:
    load(saved)
    compiled(torch.arange(5.0), **{"magi.report": str(tmp_path / "report")})
    assert (
        "compiled anew, although magi_backend.load had loaded code: its inputs were float32[4] and are float32[5]"
        in " ".join(read_report(tmp_path / "report").to_text().split())
    )
