# SPDX-License-Identifier: Apache-2.0
"""What the first real call verifies; ops that write: what is bumped, what a compiler sees, and undeclared writes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import pytest
import torch
from _signatures import Doubling, plain
from magi_opschema import errors, magi_register_custom_op, op_def, opcheck, register_kernel, register_vmap
from magi_opschema.errors import MutationError
from torch import Tensor


@dataclass(frozen=True)
class Config:
    kind: str = "right"


FAKES = {
    "shape": lambda x, cfg: x.new_empty(1),
    "dtype": lambda x, cfg: torch.empty_like(x, dtype=torch.float64),
    "device": lambda x, cfg: torch.empty_like(x, device="meta"),
    "strides": lambda x, cfg: x.new_empty(x.shape[::-1]).t(),
}


FORMS: dict[str, Callable[..., Any]] = {
    "eager": lambda op: op,
    "aot_eager": lambda op: torch.compile(op, fullgraph=True, backend="aot_eager"),
    "inductor": lambda op: torch.compile(op, fullgraph=True),
}


@pytest.mark.parametrize(
    ("what", "form"), [*((what, "eager") for what in FAKES), ("shape", "aot_eager"), ("shape", "inductor")]
)
def test_fake_that_says_something_else_is_found_at_every_call_until_one_passes(ns: str, what: str, form: str) -> None:
    @magi_register_custom_op(f"{ns}::copy", infer_output_meta_fn=FAKES[what])
    def copy(x: Tensor, cfg: Config = Config()) -> Tensor:
        return x.clone()

    call = FORMS[form](copy)
    for _ in range(2):
        with pytest.raises(
            errors.FakeMismatchError, match=rf"{ns}::copy: 'output' has {what} .* the fake says .*test_checks"
        ):
            call(torch.randn(2, 3))


@pytest.mark.parametrize("is_always", [False, True])
def test_a_check_that_passed_is_repeated_only_if_the_decorator_says_so(
    ns: str, monkeypatch: pytest.MonkeyPatch, is_always: bool
) -> None:
    monkeypatch.setenv("MAGI_OPSCHEMA_CHECK", str(int(is_always)))

    @magi_register_custom_op(f"{ns}::first")
    def first(x: Tensor, cfg: Config = Config()) -> Tensor:
        return x[:1].clone()

    monkeypatch.delenv("MAGI_OPSCHEMA_CHECK")
    with pytest.raises(errors.FakeMismatchError):
        first(torch.ones(3))
    first(torch.ones(1))
    with pytest.raises(errors.FakeMismatchError) if is_always else contextlib.nullcontext():
        first(torch.ones(3))


@pytest.mark.parametrize("form", ["aot_eager", "inductor"])
def test_a_fake_that_is_right_for_one_dtype_alone_is_found_where_another_was_compiled(ns: str, form: str) -> None:
    @magi_register_custom_op(f"{ns}::upcast", infer_output_meta_fn=["x"])
    def upcast(x: Tensor, rounded: bool = False) -> Tensor:
        return (x.float() * 3).to(x.dtype if rounded else torch.float32)

    call = FORMS[form](upcast)
    full, half = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    call(full)
    call(half, rounded=True)
    for _ in range(2):
        upcast(full)  # passed before, and does not count for the other kind
        with pytest.raises(errors.FakeMismatchError, match="has dtype torch.float32, and the fake says torch.bfloat16"):
            call(half)


@pytest.mark.parametrize("is_given_later", [False, True])
def test_a_fake_that_runs_the_body_is_compared_only_for_what_was_traced(ns: str, is_given_later: bool) -> None:
    def fake(x: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=torch.float64)

    def default(x: Tensor) -> Tensor:
        return fake(x)

    default.runs_body, default.adopt_fake = True, lambda given: given  # type: ignore[attr-defined]

    @magi_register_custom_op(f"{ns}::copied", infer_output_meta_fn=default)
    def op(x: Tensor) -> Tensor:
        return x.clone()

    if is_given_later:
        op.register_fake(fake)
    else:
        op(torch.ones(3))
        with torch._subclasses.FakeTensorMode():
            op(torch.ones(3))
    with pytest.raises(errors.FakeMismatchError, match="has dtype torch.float32, and the fake says torch.float64"):
        op(torch.ones(3))


def test_a_kind_of_call_that_was_traced_alone_costs_the_others_no_check(ns: str) -> None:
    calls = []

    def fake(x: Tensor, cfg: Config = Config()) -> Tensor:
        calls.append(x.dtype)
        return torch.empty_like(x)

    @magi_register_custom_op(f"{ns}::copied", infer_output_meta_fn=fake)
    def copied(x: Tensor, cfg: Config = Config()) -> Tensor:
        return x.clone()

    copied(torch.ones(3))
    with torch._subclasses.FakeTensorMode():
        copied(torch.ones(3, dtype=torch.bfloat16))
    copied(torch.ones(3))
    copied(torch.ones(3))
    assert calls == [torch.float32, torch.bfloat16]


def test_fake_that_fails_is_an_error_with_its_cause(ns: str) -> None:
    def fake(x: Tensor) -> Tensor:
        return torch.empty(x.undefined)  # type: ignore[attr-defined]

    @magi_register_custom_op(f"{ns}::copy", infer_output_meta_fn=fake)
    def copy(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(errors.FakeMismatchError, match="the fake failed on the arguments of a real call"):
        copy(torch.ones(1))


def test_size_that_depends_on_data(ns: str) -> None:
    def fake(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)

    @magi_register_custom_op(f"{ns}::nonzero", infer_output_meta_fn=fake)
    def nonzero(x: Tensor) -> Tensor:
        return x.nonzero().flatten()

    assert nonzero(torch.tensor([0.0, 1.0, 2.0])).tolist() == [1, 2]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["the input", "a view", "twice"])
def test_aliasing(ns: str, kind: str, form: str) -> None:
    @magi_register_custom_op(f"{ns}::alias", infer_output_meta_fn=["x", "x"])
    def alias(x: Tensor) -> tuple[Tensor, Tensor]:
        copy = x.clone()
        return {"the input": (copy, x), "a view": (copy, x[:]), "twice": (copy, copy)}[kind]

    with pytest.raises(errors.AliasingError, match=rf"{ns}::alias: 'output\.1' shares its memory with"):
        FORMS[form](alias)(torch.ones(3))


class Plain(NamedTuple):
    x: float
    y: float = 1.0


class DoublingTuple(Plain):
    def __new__(cls, x: float, y: float = 1.0) -> Self:
        return super().__new__(cls, x * 2, y)


class ShiftedTuple(Plain):
    @property
    def x(self) -> float:
        return self[0] + 1


class ReadAnew(Plain):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found + 1 if name == "x" else found


class Making(type):
    def __call__(cls, x: float, y: float = 1.0) -> Any:
        return super().__call__(x + 1, y)


@dataclass(frozen=True)
class Made(metaclass=Making):
    x: float
    y: float = 1.0


class Labelled(Plain):
    """Its own `__new__` and `__init__` change nothing."""

    label: str

    def __new__(cls, *values: float, **named: float) -> Self:
        return super().__new__(cls, *values, **named)

    def __init__(self, x: float, y: float = 1.0) -> None:
        self.label = f"{x}, {y}"


# Each holds 2.0 where it is made of 1.0, and what it holds once it is made of that.
CHANGED = {Doubling: 4.0, DoublingTuple: 4.0, ShiftedTuple: 3.0, ReadAnew: 3.0, Made: 3.0}


@pytest.mark.parametrize("where", ["passed", "returned"])
@pytest.mark.parametrize("cls", CHANGED)
def test_every_class_that_changes_its_fields_is_found(ns: str, cls: Any, where: str) -> None:
    def body(x: Tensor, *, cfg: Any) -> Any:
        return x * 2 if where == "passed" else cls(1.0)

    body.__annotations__ |= {"cfg": cls, "return": Tensor} if where == "passed" else {"cfg": float, "return": cls}
    fake = (lambda x, *, cfg: x) if where == "passed" else (lambda x, *, cfg: cls(1.0))
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=fake)(body)
    sentence = (
        rf"{ns}::op: '(cfg|output)\.x' was 2.0 and is {CHANGED[cls]} after the op rebuilt its record .*test_checks"
    )
    with pytest.raises(errors.RoundTripError, match=sentence):
        op(torch.ones(2), cfg=cls(1.0) if where == "passed" else 1.0)
    if (where, cls) == ("passed", Doubling):  # of nothing and of NaN the double is the same
        assert op(torch.ones(2), cfg=Doubling(0.0)).tolist() == [2.0, 2.0]


def test_a_named_tuple_with_methods_of_its_own_that_keep_the_fields(ns: str) -> None:
    seen: list[Labelled] = []

    @magi_register_custom_op(f"{ns}::op")
    def op(x: Tensor, cfg: Labelled) -> Tensor:
        seen.append(cfg)
        return x * cfg.x

    op(torch.ones(2), Labelled(3.0, 4.0))
    assert (type(seen[0]), seen[0], seen[0].label) == (Labelled, (3.0, 4.0), "3.0, 4.0")


@dataclass(frozen=True)
class Target:
    out: Tensor
    factor: int = 1
    more: Tensor | None = None


Op = Callable[[Tensor, Target], None]


def make_fill(ns: str, mutates: tuple[str, ...] = ("target",)) -> Op:
    @magi_register_custom_op(f"{ns}::fill", mutates_args=mutates)
    def fill(x: Tensor, target: Target) -> None:
        target.out.copy_(x * target.factor)
        if target.more is not None:
            target.more.copy_(x)

    return fill


def callers(fill: Op) -> dict[str, Op]:
    torch_op: Any = op_def(fill).torch_op

    def compiled(backend: str) -> Op:
        call = torch.compile(lambda x, out, more: fill(x, Target(out, 2, more)), fullgraph=True, backend=backend)
        return lambda x, target: call(x, target.out, target.more)

    return {
        "eager": fill,
        "torch_op": lambda x, target: torch_op(x, target.out, target.factor, target.more),
        "compiled": compiled("aot_eager"),
        "inductor": compiled("inductor"),
    }


@pytest.mark.parametrize("names", [("target",), ("target.out", "target.more"), ("target__out", "target.more")])
def test_schema_marks_what_is_written(ns: str, names: tuple[str, ...]) -> None:
    fill = make_fill(ns, names)
    schema = op_def(fill).lowering.schema
    assert schema == "fill(Tensor x, Tensor(a0!) target__out, SymInt target__factor, Tensor(a1!)? target__more) -> ()"


@pytest.mark.parametrize("caller", ["eager", "torch_op", "compiled", "inductor"])
@pytest.mark.parametrize("with_more", [False, True])
def test_written_and_version_bumped(ns: str, caller: str, with_more: bool) -> None:
    call = callers(make_fill(ns))[caller]
    with torch.inference_mode():
        plain = Target(torch.zeros(3), 2)
        call(torch.ones(3), plain)
        assert plain.out.tolist() == [2.0, 2.0, 2.0]
    target = Target(torch.zeros(3), 2, torch.zeros(3) if with_more else None)
    version = target.out._version
    call(torch.ones(3), target)
    assert target.out.tolist() == [2.0, 2.0, 2.0]
    assert target.out._version > version
    if target.more is not None:
        assert target.more.tolist() == [1.0, 1.0, 1.0]
        assert target.more._version > 0


def test_a_saved_tensor_that_was_written_is_an_error_and_gets_no_gradient_of_others(ns: str) -> None:
    fill = make_fill(ns)
    x, buffer = torch.randn(3, requires_grad=True), torch.zeros(3)
    y = x * buffer
    fill(x, Target(buffer))
    assert not buffer.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("caller", ["eager", "torch_op", "compiled"])
@pytest.mark.parametrize("kind", ["leaf", "part of a graph"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_target_in_a_graph_is_refused(ns: str, caller: str, kind: str) -> None:
    call = callers(make_fill(ns))[caller]
    out = torch.zeros(3, requires_grad=True)
    target = Target(out if kind == "leaf" else out * 1, 2)
    expected: type[Exception] = Exception if caller == "compiled" else errors.MutationError
    with pytest.raises(expected, match="'target.out' is written into, and it requires a gradient"):
        call(torch.ones(3), target)
    with torch.no_grad():
        call(torch.ones(3), target)


def test_opcheck(ns: str) -> None:
    results = opcheck(make_fill(ns), (torch.ones(3), Target(torch.zeros(3), 2)))
    assert set(results.values()) == {"SUCCESS"}


def test_vmap_element_by_element_and_by_rule(ns: str) -> None:
    fill = make_fill(ns)
    x, buffer = torch.randn(4, 3), torch.zeros(4, 3)
    torch.vmap(lambda x, out: (fill(x, Target(out, 2)), out)[1])(x, buffer)
    torch.testing.assert_close(buffer, x * 2)
    with pytest.raises(errors.RuleError, match="would write into 'target.out', which has no batch dimension"):
        torch.vmap(lambda x: fill(x, Target(torch.zeros(3))))(x)

    @register_vmap(fill)
    def rule(info: Any, in_dims: Any, x: Tensor, target: Target) -> Any:
        assert in_dims[1]["out"] == 0
        fill(x, Target(target.out, target.factor + 1))
        return None, None

    torch.vmap(lambda x, out: (fill(x, Target(out, 2)), out)[1])(x, buffer)
    torch.testing.assert_close(buffer, x * 3)


@dataclass(frozen=True)
class Inner:
    scale: Tensor
    eps: float = 1.0


@dataclass(frozen=True)
class Cfg:
    inner: Inner
    maybe: Inner | None = None


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape or (4,))


WRITES: dict[str, tuple[str, Callable[..., object]]] = {
    "a Tensor": ("x", lambda x, cfg, xs, ys, z: x.add_(1)),
    "a view of it": ("x", lambda x, cfg, xs, ys, z: x[1:].mul_(3)),
    "by index": ("x", lambda x, cfg, xs, ys, z: x.__setitem__(0, 5.0)),
    "out=": ("x", lambda x, cfg, xs, ys, z: torch.mul(xs[0], 3, out=x)),
    "under no_grad": ("x", lambda x, cfg, xs, ys, z: torch.no_grad()(x.fill_)(7)),
    "its sizes": ("x", lambda x, cfg, xs, ys, z: x.unsqueeze_(0)),
    "a record": ("cfg.inner.scale", lambda x, cfg, xs, ys, z: cfg.inner.scale.zero_()),
    "a record that may be None": ("cfg.maybe.scale", lambda x, cfg, xs, ys, z: cfg.maybe.scale.zero_()),
    "a list": ("xs", lambda x, cfg, xs, ys, z: xs[1].zero_()),
    "a list with gaps": ("ys", lambda x, cfg, xs, ys, z: ys[1].zero_()),
    "an optional Tensor": ("z", lambda x, cfg, xs, ys, z: z.random_()),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("what", WRITES)
def test_a_write_is_found_at_the_first_call(ns: str, what: str, mode: Callable[[], Any]) -> None:
    path, write = WRITES[what]

    @magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])
    def op(x: Tensor, cfg: Cfg, xs: list[Tensor], ys: list[Tensor | None], z: Tensor | None) -> Tensor:
        output = x * 2
        write(x, cfg, xs, ys, z)
        return output

    sentence = f"{ns}::op: the body wrote into '{path}', which mutates_args does not name."
    for _ in range(2):  # it is not taken for good at the second
        with mode(), pytest.raises(MutationError, match=re.escape(sentence)) as caught:
            op(ones(), Cfg(Inner(ones()), Inner(ones())), [ones(), ones()], [None, ones()], ones())
        assert re.search(r"\(test_checks\.py:\d+\)$", str(caught.value))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_with_and_without_a_gradient(ns: str, needs_grad: bool) -> None:
    @magi_register_custom_op(f"{ns}::op", backward_fn=lambda ctx, grad: (grad * 2, None))
    def op(x: Tensor, y: Tensor) -> Tensor:
        y.detach().add_(1)
        return x * 2

    for call in (op, op_def(op).torch_op):
        with pytest.raises(MutationError, match="the body wrote into 'y'"):
            call(ones().requires_grad_(needs_grad), ones())


def test_beside_a_tensor_that_is_named(ns: str) -> None:
    """The kernel of a mutating op runs where torch counts no writes."""

    @magi_register_custom_op(f"{ns}::op", mutates_args=("out", "outs"))
    def op(x: Tensor, out: Tensor, outs: list[Tensor]) -> None:
        out.copy_(x)
        x.zero_()

    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(MutationError, match="the body wrote into 'x'"):
            op(ones(), ones(), [ones()])
    other = ones()
    with pytest.raises(MutationError, match="the body wrote into 'x'"):
        op(other, ones(), [other.clone()])


def test_in_the_body_of_one_device_in_compiled_code_and_under_vmap(ns: str) -> None:
    op = magi_register_custom_op(f"{ns}::op")(plain)

    @register_kernel(op, "cpu")
    def on_cpu(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    with pytest.raises(MutationError, match=f"{ns}::op: the body wrote into 'x'"):
        torch.vmap(op)(ones(2, 3))
    with pytest.raises(MutationError, match=f"{ns}::op: the body wrote into 'x'"):
        torch.compile(op, backend="aot_eager", fullgraph=True)(ones())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int8])
def test_an_inference_tensor_by_its_contents(ns: str, dtype: torch.dtype) -> None:
    @magi_register_custom_op(f"{ns}::op")
    def op(x: Tensor, writes: bool) -> Tensor:
        copy = x.clone()
        if writes:
            x.view(-1)[-1:].zero_()
        return copy

    with torch.inference_mode():
        x = torch.ones(3, 4).to(dtype)
        with pytest.raises(MutationError, match="the body wrote into 'x'"):
            op(x, True)
        same = torch.full((4,), float("nan")).to(dtype) if dtype.is_floating_point else x
        op(same, False)


def test_a_large_inference_tensor_only_where_every_call_is_checked(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: Tensor) -> Tensor:
        x.zero_()
        return x.new_empty(1)

    def fake(x: Tensor) -> Tensor:
        return x.new_empty(1)

    seldom = magi_register_custom_op(f"{ns}::seldom", infer_output_meta_fn=fake)(body)
    monkeypatch.setenv("MAGI_OPSCHEMA_CHECK", "1")
    always = magi_register_custom_op(f"{ns}::always", infer_output_meta_fn=fake)(body)
    with torch.inference_mode():
        x = torch.ones(2**24 + 1, dtype=torch.int8)
        seldom(x)
        x.fill_(1)
        with pytest.raises(MutationError, match="the body wrote into 'x'"):
            always(x)


class TestHonest:
    """What must not be refused."""

    def test_views_of_one_buffer_of_which_one_is_named(self, ns: str) -> None:
        @magi_register_custom_op(f"{ns}::rotate", mutates_args=("q", "k"))
        def rotate(q: Tensor, k: Tensor, v: Tensor) -> None:
            q.neg_()
            k.neg_()

        for mode in (torch.enable_grad, torch.inference_mode):
            with mode():
                q, k, v = torch.ones(2, 6).chunk(3, dim=-1)
                rotate(q, k, v)
                assert v.eq(1).all()

    def test_an_empty_buffer_first(self, ns: str) -> None:
        @magi_register_custom_op(f"{ns}::op", mutates_args=("out",))
        def op(x: Tensor, out: Tensor) -> None:
            out.copy_(x)

        x, out = torch.ones(0, 6).chunk(2, dim=-1)
        op(x, out)

    def test_the_same_tensor_twice(self, ns: str) -> None:
        @magi_register_custom_op(f"{ns}::norm", mutates_args=("out",))
        def norm(x: Tensor, out: Tensor) -> None:
            torch.mul(x, 2, out=out)

        x = ones()
        norm(x, x)
        norm(x.view(2, 2), x.detach().view(2, 2))
        assert x.tolist() == [4.0] * 4

    def test_a_nested_op_and_scratch_of_its_own(self, ns: str) -> None:
        @magi_register_custom_op(f"{ns}::fill", mutates_args=("out",))
        def fill(out: Tensor, value: float) -> None:
            out.fill_(value)

        @magi_register_custom_op(f"{ns}::op", backward_fn=lambda ctx, grad: grad)
        def op(x: Tensor) -> Tensor:
            scratch = torch.empty_like(x)
            fill(scratch, 1.0)
            scratch[0] += 1
            return scratch.add_(x)

        x = ones().requires_grad_()
        op(x).sum().backward()
        assert op(x.detach()).tolist() == [3.0, 2.0, 2.0, 2.0]

    def test_the_output_of_a_mutating_op_is_a_tensor_like_any_other(self, ns: str) -> None:
        """The first call of one counts writes, which the kernel does not else."""

        @magi_register_custom_op(f"{ns}::op", mutates_args=("out",), infer_output_meta_fn=["out"])
        def op(out: Tensor) -> Tensor:
            out.add_(1)
            return torch.zeros(2, 2).view(4)

        weight = ones().requires_grad_()
        for _ in range(2):
            output = op(ones())
            output.mul_(weight).sum().backward()
        assert weight.grad is not None
