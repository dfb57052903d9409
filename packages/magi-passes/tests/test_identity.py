# SPDX-License-Identifier: Apache-2.0
"""The uuid of a pass: it follows from its code and its fields, in every process."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import MagiInductorPass, PassPipeline, _torch_compat
from magi_passes._framework.declared import describe
from magi_passes.errors import PassDefinitionError, PassIdentityError


if TYPE_CHECKING:
    from pathlib import Path

    from torch.fx import Graph
from identity_passes import Holds, made_pass


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
    tiles: int = {tiles}

    def __call__(self, graph):
        return helper(graph) and {body}
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
    monkeypatch.setattr(_torch_compat.config, "torch_version", lambda: "2.10.0")
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


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def _predicate(graph: object) -> bool:
    return True


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


def test_a_pass_that_is_not_a_frozen_dataclass_is_refused() -> None:
    class Bare(MagiInductorPass):
        def __call__(self, graph: Graph) -> None:
            pass

    class Forgotten(Holds):
        tiles: int = 2

    for cls in (Bare, Forgotten):
        with pytest.raises(PassDefinitionError, match="is not a frozen dataclass"):
            PassPipeline([cls()])


def _walks(run: Any) -> int:
    """How often *run* walks code; seen from outside, since a patched function is a reason to walk again."""
    count = 0

    def note(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is describe.__code__

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_twenty_passes_walk_no_code_after_the_first_call() -> None:
    options = PassPipeline([Holds(index) for index in range(20)]).inductor_options()
    hook = options["post_grad_custom_post_pass"]
    first = hook.uuid()
    again: list[str] = []
    assert _walks(lambda: again.append(hook.uuid())) == 0
    assert _walks(lambda: PassPipeline(hook.parts).uuid()) == 0
    assert again == [first]


def test_the_code_of_twenty_passes_of_one_class_is_walked_once() -> None:
    mine = made_pass()
    fields = 20
    assert _walks(lambda: PassPipeline([mine() for _ in range(fields)])) == 1 + fields


def test_a_pass_in_a_hook_of_its_own(inductor: Any) -> None:
    """torch copies its configuration, and with it the pass, before it asks for the uuid."""
    config = inductor
    before = config.post_grad_custom_post_pass
    try:
        config.post_grad_custom_post_pass = Holds(3)
        compiled = torch.compile(lambda x: x @ x)
        assert compiled(torch.ones(2, 2)).sum() == 8
    finally:
        config.post_grad_custom_post_pass = before
