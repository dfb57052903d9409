# SPDX-License-Identifier: Apache-2.0
"""Equal things have equal fingerprints, different things different ones, and nothing unstable passes for stable.

AOTAutograd stores no graph with a launch whose kernel the key does not cover: an edit would not be noticed.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib
import socket
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import magi_tritonwrap
import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from graph_questions import Ops
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_tritonwrap import _see_through, find_kernels, see_through_report, triton_op
from magi_tritonwrap._cache_key import CacheKeyEntry, fingerprint
from magi_tritonwrap._kernel.kernels import as_kernel
from magi_tritonwrap._launch.capture import CapturedLaunch
from magi_tritonwrap._launch.recording import recording_of
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache


@dataclasses.dataclass
class Settings:
    """Any value, as an attribute of an object."""

    value: Any


KERNELS = [patterns.double_kernel, patterns.two_configs_kernel]
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.relu, len, int, patterns.Doubler])
    | st.sampled_from([*KERNELS, patterns.helper, patterns.launch_partial])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=3)
        | inner.map(Settings)
        | inner.map(lambda value: types.SimpleNamespace(value=value))
    ),
    max_leaves=6,
)


def digest(value: Any) -> str:
    found = fingerprint([value], "value")
    assert found.unstable == ()
    return found.digest


def shape(value: Any) -> object:
    """Something that is equal exactly for values that are alike in type and content."""
    if isinstance(value, Settings | types.SimpleNamespace):
        return (type(value), shape(value.value))
    if isinstance(value, list | tuple):
        return (type(value), tuple(shape(item) for item in value))
    if isinstance(value, dict):
        return (dict, tuple((key, shape(item)) for key, item in value.items()))
    if isinstance(value, float):
        return (float, value.hex())
    return (type(value), value)


@given(values, values)
@settings(max_examples=300, deadline=None)
def test_fingerprints_are_equal_where_values_are(one: Any, other: Any) -> None:
    shared = {id(kernel): kernel for kernel in KERNELS}
    assert digest(copy.deepcopy(one, shared)) == digest(one)
    assert (digest(one) == digest(other)) == (shape(one) == shape(other))


def run(text: str, name: str = "fingerprinted") -> Any:
    """The function `body` of a namespace that was run from text."""
    namespace: dict[str, Any] = {"__name__": name} if name else {}
    exec(textwrap.dedent(text), namespace)
    return namespace["body"]


def test_an_edited_default_of_an_operator() -> None:
    found = []
    for default in ("2.0", "2.0", "5.0"):
        with torch.library._scoped_library("tritonwrap_fingerprint", "FRAGMENT") as library:
            library.define(f"op(Tensor x, float factor={default}) -> Tensor")
            packet = torch.ops.tritonwrap_fingerprint.op
            found.append((digest(packet), digest(packet.default)))
    assert found[0] == found[1]
    assert found[2][0] != found[0][0]
    assert found[2][1] != found[0][1]


def test_circles_end() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    other: list[Any] = [2]
    other.append(other)
    assert digest(circle) != digest(other)
    module = types.ModuleType("circular")
    module.module = module  # type: ignore[attr-defined]
    body = types.FunctionType(compile("module.module", "circular", "eval"), {"module": module})
    assert digest(body)


with socket.socket() as _closed:
    UNSTABLE = {
        "socket": _closed,
        "generator": (number for number in (1, 2)),
        "large tensor": torch.zeros(100_000),
        "meta tensor": torch.zeros(2, device="meta"),
        "thread": threading.current_thread(),
        "module as a value": lambda: [patterns],
        "module handed on": lambda: vars(patterns),
    }


@pytest.mark.parametrize("name", UNSTABLE)
def test_values_without_a_stable_form_are_named(name: str) -> None:
    found = fingerprint([Settings(UNSTABLE[name])], "body")
    assert found.unstable
    assert all(path.startswith(("body", "global", "module")) for path in found.unstable)
    # What is read by name has a stable form.
    assert digest(lambda: (getattr(patterns, "double_kernel"), patterns.helper, patterns.TABLE["double"]))  # noqa: B009


def test_small_tensors_count_by_content() -> None:
    assert digest(torch.ones(3)) == digest(torch.ones(3))
    assert digest(torch.ones(3)) != digest(torch.zeros(3))
    assert digest(torch.ones(3)) != digest(torch.ones(3, dtype=torch.float64))
    assert digest(torch.ones(2, 3)) != digest(torch.ones(3, 2))


def test_the_stack_of_the_caller_does_not_matter() -> None:
    """Compilers ask from deep inside; a chain of helpers is as long as a program is."""
    chain = "".join(f"def f{at}(): return f{at + 1}()\n" for at in range(400))
    body = run(chain + "def f400(): return 1\ndef body(): return f0()")

    def deep(depth: int) -> str:
        return digest(body) if depth == 0 else deep(depth - 1)

    # Python 3.12 allows fewer frames behind tests that compile (seen with torch 2.10).
    share = 2 if sys.version_info < (3, 12) else 3
    assert deep(0) == deep(sys.getrecursionlimit() // share) == digest(body)


FOREIGN = """
import re, threading, socket
LOCK, SOCKET = threading.Lock(), socket.socket()
SOCKET.close()
SEPARATORS = re.compile("[._-]")
def parse(x):
    with LOCK:
        return SEPARATORS.split(x), SOCKET
"""


def test_a_body_of_an_installed_distribution_is_read_as_its_author_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """It registers ops of its own: what it reads must have a stable form. Where another body calls it, it need not."""
    place = tmp_path / "site-packages"
    place.mkdir()
    (place / "magi_test_foreign.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "magi_test_foreign", raising=False)
    module = importlib.import_module("magi_test_foreign")
    found = fingerprint([module.parse], "body")
    assert [path.partition(" read by")[0] for path in found.unstable] == ["global 'SOCKET'"]
    assert digest(run("import magi_test_foreign\ndef body(): return magi_test_foreign.parse('1.0')"))


@pytest.mark.parametrize("count", [1, 2])
def test_kernels_listed_by_hand_are_covered(count: int) -> None:
    def body(x: torch.Tensor, runner: Any) -> None:
        runner.kernel[(1,)](x, x, 4, BLOCK=4)
        if count == 2:
            runner.table["other"].run(x, x, 4, BLOCK=4, grid=(1,))

    kernels = [patterns.double_kernel, patterns.increment_kernel][:count]
    entry, other = (
        CacheKeyEntry("mylib::run", body, find_kernels(body, extra=listed)) for listed in (kernels, kernels[::-1])
    )
    assert entry.src.startswith("mylib::run ")
    assert entry.state == "keyed"
    assert (entry.src == other.src) == (count == 1)
    entry.check(as_kernel(kernel) for kernel in kernels)
    assert entry.state == "keyed"
    entry.check([as_kernel(patterns.one_config_kernel)])
    assert entry.state.startswith("not stored: ")


RUNNERS = {0: types.SimpleNamespace(kernel=patterns.increment_kernel)}


def test_make_see_through_with_kernels_is_keyed(ops: Any, stub: None) -> None:
    def body(x: torch.Tensor, handle: int) -> torch.Tensor:
        out = torch.empty_like(x)
        RUNNERS[handle].kernel[(1,)](x, out, 4, BLOCK=4)
        return out

    op = ops.define("run", body, "(Tensor x, int handle) -> Tensor")
    assert magi_tritonwrap.make_see_through(op, body, kernels=[patterns.double_kernel]).see_through
    assert magi_tritonwrap._see_through._OPS[op._name].key.src
    assert magi_tritonwrap.see_through_report(op).cache == "keyed"


RAN: list[object] = []


def _ran(*what: object) -> Any:
    RAN.append(what)
    raise ImportError


def _keep(self: Any, value: Any) -> None:
    self.__dict__["value"] = value


class Slotted:
    __slots__ = ("unset", "value")
    __getattr__ = _ran

    def __init__(self, value: Any) -> None:
        self.value = value


class Kept:
    """A descriptor that keeps what it is given elsewhere in the object."""

    def __get__(self, instance: Any, owner: type) -> Any:
        _ran() if instance is not None else None
        return 0

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__["_kept"] = value


@dataclasses.dataclass(frozen=True)
class Described:
    value: Any = Kept()


class Chosen(enum.Enum):
    ONE, TWO = 1, 2
    value = property(_ran)
    name = property(_ran)  # noqa: PIE796 - not a member


AT_ACCESS = {
    "__init__": _keep,
    "__class__": property(_ran),
    "computed": property(_ran),
    "cached": cached_property(_ran),
}
AT_ACCESS |= dict.fromkeys(("__getattr__", "__eq__", "__hash__", "__bool__", "__call__", "__getitem__"), _ran)
WITH_META = type("Meta", (type,), {"__getattr__": _ran})("OfMeta", (), {"__init__": _keep})
WHEN_ITERATED = type("WhenIterated", (dict,), {"items": _ran, "keys": _ran, "__getitem__": _ran})
WHEN_SHOWN = type("WhenShown", (str,), {"__slots__": (), "__repr__": _ran})
AT_EVERY_ACCESS = type("AtEveryAccess", (dict,), {"__getattribute__": _ran})
RUNS: dict[str, Any] = {
    "attributes": type("AtAccess", (), AT_ACCESS),
    "slots": Slotted,
    "a descriptor": Described,
    "a mapping": lambda value: WHEN_ITERATED(value=value),
    "a text": lambda value: WHEN_SHOWN(str(value)),
    "an Enum": lambda value: Chosen.ONE if value == 1 else Chosen.TWO,
    "a metaclass": WITH_META,
    "every access": lambda value: AT_EVERY_ACCESS(value=value),
}


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_a_walk_runs_nothing_of_the_values_that_it_meets(make: Any) -> None:
    RAN.clear()
    held = make(1)
    assert not find_kernels(lambda x: (held.kernel[(1,)](x), held[(1,)](x), held(x), {held: 1})).kernels
    found = [fingerprint([make(value)], "value") for value in (1, 1, 2)]
    assert RAN == []
    assert found[0] == found[1]
    assert found[0].digest != found[2].digest
    assert found[0].unstable == ()


LAZY = """
def __getattr__(name):
    import sys
    sys.modules["test_of_the_walk"].ran.append(name)
    raise ImportError(name)
"""


@pytest.mark.parametrize("text", ["lazily.kernel(x)", "from {lazily} import kernel\n    kernel(x)"])
def test_a_module_that_makes_attributes_when_asked_is_not_asked(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for name, more in (("lazily_a", ""), ("lazily_a", ""), ("lazily_a", "LIMIT = 3")):
        sys.modules.pop(name, None)
        (tmp_path / f"{name}.py").write_text(f"{LAZY}{more}")
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, "test_of_the_walk", types.SimpleNamespace(ran=[]))
        space: dict[str, Any] = {"lazily": module, "__name__": "user_code"}
        exec(f"def body(x):\n    {text.format(lazily=name)}", space)
        found.append(fingerprint([space["body"]], "value"))
        assert sys.modules["test_of_the_walk"].ran == []
    assert found[0].unstable == ()
    assert found[0] == found[1]
    assert found[0] != found[2], "what it makes may come from any line of its file"


def make_kernel(factor: int) -> Any:
    @triton.jit
    def made(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) * factor)

    return made


hidden = types.ModuleType("magi_hidden_kernels")
hidden.__dict__["kernel"] = make_kernel(3)
tuned = triton.autotune(configs=[triton.Config({"BLOCK": 128})], key=["n"])
hidden.__dict__["tuned"] = tuned(patterns.double_kernel)


def by_module_name() -> Any:
    return importlib.import_module("_".join(("magi", "hidden", "kernels"))).kernel


def by_module_name_around_a_known_one() -> Any:
    patterns.helper  # noqa: B018 - it launches the kernel inside
    return importlib.import_module("_".join(("magi", "hidden", "kernels"))).tuned


COVERED: dict[str, Callable[[], Any]] = {
    "name": lambda: patterns.double_kernel,
    "layers": lambda: patterns.two_configs_kernel.fn,
    "factory": lambda: make_kernel(2),
}
HIDDEN = {"module_name": by_module_name, "module_name_around_a_known_one": by_module_name_around_a_known_one}


def compiled_with(ops: Ops, name: str, monkeypatch: pytest.MonkeyPatch, *, trains: bool) -> Any:
    """Compile an op whose body says that it launches what it chose; without a GPU nothing can be launched."""
    choose = (COVERED | HIDDEN)[name]

    def record(*body: Any) -> Any:
        recording = recording_of(*body)
        assert not isinstance(recording, str)
        return replace(recording, launches=[CapturedLaunch(as_kernel(choose()), __file__, 1)])

    monkeypatch.setattr(_see_through, "recording_of", record)
    monkeypatch.setattr(_see_through, "check_driver", lambda *_: None)
    monkeypatch.setitem(sys.modules, hidden.__name__, hidden)

    def body(x: Tensor) -> Tensor:
        return choose() and x if x.numel() == 1 else x * 2

    op = triton_op(f"{ops.namespace}::{name}_{trains}", body, mutates_args=())
    torch._dynamo.reset()
    counters.clear()
    weight = torch.ones(8, requires_grad=trains)
    with fresh_cache():
        result = torch.compile(lambda x: op(x) * weight, fullgraph=True)(torch.ones(8))
        if trains:
            result.sum().backward()
    return op


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", [*COVERED, *HIDDEN])
def test_a_graph_is_stored_if_the_key_covers_its_kernels(
    name: str, trains: bool, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = see_through_report(compiled_with(ops, name, monkeypatch, trains=trains)).cache
    if name in COVERED:
        assert said == "keyed"
    else:
        assert said.startswith("not stored: no name in the code of the op leads to ")
        assert said.endswith("), which it launches")
    assert counters["aot_autograd"]["autograd_cache_miss"] == 1
    assert counters["aot_autograd"]["autograd_cache_saved"] == (name in COVERED)
