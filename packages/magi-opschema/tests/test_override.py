# SPDX-License-Identifier: Apache-2.0
"""`override=True`: the new op takes the whole place of the earlier one, or the earlier one stays whole."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from magi_opschema import errors, magi_register_custom_op, op_def, register_autocast, register_kernel, register_vmap
from magi_opschema._ops import define as _definition
from magi_opschema._ops import registration as _registration
from torch import Tensor


@dataclass(frozen=True)
class Config:
    factor: float = 2.0


def make_scale(name: str, more: float = 0.0, **options: Any) -> Callable[..., Tensor]:
    @magi_register_custom_op(
        name, infer_output_meta_fn=["x"], backward_fn=lambda ctx, grad: (grad * 7, None), **options
    )
    def scale(x: Tensor, cfg: Config = Config()) -> Tensor:
        return x * cfg.factor + more

    return scale


FAILURES: dict[str, tuple[Any, str]] = {
    "the schema": (torch.library.Library, "define"),
    "the body": (_registration, "body_kernel"),
    "the fake": (_registration, "register_fake"),
    "the last kernel": (_registration, "transforms_kernel"),
    "the exposed function": (_definition, "compile_exposed"),
}


def fail_once(patch: pytest.MonkeyPatch, where: Any, name: str) -> None:
    """The next call fails; those after it, which put the earlier op back, do not."""
    original = getattr(where, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        patch.setattr(where, name, original)
        raise RuntimeError("planted")

    patch.setattr(where, name, fail)


@pytest.mark.parametrize("at", sorted(FAILURES))
def test_a_failed_replacement_does_not_change_the_earlier_op(ns: str, at: str) -> None:
    name = f"{ns}::scale"
    scale = make_scale(name)
    calls: list[str] = []

    @register_kernel(scale, "cpu")
    def on_cpu(x: Tensor, cfg: Config) -> Tensor:
        calls.append("cpu")
        return x * cfg.factor

    @register_vmap(scale)
    def rule(info: Any, in_dims: Any, x: Tensor, cfg: Config) -> Any:
        calls.append("rule")
        return scale(x, cfg), in_dims[0]

    register_autocast(scale, "cpu", torch.bfloat16)
    before = op_def(name)

    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, *FAILURES[at])
        with pytest.raises(RuntimeError, match="planted"):
            make_scale(name, 100.0, override=True)

    assert op_def(name) is before
    assert getattr(torch.ops, ns).scale.default is before.torch_op
    assert "scale" in list(getattr(torch.ops, ns))
    x = torch.ones(3, requires_grad=True)
    for call in (scale, torch.compile(scale, fullgraph=True, backend="aot_eager")):
        y = call(x, Config(3.0))
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert (y.tolist(), grad.tolist()) == ([3.0] * 3, [7.0] * 3)
    assert before.torch_op(x.detach(), 3.0).tolist() == [3.0] * 3
    assert scale(torch.empty(5, device="meta")).shape == (5,)
    assert set(calls) == {"cpu"}
    torch.vmap(scale)(torch.ones(2, 3))
    assert "rule" in calls
    with torch.autocast("cpu", torch.bfloat16):
        assert scale(torch.ones(2)).dtype == torch.bfloat16

    replaced = make_scale(name, 100.0, override=True)
    assert replaced(torch.ones(1)).tolist() == [102.0]


@pytest.mark.parametrize("at", sorted(FAILURES))
def test_a_failed_first_registration_leaves_the_name_free(ns: str, at: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, *FAILURES[at])
        with pytest.raises(RuntimeError, match="planted"):
            make_scale(f"{ns}::scale")
    with pytest.raises(errors.UnknownOpError):
        op_def(f"{ns}::scale")
    assert make_scale(f"{ns}::scale")(torch.ones(1)).tolist() == [2.0]


def test_a_wrong_option_is_found_before_the_earlier_op_is_touched(ns: str) -> None:
    scale = make_scale(f"{ns}::scale")
    with pytest.raises(errors.OptionError, match="mutates_args names 'nothing'"):
        make_scale(f"{ns}::scale", override=True, mutates_args=("nothing",))
    assert scale(torch.ones(1)).tolist() == [2.0]


def test_torch_ops_names_the_new_op_after_the_earlier_one_is_collected(ns: str) -> None:
    """A library of torch clears `torch.ops` when it is collected, whoever has the name by then."""
    make_scale(f"{ns}::scale")
    for more in (1.0, 2.0):
        replaced = make_scale(f"{ns}::scale", more, override=True)
        gc.collect()
        assert getattr(torch.ops, ns).scale.default is op_def(replaced).torch_op


def test_what_was_kept_of_the_earlier_op_runs_the_new_body(ns: str) -> None:
    """As in a reload, where other modules hold the function of before. Once this was a call through freed memory."""
    earlier = make_scale(f"{ns}::scale")
    earlier_op = op_def(earlier).torch_op
    _registration.unregister(op_def(earlier).registration)
    others = [make_scale(f"{ns}::other{i}", 1000.0) for i in range(20)]
    with pytest.raises(RuntimeError):
        earlier(torch.ones(1))
    make_scale(f"{ns}::scale", 100.0, override=True)
    assert earlier(torch.ones(1)).tolist() == [102.0]
    assert earlier_op(torch.ones(1), 3.0).tolist() == [103.0]
    assert others[0](torch.ones(1)).tolist() == [1002.0]


def test_a_replacement_may_have_another_signature(ns: str) -> None:
    earlier = make_scale(f"{ns}::scale")

    @magi_register_custom_op(f"{ns}::scale", override=True)
    def scale(x: Tensor) -> Tensor:
        return x * 10

    assert scale(torch.ones(1)).tolist() == [10.0]
    assert torch.compile(scale, fullgraph=True, backend="aot_eager")(torch.ones(1)).tolist() == [10.0]
    with pytest.raises(RuntimeError, match=f"{ns}::scale"):
        earlier(torch.ones(1))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_of_before_takes_the_new_defaults(ns: str, backend: str) -> None:
    """A default equals what the call passes, so torch leaves it out of the graph, and asks a schema for it later."""

    def define(factor: float) -> None:
        @magi_register_custom_op(f"{ns}::scale", override=True)
        def scale(x: Tensor, cfg: Config = Config(factor)) -> Tensor:
            return x * cfg.factor

        current.append(scale)

    current: list[Any] = []
    x = torch.arange(3.0)
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        # What is in torch's caches is another matter: their keys do not know the schema.
        compiled = torch.compile(lambda x: current[-1](x) + 1, backend=backend)
        for factor in (2.0, 5.0, 7.0):
            define(factor)
            assert compiled(x).tolist() == (x * factor + 1).tolist()


def test_dispatch_modes_see_the_new_schema(ns: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            schemas.append(str(func._schema))
            return func(*args, **(kwargs or {}))

    schemas: list[str] = []
    for more in ("", ", int more = 1"):
        namespace: dict[str, Any] = {"Tensor": Tensor}
        exec(f"def scale(x: Tensor{more.replace('int more', 'more: int')}) -> Tensor:\n    return x * 2\n", namespace)
        op = magi_register_custom_op(f"{ns}::scale", override=True)(namespace["scale"])
        with Seen():  # type: ignore[no-untyped-call]
            op(torch.ones(2))
    assert f"{ns}::scale(Tensor x) -> Tensor" in schemas
    assert f"{ns}::scale(Tensor x, SymInt more=1) -> Tensor" in schemas
