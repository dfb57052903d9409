# SPDX-License-Identifier: Apache-2.0
"""What changes a pass's uuid, what does not, and what it costs."""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import MagiInductorPass, PassDefinitionError, PassIdentityError, PassPipeline, _torch_compat


if TYPE_CHECKING:
    from pathlib import Path

    from torch.fx import Graph


SOURCE = """
from dataclasses import dataclass
from magi_passes import MagiInductorPass

LIMIT = 3

def helper(graph):
    return len(graph.nodes) > {helper}

class Base(MagiInductorPass):
    scale = {scale}

    def threshold(self):
        return {threshold}

@dataclass(frozen=True)
class Mine(Base):
    {comment}
    uuid_helpers = (helper,)
    tiles: int = {tiles}

    def __call__(self, graph):
        return {body}
"""
PLAIN = {"helper": 1, "scale": 1, "threshold": 1, "comment": "", "tiles": 2, "body": "None"}


def _load(folder: Path, name: str, **changes: object) -> Any:
    path = folder / f"{name}.py"
    path.write_text(SOURCE.format(**{**PLAIN, **changes}))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "change",
    [{"helper": 2}, {"scale": 2}, {"threshold": 2}, {"tiles": 3}, {"body": "1"}],
    ids=["helper", "attribute of the base", "method of the base", "default of a field", "the pass itself"],
)
def test_a_change_of_code_changes_the_uuid(tmp_path: Path, change: dict[str, object]) -> None:
    plain = _load(tmp_path, "plain").Mine().uuid()
    assert _load(tmp_path, "changed", **change).Mine().uuid() != plain


def test_nothing_else_changes_the_uuid(tmp_path: Path) -> None:
    plain, elsewhere = _load(tmp_path, "plain"), _load(tmp_path, "elsewhere", comment="# a remark in the class body")
    assert plain.Mine().uuid() == plain.Mine().uuid() == elsewhere.Mine().uuid()
    assert plain.Mine(tiles=5).uuid() == elsewhere.Mine(tiles=5).uuid() != plain.Mine().uuid()


def test_the_torch_release_belongs_to_the_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _load(tmp_path, "plain")
    before = module.Mine().uuid()
    monkeypatch.setattr(_torch_compat, "torch_version", lambda: "2.10.0")
    assert module.Mine().uuid() != before


def test_the_uuid_is_the_same_in_another_process(tmp_path: Path) -> None:
    _load(tmp_path, "plain")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import plain; print(plain.Mine().uuid())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == _load(tmp_path, "plain").Mine().uuid()


def test_classes_of_one_name_differ_by_what_their_closures_hold() -> None:
    def make(limit: object) -> MagiInductorPass:
        @dataclass(frozen=True)
        class Made(MagiInductorPass):
            def __call__(self, graph: Graph) -> None:
                assert limit

        return Made()

    assert make(1).uuid() == make(1).uuid()
    assert len({make(limit).uuid() for limit in (1, 2, 1.0, True, "1", (1,), None)}) == 7


def test_code_that_names_itself_has_a_uuid() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    @dataclass(frozen=True)
    class Recursive(MagiInductorPass):
        def __call__(self, graph: Graph) -> None:
            assert isinstance(self, Recursive)
            assert even(2)

    assert Recursive().uuid() == Recursive().uuid()


def test_two_classes_of_one_name_in_one_file_differ() -> None:
    uuids = set()
    for index in range(2):
        if index == 0:

            @dataclass(frozen=True)
            class Same(MagiInductorPass):
                def __call__(self, graph: Graph) -> None:
                    assert graph is not None

            uuids.add(Same().uuid())
        else:

            @dataclass(frozen=True)
            class Same(MagiInductorPass):  # type: ignore[no-redef]
                def __call__(self, graph: Graph) -> None:
                    assert graph.nodes

            uuids.add(Same().uuid())
    assert len(uuids) == 2


def test_a_class_without_source_is_told_by_its_bytecode() -> None:
    def typed_into_a_prompt(body: str) -> Any:
        namespace: dict[str, Any] = {"__name__": "prompt"}
        text = f"""
        from dataclasses import dataclass
        from magi_passes import MagiInductorPass
        @dataclass(frozen=True)
        class Typed(MagiInductorPass):
            def __call__(self, graph):
                return {body}
        """
        exec(compile(textwrap.dedent(text), "<stdin>", "exec"), namespace)
        return namespace["Typed"]()

    assert typed_into_a_prompt("1").uuid() == typed_into_a_prompt("1").uuid() != typed_into_a_prompt("2").uuid()


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def _predicate(graph: object) -> bool:
    return True


@dataclass(frozen=True)
class Holds(MagiInductorPass):
    value: object = None

    def __call__(self, graph: Graph) -> None:
        pass


@dataclass(frozen=True)
class Nested:
    x: int = 1


VALUES: list[object] = [
    *(None, True, 1, 1.0, float("inf"), "1", b"1", (1,), ((1,),), frozenset({1, 2}), Colour.RED, Colour.BLUE),
    *(torch.float32, torch.float16, torch.device("cpu"), torch.channels_last, Nested(), Nested(2), int, Nested),
    *(_predicate, functools.partial(_predicate, 1), functools.partial(_predicate, 2), torch.ops.aten.add.Tensor),
]


def test_every_kind_of_value_is_told_apart() -> None:
    assert len({Holds(value).uuid() for value in VALUES}) == len(VALUES)


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}, object(), torch.ones(1)], ids=lambda v: type(v).__name__)
def test_a_value_that_can_change_is_refused(value: object) -> None:
    with pytest.raises(PassIdentityError, match=f"Holds.value is a {type(value).__qualname__}, which cannot be part"):
        PassPipeline([Holds(value)])


def test_a_pass_that_is_no_frozen_dataclass_is_refused() -> None:
    class Bare(MagiInductorPass):
        def __call__(self, graph: Graph) -> None:
            pass

    class Forgotten(Holds):
        tiles: int = 2

    for cls in (Bare, Forgotten):
        with pytest.raises(PassDefinitionError, match="is not a frozen dataclass"):
            PassPipeline([cls()])


def test_twenty_passes_read_no_source_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    options = PassPipeline([Holds(index) for index in range(20)]).inductor_options()
    hook = options["post_grad_custom_post_pass"]
    first = hook.uuid()
    monkeypatch.setattr(inspect, "getsource", lambda *_: pytest.fail("the source was read again"))
    monkeypatch.setattr("magi_passes._identity.describe", lambda *_: pytest.fail("a value was described again"))
    assert hook.uuid() == first
    assert PassPipeline(hook.parts).uuid() == PassPipeline(hook.parts).uuid()


def test_twenty_passes_of_one_class_read_its_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Fresh(MagiInductorPass):
        index: int = 0

        def __call__(self, graph: Graph) -> None:
            pass

    read: list[str] = []
    getsource = inspect.getsource

    def counting(function: Any) -> str:
        read.append(function.__qualname__)
        return getsource(function)

    monkeypatch.setattr(inspect, "getsource", counting)
    PassPipeline([Fresh(index) for index in range(20)])
    assert [name for name in read if "Fresh" in name] == [Fresh.__call__.__qualname__]
