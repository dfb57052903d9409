# SPDX-License-Identifier: Apache-2.0
"""Equal things have equal fingerprints, different things different ones, and nothing unstable passes for stable."""

from __future__ import annotations

import copy
import dataclasses
import socket
import threading
import types
from typing import Any

import pytest
import torch
import tritonwrap_patterns as patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_tritonwrap import find_kernels
from magi_tritonwrap._cache_key import CacheKeyEntry
from magi_tritonwrap._fingerprint import fingerprint
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache


@dataclasses.dataclass
class Settings:
    """Any value, as an attribute of an object."""

    value: Any


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.relu, len, int, patterns.Doubler])
    | st.sampled_from([patterns.double_kernel, patterns.two_configs_kernel, patterns.helper, patterns.partial])
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


@given(values)
@settings(max_examples=200, deadline=None)
def test_a_copy_has_the_same_fingerprint(value: Any) -> None:
    assert digest(copy_of(value)) == digest(value)


def copy_of(value: Any) -> Any:
    """A deep copy that shares functions and kernels."""
    if isinstance(value, Settings | types.SimpleNamespace):
        return type(value)(value=copy_of(value.value))
    if isinstance(value, list | tuple):
        return type(value)(copy_of(item) for item in value)
    if isinstance(value, dict):
        return {key: copy_of(item) for key, item in value.items()}
    return copy.copy(value) if isinstance(value, frozenset) else value


@given(values, values)
@settings(max_examples=300, deadline=None)
def test_different_values_have_different_fingerprints(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) == (shape(one) == shape(other))


FUNCTION = """
def helper(x):
    return x * 2

CONSTANT = 3

class Thing:
    factor = 4
    def apply(self, x):
        return x * self.factor

thing = Thing()

def body(x, by=5):
    def inner(y):
        return helper(y) + CONSTANT
    return thing.apply(inner(x)) + by + len([z for z in (1, 2)])
"""
EDITS = [
    ("x * 2", "x + 2"),
    ("CONSTANT = 3", "CONSTANT = 3.0"),
    ("factor = 4", "factor = 40"),
    ("x * self.factor", "x - self.factor"),
    ("by=5", "by=6"),
    ("(1, 2)", "(1, 3)"),
    ("helper(y) + CONSTANT", "helper(y) - CONSTANT"),
]


def body_of(text: str) -> Any:
    namespace: dict[str, Any] = {"__name__": "fingerprinted"}
    exec(text, namespace)
    return namespace["body"]


def test_a_function_made_twice() -> None:
    assert digest(body_of(FUNCTION)) == digest(body_of(FUNCTION))
    assert digest(body_of("\n\n# moved\n" + FUNCTION + "\nUNUSED = 1\n")) == digest(body_of(FUNCTION))


@pytest.mark.parametrize(("old", "new"), EDITS)
def test_an_edit_of_what_a_function_reaches(old: str, new: str) -> None:
    assert FUNCTION.count(old) == 1
    assert digest(body_of(FUNCTION.replace(old, new))) != digest(body_of(FUNCTION))


def test_a_constant_that_changes_while_the_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    body = body_of(FUNCTION)
    before = digest(body)
    body.__globals__["CONSTANT"] = 30
    assert digest(body) != before


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


def reads_module_as_value() -> object:
    return [patterns]


def hands_module_on() -> object:
    return vars(patterns)


def reads_module_by_name() -> object:
    return (getattr(patterns, "double_kernel"), patterns.helper, patterns.TABLE["double"])  # noqa: B009


def test_a_module_read_by_name_is_stable() -> None:
    assert digest(reads_module_by_name)


with socket.socket() as _closed:
    UNSTABLE = {
        "socket": _closed,
        "generator": (number for number in (1, 2)),
        "large tensor": torch.zeros(100_000),
        "meta tensor": torch.zeros(2, device="meta"),
        "thread": threading.current_thread(),
        "module as a value": reads_module_as_value,
        "module handed on": hands_module_on,
    }


@pytest.mark.parametrize("name", UNSTABLE)
def test_values_without_a_stable_form_are_named(name: str) -> None:
    found = fingerprint([Settings(UNSTABLE[name])], "body")
    assert found.unstable
    assert all(path.startswith(("body", "global", "module")) for path in found.unstable)


def test_a_kernel_that_only_the_arguments_lead_to_bypasses_the_cache() -> None:
    def body(x: torch.Tensor, runner: Any) -> None:
        runner.kernel[(1,)](x, x, 4, BLOCK=4)

    entry = CacheKeyEntry("mylib::run", body, find_kernels(body))
    with pytest.raises(BypassAOTAutogradCache, match=r"the parameter 'runner' is known at run time"):
        _ = entry.src
    assert entry.state.startswith("bypassed: runner.kernel[")


def test_small_tensors_count_by_content() -> None:
    assert digest(torch.ones(3)) == digest(torch.ones(3))
    assert digest(torch.ones(3)) != digest(torch.zeros(3))
    assert digest(torch.ones(3)) != digest(torch.ones(3, dtype=torch.float64))
    assert digest(torch.ones(2, 3)) != digest(torch.ones(3, 2))
