# SPDX-License-Identifier: Apache-2.0
"""The code on docs/object-handles.md runs, and does what the page says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from magi_opschema import op_def


if TYPE_CHECKING:
    import pytest


PAGE = (Path(__file__).parent.parent / "docs" / "object-handles.md").read_text()
IMPORTS = """
from magi_opschema import ObjectHandle, magi_register_custom_op, register_object
from torch import Tensor, nn
"""
TRAINED = """
@magi_register_custom_op(
    "mylib::trained", infer_output_meta_fn=["x"], setup_context_fn=save, backward_fn=backward
)
def trained(x: Tensor, runner: ObjectHandle[Runner]) -> Tensor:
    return runner.run(x)
"""


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "handles_page.py").write_text("\n".join([IMPORTS, *examples, TRAINED]))
    monkeypatch.syspath_prepend(str(tmp_path))
    page = importlib.import_module("handles_page")

    assert f"`mylib::{op_def(page.run).lowering.schema}`" in PAGE
    layers = [page.Layer(float(i)) for i in range(12)]
    compiled = torch.compile(lambda layer, x: layer(x), backend="eager", fullgraph=True)
    compiled(layers[0], torch.ones(2))
    with torch.compiler.set_stance("fail_on_recompile"):
        for i, layer in enumerate(layers):
            assert torch.equal(compiled(layer, torch.ones(2)), torch.full((2,), float(i)))

    x = torch.ones(2, requires_grad=True)
    page.trained(x, layers[3].runner).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
