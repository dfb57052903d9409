# SPDX-License-Identifier: Apache-2.0
"""Environment variables: a name or a value that means nothing is an error that names those which do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from magi_opschema import lower_signature, magi_register_custom_op
from magi_opschema.errors import EnvironmentVariableError
from torch import Tensor


def twice(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MAGI_OPSCHEMA_CHEKC", " Did you mean 'MAGI_OPSCHEMA_CHECK'?"),
        ("MAGI_OPSCHEMA_DUMPS", " Did you mean 'MAGI_OPSCHEMA_DUMP'?"),
        ("MAGI_OPSCHEMA_CACHE", " Did you mean 'MAGI_OPSCHEMA_CACHE_DIR'?"),
        ("MAGI_OPSCHEMA_", " Did you mean 'MAGI_OPSCHEMA_DUMP'?"),
        ("MAGI_OPSCHEMA_SOMETHING_ELSE_ALTOGETHER", ""),
    ],
)
def test_an_unknown_name(ns: str, monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    monkeypatch.setenv(name, "1")
    sentence = f"the environment variable {name} is not a setting of magi-opschema.{hint} Choose one of these ("
    uses: list[Callable[[], object]] = [
        lambda: magi_register_custom_op(f"{ns}::op")(twice),
        lambda: lower_signature(twice),
    ]
    for use in uses:
        with pytest.raises(EnvironmentVariableError, match=re.escape(sentence)) as caught:
            use()
        for known in ("MAGI_OPSCHEMA_CHECK", "MAGI_OPSCHEMA_DUMP", "MAGI_OPSCHEMA_CACHE_DIR"):
            assert f"{known}: " in str(caught.value)
    assert not torch._C._jit_get_schemas_for_operator(f"{ns}::op")
    monkeypatch.delenv(name)
    magi_register_custom_op(f"{ns}::op")(twice)


@pytest.mark.parametrize("value", ["yes", "2", "on", " 1", "True"])
def test_a_switch_that_is_neither_on_nor_off(ns: str, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MAGI_OPSCHEMA_CHECK", value)
    sentence = f"MAGI_OPSCHEMA_CHECK={value!r} is neither on nor off. Set it to 1 or 0, or unset it."
    with pytest.raises(EnvironmentVariableError, match=re.escape(sentence)):
        magi_register_custom_op(f"{ns}::op")(twice)
    assert not torch._C._jit_get_schemas_for_operator(f"{ns}::op")


@pytest.mark.parametrize("value", ["", "0"])
def test_a_switch_that_is_off(ns: str, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MAGI_OPSCHEMA_CHECK", value)
    op = magi_register_custom_op(f"{ns}::op")(twice)
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("kind", ["a file", "below a file", "no place"])
def test_a_dump_folder_that_cannot_be_written(
    ns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    folder = {"a file": file, "below a file": file / "deep", "no place": Path("/proc/magi")}[kind]
    monkeypatch.setenv("MAGI_OPSCHEMA_DUMP", str(folder))
    sentence = f"MAGI_OPSCHEMA_DUMP={folder} is not a folder that can be written: "
    with pytest.raises(EnvironmentVariableError, match=re.escape(sentence)) as caught:
        magi_register_custom_op(f"{ns}::op")(twice)
    assert str(caught.value).endswith(". Name another folder, or unset it.")
    monkeypatch.delenv("MAGI_OPSCHEMA_DUMP")
    magi_register_custom_op(f"{ns}::op")(twice)  # nothing was left behind
