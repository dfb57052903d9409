# SPDX-License-Identifier: Apache-2.0
"""The uuid of a pass whose code is changed, copied or pickled after it was asked for."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from identity_passes import Holds, globals_of, made_pass
from magi_passes import ConvChooser, NDTilingWorkaroundPass, PassPipeline, TemporalConvPass
from magi_passes._identity.members import REMEMBERED


def _replaced_method(mine: Any) -> None:
    mine.__call__ = lambda self, graph: 12


def _replaced_helper(mine: Any) -> None:
    globals_of(mine)["f"] = lambda: 12


def _replaced_code(mine: Any) -> None:
    globals_of(mine)["f"].__code__ = (lambda: 12).__code__


def _item_of_a_table(mine: Any) -> None:
    globals_of(mine)["TABLE"]["deep"]["a"] = 12


def _added_global(mine: Any) -> None:
    globals_of(mine)["later"] = lambda: 12


def _attribute_of_an_object(mine: Any) -> None:
    globals_of(mine)["SETTINGS"].limit = 12


def _default(mine: Any) -> None:
    globals_of(mine)["f"].__defaults__ = (12,)


def _context_variable(mine: Any) -> None:
    globals_of(mine)["MODE"].set(12)


CHANGES = [
    *(_replaced_method, _replaced_helper, _replaced_code, _item_of_a_table, _added_global),
    *(_attribute_of_an_object, _default, _context_variable),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_after_the_first_question(change: Any) -> None:
    """Of the pass that was asked already, of a copy, and of a new one."""
    mine = made_pass(
        """
        import types, contextvars
        TABLE = {"deep": {"a": 11}}
        SETTINGS = types.SimpleNamespace(limit=11)
        MODE = contextvars.ContextVar("mode", default=11)
        def f(x=11): return x
        """,
        "f(); TABLE['deep']; SETTINGS.limit; MODE.get(); later()",
    )
    asked, before = mine(), mine().uuid()
    assert asked.uuid() == before
    contextvars.copy_context().run(lambda: _check_changed(change, mine, asked, before))


def _check_changed(change: Any, mine: Any, asked: Any, before: str) -> None:
    change(mine)
    assert asked.uuid() != before
    assert asked.uuid() == mine().uuid() == copy.copy(asked).uuid()


COPIES: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("before", [True, False], ids=["asked before", "not asked before"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_the_same_uuid(name: str, before: bool) -> None:
    made = Holds((1, "a"))
    if before:
        made.uuid()
    again = COPIES[name](made)
    assert again.uuid() == made.uuid() == Holds((1, "a")).uuid()


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_is_changed_has_another_uuid(name: str) -> None:
    made = Holds(1)
    before = made.uuid()
    other = COPIES[name](made)
    object.__setattr__(other, "value", True)
    assert other.uuid() == Holds(True).uuid() != before == made.uuid()


def test_copying_changes_no_uuid_of_the_class() -> None:
    """Python notes in a class that is copied which slots it has."""
    mine = made_pass()
    copy.deepcopy(mine())
    assert "__slotnames__" in vars(mine)
    assert mine().uuid() == made_pass()().uuid()


def test_a_pickle_carries_no_uuid_to_a_process_with_other_code() -> None:
    made = Holds(1)
    asked = pickle.dumps(made) if made.uuid() else b""
    assert made.uuid().encode() not in asked


def test_a_compilation_leaves_the_uuids_of_shipped_passes_as_they_were(inductor: Any) -> None:
    """Records, registered operators and patched functions of torch are state."""
    kinds: list[Any] = [ConvChooser, NDTilingWorkaroundPass, TemporalConvPass]
    before = [make().uuid() for make in kinds]
    options = PassPipeline([make() for make in kinds]).inductor_options()
    torch.compile(torch.nn.Conv2d(3, 4, 3), options=options)(torch.ones(1, 3, 8, 8))
    for make in kinds:
        delattr(make, REMEMBERED)
    assert [make().uuid() for make in kinds] == before
