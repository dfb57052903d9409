# SPDX-License-Identifier: Apache-2.0
"""What the decorator returns is the user's function to Python, and an op to torch, on every path."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, assert_type

import pytest
import torch
from _signatures import X
from magi_opschema import (
    RegisteredOp,
    magi_register_custom_op,
    op_def,
    register_kernel,
    register_sharding,
    register_vmap,
)
from magi_opschema.errors import RuleError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


Metres = NewType("Metres", float)


@dataclass(frozen=True)
class Cfg:
    scale: float = 2.0
    shift: Tensor | None = None


def derive(ctx: Any, grad: Tensor) -> Any:
    return grad * 2, None, None


register = functools.partial(magi_register_custom_op, infer_output_meta_fn=["x"], backward_fn=derive)


@register("opschema_identity::direct")
def direct(x: Tensor, scale: float = 2.0, *, times: int = 1) -> Tensor:
    """Scale, as torch would take it."""
    return x * scale * times


@register("opschema_identity::lowered")
def lowered(x: Tensor, mode: Literal["a", "b"] = "a", by: Annotated[Metres, "m"] = Metres(2.0)) -> Tensor:
    """Scale, with annotations of our own."""
    return x * by


@register("opschema_identity::flattened")
def flattened(x: Tensor, cfg: Cfg = Cfg(), *, times: int = 1) -> tuple[Tensor]:
    """Scale, with a record."""
    return (x * cfg.scale * times,)


every_path = pytest.mark.parametrize("op", [direct, lowered, flattened], ids=lambda op: op.__name__)


def first(output: Any) -> Tensor:
    (tensor,) = output if isinstance(output, tuple) else (output,)
    return tensor  # type: ignore[no-any-return]


@every_path
class TestFunction:
    def test_what_inspect_says(self, op: Any) -> None:
        plain = op_def(op).fn
        assert inspect.isfunction(op)
        assert op is op_def(op).exposed_op is not plain
        assert (op.__name__, op.__qualname__, op.__module__) == (op_def(op).path, op_def(op).path, __name__)
        assert inspect.getdoc(op) == inspect.getdoc(plain)
        assert inspect.signature(op) == inspect.signature(plain)
        assert typing.get_type_hints(op) == typing.get_type_hints(plain)
        assert typing.get_type_hints(op, include_extras=True) == typing.get_type_hints(plain, include_extras=True)
        assert all(not isinstance(hint, str) for hint in op.__annotations__.values())

    def test_pickle_and_copies(self, op: Any) -> None:
        assert pickle.loads(pickle.dumps(op)) is op
        assert copy.copy(op) is copy.deepcopy(op) is op

    def test_selective_checkpoint(self, op: Any, recorder: Any) -> None:
        def policy(ctx: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if target is op.torch_op else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        x = X.clone().requires_grad_()
        with recorder:
            saved = checkpoint(lambda x: first(op(x)).sin(), x, use_reentrant=False, context_fn=contexts)
            saved.sum().backward()
        torch.testing.assert_close(x.grad, 2 * (X * 2).cos())
        assert recorder.seen.count(op.torch_op) == 1  # it was saved, and not run again


ANNOTATIONS: dict[str, Any] = {"direct": float, "lowered": Annotated[float, "m"], "flattened": Cfg}


def make_op(name: str, path: str, **options: Any) -> RegisteredOp[..., Any]:
    def op(x: Tensor, value: Any) -> Tensor:
        return x * (value.scale if isinstance(value, Cfg) else value)

    op.__annotations__["value"] = ANNOTATIONS[path]
    decorated = magi_register_custom_op(name, **options)(op)
    assert op_def(decorated).path == path
    return decorated


VALUES: dict[str, Any] = {"direct": 3.0, "lowered": 3.0, "flattened": Cfg(3.0)}


@pytest.mark.parametrize("path", VALUES)
class TestTorchLibrary:
    def test_register_kernel_and_autocast(self, ns: str, path: str) -> None:
        op = make_op(f"{ns}::op", path)
        torch.library.register_kernel(op.torch_op, "cpu", lambda x, *values: x + values[0] * 100)
        torch.testing.assert_close(op(X, VALUES[path]), X + 300)
        torch.library.register_autocast(op.torch_op, "cpu", torch.bfloat16)
        with torch.autocast("cpu"):
            assert op(X, VALUES[path]).dtype == torch.bfloat16

    def test_register_torch_dispatch(self, ns: str, path: str) -> None:
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                raise AssertionError

        op = make_op(f"{ns}::op", path)
        torch.library.register_torch_dispatch(op.torch_op, Mode, lambda mode, func, types, args, kwargs: X * 9)
        with Mode():  # type: ignore[no-untyped-call]
            output = op(X, VALUES[path])
        assert torch.equal(output, X * 9)

    @pytest.mark.parametrize("rule", ["register_autograd", "register_vmap"])
    def test_a_rule_for_derivatives_is_given_to_the_op_itself(self, ns: str, path: str, rule: str) -> None:
        op, value = make_op(f"{ns}::op", path, backward_fn=lambda ctx, grad: (grad * 3, None)), VALUES[path]
        sentence = (
            rf"::op: torch\.library\.{rule}, or a kernel at (Autograd|FuncTorchBatched), would change some of its "
            rf"calls and not others\. Use the op's own: op\.{rule}, or {rule} of magi_opschema\. \(test_identity"
        )
        for named in (f"{ns}::op", op.torch_op):
            with pytest.raises(RuleError, match=sentence):
                getattr(torch.library, rule)(named, lambda *args: pytest.fail("it was refused"))
        x = X.clone().requires_grad_()
        for call in (op, torch.compile(op, backend="aot_eager")):
            (grad,) = torch.autograd.grad(call(x, value).sum(), x)
            assert torch.equal(grad, torch.full_like(X, 3.0))
        batch = torch.ones(2, 3)
        torch.testing.assert_close(torch.vmap(op, in_dims=(0, None))(batch, value), batch * 3)


@dataclass(frozen=True)
class Many:
    a: Tensor | None
    b: list[Tensor]
    c: list[int]
    d: float | None
    e: torch.dtype
    f: torch.device
    g: str | None
    h: bool
    i: int | float
    j: list[float] | None
    k: Literal["x", "y"] = "x"
    l: int = 3  # noqa: E741


def test_infer_schema_with_every_type_that_it_knows(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::op", mutates_args=["m.b"])
    def op(x: Tensor, m: Many) -> None: ...

    @magi_register_custom_op(f"{ns}::pair", infer_output_meta_fn=lambda x, cfg: (x, [x]))
    def pair(x: Tensor, cfg: Cfg) -> tuple[Tensor, list[Tensor]]:
        return x + 1, [x + 2]

    for known, mutated in ((op, ["m__b"]), (pair, [])):
        definition = op_def(known)
        inferred = torch.library.infer_schema(definition.lowered_fn, mutates_args=mutated, op_name=known.__name__)
        assert re.sub(r"\(a\d+!\)", "(a!)", inferred) == re.sub(r"\(a\d+!\)", "(a!)", definition.lowering.schema)


class TestLater:
    @pytest.mark.parametrize("path", VALUES)
    def test_a_fake(self, ns: str, path: str) -> None:
        def op(x: Tensor, value: Any) -> Tensor:
            return x[:1].clone()

        op.__annotations__["value"] = ANNOTATIONS[path]
        halved: Any = magi_register_custom_op(f"{ns}::op")(op)

        @halved.register_fake()
        def halved_fake(x: Tensor, value: Any) -> Tensor:
            assert isinstance(value, Cfg) is (path == "flattened")
            return x.new_empty(1)

        value = VALUES[path]
        assert halved(X, value).shape == (1,)
        compiled: Any = torch.compile(halved, fullgraph=True, backend="aot_eager")
        assert compiled(X, value).shape == (1,)
        assert halved_fake(X, value).shape == (1,)

    def test_a_fake_in_place_of_a_default_that_a_library_made(self, ns: str) -> None:
        used: list[str] = []

        def default(x: Tensor, value: float) -> Tensor:
            raise AssertionError("the default is used")

        def adopt(fake: Any) -> Any:
            def wrapped(x: Tensor, value: float) -> Tensor:
                used.append("wrapped")
                return fake(x, value)  # type: ignore[no-any-return]

            return wrapped

        default.adopt_fake = adopt  # type: ignore[attr-defined]
        op = make_op(f"{ns}::op", "direct", infer_output_meta_fn=default)

        @op.register_fake
        def fake(x: Tensor, value: float) -> Tensor:
            used.append("given")
            return torch.empty_like(x)

        op(X, 2.0)
        assert used == ["wrapped", "given"]
        with pytest.raises(RuleError, match=r"it has a fake already \(test_identity.py:\d+\)"):
            op.register_fake(fake)

    @pytest.mark.parametrize("path", VALUES)
    @pytest.mark.parametrize("has_context", [False, True])
    def test_a_gradient(self, ns: str, path: str, has_context: bool) -> None:
        op = make_op(f"{ns}::op", path)

        def save(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.factor = 5.0

        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * (ctx.factor if has_context else 7.0), None

        assert op.register_autograd(backward, setup_context=save if has_context else None) is backward
        x = X.clone().requires_grad_()
        for run in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
            (grad,) = torch.autograd.grad(run(x, VALUES[path]).sum(), x)
            torch.testing.assert_close(grad, torch.full((3,), 5.0 if has_context else 7.0))
        derived: Any = torch.func.grad(lambda x: op(x, VALUES[path]).sum())  # type: ignore[misc]
        torch.testing.assert_close(derived(X), torch.full((3,), 5.0 if has_context else 7.0))

    @pytest.mark.parametrize("first_use", ["called", "traced"])
    @pytest.mark.parametrize("what", ["fake", "gradient"])
    def test_too_late(self, ns: str, first_use: str, what: str) -> None:
        op = make_op(f"{ns}::op", "direct")
        if first_use == "called":
            op(X, 2.0)
        else:
            with torch._subclasses.FakeTensorMode():
                op(torch.empty(3), 2.0)
        with pytest.raises(
            RuleError,
            match=rf"{ns}::op: the {what} of test_identity.py:\d+ comes too late: the op was called or traced before, "
            r"and what was compiled then would not have it\. Register it right after the definition, or give it to the",
        ):
            give(op, what)

    @pytest.mark.parametrize("what", ["fake", "gradient"])
    @pytest.mark.parametrize("earlier", ["decorator", "method"])
    @pytest.mark.parametrize("is_used", [False, True])
    def test_twice(self, ns: str, what: str, earlier: str, is_used: bool) -> None:
        options: dict[str, Any] = {}
        if earlier == "decorator":
            options = {"infer_output_meta_fn": ["x"]} if what == "fake" else {"backward_fn": lambda ctx, g: (g, None)}
        op = make_op(f"{ns}::op", "direct", **options)
        if earlier == "method":
            give(op, what)
        if is_used:
            op(X, 2.0)
        where = "infer_output_meta_fn" if (what, earlier) == ("fake", "decorator") else r"test_identity.py:\d+"
        with pytest.raises(
            RuleError,
            match=rf"{ns}::op: it has a {what} already \({where}\); that of test_identity.py:\d+ would be a second\.",
        ):
            give(op, what)

    def test_what_does_not_fit_is_refused_at_once(self, ns: str) -> None:
        op = make_op(f"{ns}::op", "direct")
        with pytest.raises(ValueError, match=r"infer_output_meta_fn is called as infer_output_meta_fn\(x, value\)"):
            op.register_fake(lambda x: x)
        with pytest.raises(ValueError, match=r"backward_fn is called as backward_fn\(ctx, grad\)"):
            op.register_autograd(lambda ctx: None)
        op.register_autograd(lambda ctx, g: (g, None))  # what was refused left nothing behind


def give(op: RegisteredOp[..., Any], what: str) -> None:
    if what == "fake":
        op.register_fake(lambda x, value: torch.empty_like(x))
    else:
        op.register_autograd(lambda ctx, grad: (grad, None))


def test_types_for_a_checker(ns: str) -> None:
    """mypy checks these; at run time `assert_type` returns its argument."""

    @magi_register_custom_op(f"{ns}::typed")
    def typed(x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    def body(x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    def rule(info: Any, in_dims: Any, x: Tensor, scale: float) -> tuple[Tensor, int]:
        return x, 0

    def shardings(x: Any, scale: float) -> list[Any]:
        return []

    assert_type(typed.register_fake(body)(X), Tensor)
    assert_type(typed(X, 2.0), Tensor)
    assert_type(typed.torch_op, torch._ops.OpOverload)
    as_callable: Callable[[Tensor, float], Tensor] = typed
    as_op: RegisteredOp[[Tensor, float], Tensor] = typed
    assert as_callable is as_op
    assert register_kernel(typed, "cpu")(body) is body
    assert_type(register_vmap(typed)(rule)(None, None, X, 1.0), tuple[Tensor, int])
    assert_type(register_vmap(typed, rule)(None, None, X, 1.0), tuple[Tensor, int])
    assert_type(register_sharding(typed)(shardings)(X, 1.0), list[Any])
    assert_type(register_sharding(typed, shardings)(X, 1.0), list[Any])
    assert_type(typed.register_vmap(rule)(None, None, X, 1.0), tuple[Tensor, int])
