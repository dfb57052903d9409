# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and ``sys.exit`` while this backend works arrive as themselves, and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_backend import MismatchError
from magi_backend._records.log import Collector, collecting
from magi_backend._repairs._defect import is_active, known_defects, repaired
from torch import Tensor, nn
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import Scheduler


INTERRUPTS = [KeyboardInterrupt, SystemExit]

# Where one strikes: in the lowering, the scheduler, and the code that is written last.
PLACES = [(GraphLowering, "run"), (Scheduler, "dead_node_elimination"), (GraphLowering, "codegen")]


@pytest.mark.parametrize("kind", INTERRUPTS)
@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_in_a_compilation(kind: type[BaseException], owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*_: Any, **__: Any) -> None:
        raise kind

    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 8, 8)
    # With magi.strict, which is on in these tests, nothing would be compiled once more.
    compiled = torch.compile(model, backend="magi", dynamic=True, options={"magi.strict": False})
    settings = torch._inductor.config.get_config_copy()

    with monkeypatch.context() as patch, collecting(Collector(fresh=True)) as collector, torch.no_grad():
        patch.setattr(owner, name, strike)
        with pytest.raises(kind) as caught:
            compiled(x)

    assert type(caught.value) is kind
    assert torch._inductor.config.get_config_copy() == settings
    assert not any(is_active(defect.name) for defect in known_defects())
    (compilation,) = collector.compilations()
    assert compilation.error.startswith(kind.__name__)
    assert all(graph.error.startswith(kind.__name__) for graph in compilation.graphs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_inside_a_repair(kind: type[BaseException]) -> None:
    class Struck:
        def __lt__(self, other: object) -> bool:
            raise kind

        __gt__ = __lt__

    reported: list[str] = []
    with pytest.raises(kind), repaired(known_defects(), reported.append):
        ir.get_stride_order([Struck(), Struck()])

    assert not any(is_active(defect.name) for defect in known_defects())
    assert reported == []


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_in_check_which_then_checks_the_next_call(kind: type[BaseException], ns: str) -> None:
    state: dict[str, bool] = {"struck": True, "wrong": True}

    @torch.library.custom_op(f"{ns}::lie", mutates_args=())
    def lie(x: Tensor) -> Tensor:
        if state["struck"]:
            raise kind
        # Eager and compiled calls alternate under magi.check.
        state["turn"] = not state.get("turn", False)
        return x + 1 if state["turn"] or not state["wrong"] else x + 2

    @lie.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    options: dict[str, Any] = {"magi.check": True, "magi.progress": False}
    fn = torch.compile(lambda x: lie(x) * 1, backend="magi", options=options)

    with pytest.raises(kind):
        fn(torch.ones(3))
    state["struck"] = False
    for _call in range(2):
        state["turn"] = False
        with pytest.raises(MismatchError, match=r"output.* of the compiled code differs from eager by 1"):
            fn(torch.ones(3))
    state["wrong"] = False
    torch.testing.assert_close(fn(torch.ones(3)), torch.full((3,), 2.0))
