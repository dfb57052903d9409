# SPDX-License-Identifier: Apache-2.0
"""Several bodies of one op: which one serves a call, and that they agree.

Code that Inductor generates calls an op's body past the dispatcher, and only where that is what would run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _signatures import Listening
from magi_opschema import magi_register_custom_op, op_def, opcheck, register_kernel, use_implementation
from magi_opschema.errors import DuplicateOpError, EnvironmentVariableError, FakeMismatchError, RuleError
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._pytree import tree_map


pytestmark = pytest.mark.kernels  # the tests without kernels have no lowerings either


@dataclass(frozen=True)
class Scale:
    factor: float = 2.0
    rows: int = 2


def new_op(name: str, **options: Any) -> Any:
    """An op that multiplies, registered anew."""

    @magi_register_custom_op(f"implementations::{name}", infer_output_meta_fn=["x"], override=True, **options)
    def scaled(x: Tensor, cfg: Scale = Scale(), *, twice: bool = False) -> Tensor:
        return x * cfg.factor * (1 + twice)

    return scaled


def other(x: Tensor, cfg: Scale = Scale(), *, twice: bool = False) -> Tensor:
    return (x + x * twice) * cfg.factor


def test_the_first_that_serves_a_call_runs_by_priority_and_else_the_op_s_own_body() -> None:
    op = new_op("order")
    x = torch.ones(2, 3)
    assert op_def(op).served == {}
    op(x)  # its kernel is compiled before it has implementations
    op.implementation(other, name="anything")
    op.implementation(other, name="rows", priority=2, when=lambda x, cfg: x.shape[0] == cfg.rows)
    op.implementation(other, name="doubles", priority=1, dtypes=(torch.float64,), devices=("cpu",))
    op.implementation(other, name="hopper", priority=3, capability=(9, 0))
    assert [one.name for one in op_def(op).implementations] == ["hopper", "rows", "doubles", "anything"]
    for given, served in ((x, "rows"), (x[:1].double(), "doubles"), (x[:1], "anything")):
        before = op_def(op).served.get(served, 0)
        torch.testing.assert_close(op(given, twice=True), given * 4)
        assert op_def(op).served[served] == before + 1
    assert op_def(op).served == {"rows": 1, "doubles": 1, "anything": 1}
    with use_implementation(op, "default"), use_implementation(op, "doubles"):
        op(x)  # which it does not serve
    assert op_def(op).served["default"] == 1
    assert re.search(
        r"body +rows at test_implementations.py:\d+, priority 2, when at test_implementations", str(op_def(op))
    )
    with pytest.raises(DuplicateOpError):
        magi_register_custom_op("implementations::order")(other)
    op(x[:1])
    assert op_def(op).served["anything"] == 2


def test_contexts_may_overlap_as_those_of_threads_do() -> None:
    op = new_op("overlapping")
    for name in ("usual", "one", "two"):
        op.implementation(other, name=name)
    one, two = use_implementation(op, "one"), use_implementation(op, "two")
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    op(torch.ones(2))
    two.__exit__(None, None, None)
    op(torch.ones(2))
    assert op_def(op).served == {"two": 1, "usual": 1}


def test_gradients_vmap_and_compiled_code_have_the_choice() -> None:
    op = new_op(
        "rules", setup_context_fn=lambda ctx, inputs, output: None, backward_fn=lambda ctx, grad: (grad * 2, None, None)
    )
    op.implementation(when=lambda x: x.shape[0] < 4)(other)
    x = torch.ones(3, requires_grad=True)
    assert torch.autograd.grad(op(x).sum(), x)[0].tolist() == [2.0] * 3
    compiled: Any = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 3):
        torch.testing.assert_close(compiled(torch.ones(rows)), torch.full((rows,), 2.0))
    assert op_def(op).served == {"other": 3, "default": 1}
    torch.testing.assert_close(torch.vmap(op)(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    with ThreadPoolExecutor(4) as pool:
        assert all(out.sum() == 6 for out in pool.map(op, [torch.ones(3)] * 100))


def test_the_first_real_call_of_each_is_compared_with_the_fake() -> None:
    op = new_op("fake")
    op(torch.ones(2))

    @op.implementation(when=lambda x: x.dim() == 2)
    def flat(x: Tensor, cfg: Scale = Scale(), *, twice: bool = False) -> Tensor:
        return x.flatten() * cfg.factor

    op(torch.ones(2))
    with pytest.raises(FakeMismatchError, match=rf"{flat.__code__.co_firstlineno + 1}\)$"):
        op(torch.ones(2, 2))


def test_opcheck_compares_each_with_the_op_s_own_body() -> None:
    op = new_op("compared")
    op.implementation(other, name="right")
    op.implementation(other, name="elsewhere", devices=("meta",))
    results = opcheck(op, (torch.ones(2), Scale(3.0)), test_utils="test_schema")
    assert results["implementation right"] == "SUCCESS"
    assert results["implementation elsewhere"].startswith("SKIPPED")

    @op.implementation(when=lambda twice: twice)
    def forgetful(x: Tensor, cfg: Scale = Scale(), *, twice: bool = False) -> Tensor:
        return x * cfg.factor

    with pytest.raises(RuleError, match="the implementation forgetful at .* differs from the op's own body: "):
        opcheck(op, (torch.ones(2),), {"twice": True}, test_utils="test_schema")
    found: Any = opcheck(op, (torch.ones(2),), {"twice": True}, test_utils="test_schema", raise_exception=False)
    assert isinstance(found["implementation forgetful"], RuleError)


def test_the_environment_names_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_OPSCHEMA_IMPLEMENTATIONS", "other::op=x, implementations::named=slow")
    op = new_op("named")
    op.implementation(other, name="fast", priority=1)
    with pytest.raises(RuleError, match="named has no implementation 'slow'. There are fast, default"):
        op(torch.ones(1))
    op.implementation(other, name="slow")
    op(torch.ones(1))
    assert op_def(op).served == {"slow": 1}
    monkeypatch.setenv("MAGI_OPSCHEMA_IMPLEMENTATIONS", "implementations::named")
    with pytest.raises(
        EnvironmentVariableError, match="'implementations::named' is not 'namespace::op=implementation'"
    ):
        new_op("named").implementation(other)


def test_an_error_of_a_condition_says_whose_it_is(x: Tensor) -> None:
    op = new_op("nope")
    op.implementation(other, when=lambda x, cfg: cfg.nope)
    with pytest.raises(AttributeError, match="nope") as raised:
        op(x)
    (note,) = raised.value.__notes__
    sentence = (
        r"implementations::nope: raised by `when` of an implementation \(test_implementations.py:\d+\)\. It gets "
        r"\(x, cfg\) of each call, and returns whether the implementation serves it\. \(test_implementations.py:\d+\)"
    )
    assert re.fullmatch(sentence, note)


@pytest.mark.parametrize(
    ("add", "sentence"),
    [
        (lambda op: op.implementation(other, name="default"), r"'default' \(str\) cannot be the name of an implement"),
        (lambda op: op.implementation(other, priority=1.5), r"priority=1.5 \(float\) is not an int"),
        (lambda op: op.implementation(lambda x: x), r"the body takes \(x\), expected \(x, cfg, twice\)"),
        (
            lambda op: op.implementation(other, when=lambda cgf: True),
            "when asks for 'cgf', but the op has no such parameter. Did you mean 'cfg'?",
        ),
        (lambda op: op.implementation(other, when=3), r"when=3 \(int\) does not say what it takes"),
        (lambda op: op.implementation(other, devices="cuda"), r"devices='cuda' is a string; give a collection"),
        (lambda op: op.implementation(other, dtypes=()), r"dtypes=\(\) must be a collection of dtype"),
        (lambda op: op.implementation(other, capability=9), r"capability=9 must be two ints, such as \(9, 0\)"),
        (lambda op: [op.implementation(other), op.implementation(other)], "it has an implementation 'other' already"),
        (lambda op: use_implementation(op, "othr").__enter__(), "has no implementation 'othr'. There are default"),
    ],
)
def test_what_is_refused(add: Callable[[Any], object], sentence: str) -> None:
    with pytest.raises(RuleError, match=sentence):
        add(new_op("refused"))


def code_of(fn: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """The result of *fn*, compiled, and the code that Inductor generated for it."""
    with torch.no_grad():
        result, codes = run_and_get_code(torch.compile(fn, fullgraph=True), *args)
    return result, codes[0]


def is_direct(code: str) -> bool:
    """Whether a line of the generated code calls an op by such a name: `buf0 = call_5_mylib_norm_default_CPU(x)`."""
    return re.search(r"^\s+(buf\d+ = )?call_\d", code, re.MULTILINE) is not None


def doubling(ns: str) -> Any:
    @magi_register_custom_op(f"{ns}::double")
    def double(x: Tensor, factor: float = 2.0) -> Tensor:
        assert type(factor) is float
        assert not x.is_conj()
        assert not x.is_neg()
        return x.clone().mul_(factor)

    return double


@pytest.mark.parametrize("dynamic", [False, True])
def test_generated_code_calls_the_body(ns: str, x: Tensor, *, dynamic: bool) -> None:
    double = doubling(ns)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    result, code = code_of(lambda x: double(x, 2.0) + 1, x)
    assert is_direct(code)
    assert torch.equal(result, x * 2 + 1)


def test_in_a_training_graph(ns: str) -> None:
    @magi_register_custom_op(
        f"{ns}::scaled",
        setup_context_fn=lambda ctx, inputs, output: None,
        backward_fn=lambda ctx, grad: backward(grad),
    )
    def scaled(x: Tensor) -> Tensor:
        return x * 3

    @magi_register_custom_op(f"{ns}::scaled_backward")
    def backward(grad: Tensor) -> Tensor:
        return grad * 3

    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: scaled(x).sin().sum(), fullgraph=True)
    _, codes = run_and_get_code(lambda: compiled(x).backward())
    assert len(codes) == 2
    assert all(map(is_direct, codes))
    expected = torch.ones(3, requires_grad=True)
    (expected * 3).sin().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_no_gradient_leaves_a_body(ns: str, x: Tensor) -> None:
    weight = torch.ones(3, requires_grad=True)

    @magi_register_custom_op(f"{ns}::hidden")
    def hidden(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * weight

    compiled = torch.compile(lambda x: hidden(x), fullgraph=True)  # noqa: PLW0108
    assert not compiled(x).requires_grad
    assert not compiled(x).requires_grad


def test_outputs_of_every_form(ns: str, x: Tensor) -> None:
    @magi_register_custom_op(f"{ns}::parts", infer_output_meta_fn=lambda x, more: (x.clone(), [x.clone()] * 2, None))
    def parts(x: Tensor, more: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor | None]:
        assert type(more) is list
        return x + 1, [x + 2, more[0] + 3], None

    result, code = code_of(lambda x: parts(x, [x, x]), x)
    assert is_direct(code)
    expected = (x + 1, [x + 2, x + 3], None)
    assert str(tree_map(Tensor.tolist, result[:2])) == str(tree_map(Tensor.tolist, expected[:2]))
    assert result[2] is None


def test_a_write_is_counted(ns: str, x: Tensor) -> None:
    @magi_register_custom_op(f"{ns}::fill", mutates_args=("out",), infer_output_meta_fn=lambda x, out: None)
    def fill(x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def run(x: Tensor, out: Tensor) -> Tensor:
        fill(x, out)
        return out + 1

    eager, out = torch.zeros(3), torch.zeros(3)
    fill(x, eager)
    result, code = code_of(run, x, out)
    assert is_direct(code)
    assert torch.equal(out, x)
    assert torch.equal(result, x + 1)
    before = out._version
    with torch.no_grad():
        torch.compile(run, fullgraph=True)(x, out)
    assert out._version > before


@pytest.mark.filterwarnings("ignore:Casting complex values to real discards")  # in torch 2.10's own code
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda double, x: double.torch_op(x, 3), id="an int for a float"),
        pytest.param(lambda double, x: double(torch.complex(x, x).conj()), id="a conjugate view"),
        pytest.param(lambda double, x: double(torch.complex(x, x).conj().imag), id="a negated view"),
    ],
)
def test_a_value_that_the_dispatcher_converts(ns: str, x: Tensor, call: Callable[..., Any]) -> None:
    double = doubling(ns)
    result, _ = code_of(lambda x: call(double, x), x)
    assert torch.equal(result, call(double, x))


def test_a_body_of_the_device_type(ns: str, x: Tensor) -> None:
    @magi_register_custom_op(f"{ns}::device")
    def op(x: Tensor) -> Tensor:
        raise NotImplementedError

    register_kernel(op, "cpu", lambda x: x + 10)
    result, code = code_of(op, x)
    assert is_direct(code)
    assert torch.equal(result, x + 10)


@pytest.mark.parametrize("first", [True, False], ids=["a body of the device type first", "an implementation alone"])
def test_a_body_that_comes_later(ns: str, x: Tensor, *, first: bool) -> None:
    double = doubling(ns)
    compiled = torch.compile(lambda x: double(x), fullgraph=True)  # noqa: PLW0108
    assert torch.equal(compiled(x), x * 2)
    if first:
        register_kernel(double, "cpu", lambda x, factor: x + 10)
        assert torch.equal(compiled(x), x + 10)
    double.implementation(lambda x, factor: x + 20, name="other")
    assert torch.equal(compiled(x), x + (10 if first else 20))


def test_a_kernel_of_another_library(ns: str, x: Tensor) -> None:
    double = doubling(ns)
    library = torch.library.Library(ns, "FRAGMENT")
    library.impl("double", lambda x, factor=2.0: x + 30, "CPU")
    result, _ = code_of(lambda x: double(x), x)  # noqa: PLW0108
    assert torch.equal(result, x + 30)
    library._destroy()


def test_an_op_that_was_replaced(ns: str, x: Tensor) -> None:
    first = doubling(ns)
    compiled = torch.compile(lambda x: first(x) + 1, fullgraph=True)
    assert torch.equal(compiled(x), x * 2 + 1)

    @magi_register_custom_op(f"{ns}::double", override=True)
    def double(x: Tensor, factor: float = 2.0) -> Tensor:
        return x + 40

    assert torch.equal(compiled(x), x + 41)


def test_code_from_a_cache_and_an_op_of_another_library(ns: str, x: Tensor) -> None:
    """The code names what an op of magi-opschema has, and one of torch.library has not."""
    double = doubling(ns)
    _, code = code_of(lambda x: double(x), x)  # noqa: PLW0108
    (line,) = [line for line in code.splitlines() if "= getattr" in line]
    name, _, text = line.partition(" = ")

    @torch.library.custom_op(f"{ns}::stock", mutates_args=())
    def stock(x: Tensor, factor: float = 2.0) -> Tensor:
        return x + 50

    scope: dict[str, Any] = {"torch": torch}
    exec(text.replace(f"{ns}.double", f"{ns}.stock").join([f"{name} = ", ""]), scope)
    assert torch.equal(scope[name](x), x + 50)


def test_modes_and_the_profiler_see_the_call(ns: str, x: Tensor, recorder: Any) -> None:
    double = doubling(ns)
    compiled = torch.compile(lambda x: double(x), fullgraph=True)  # noqa: PLW0108
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, x)
    module: dict[str, Any] = {"__name__": "generated"}
    exec(compile(code, "generated", "exec"), module)
    call = module["call"]
    assert is_direct(code)

    with torch.profiler.profile(acc_events=True) as profile:
        call([x])
    assert f"{ns}::double" in {event.name for event in profile.events()}

    with recorder:
        call([x])
    assert double.torch_op in recorder.seen

    with Listening() as mode:
        call([x])
    assert mode.seen[0] is double.torch_op


def test_two_names_that_look_alike(x: Tensor, ns: str) -> None:
    @magi_register_custom_op(f"{ns}_a::b")
    def first(x: Tensor) -> Tensor:
        return x + 1

    @magi_register_custom_op(f"{ns}::a_b")
    def second(x: Tensor) -> Tensor:
        return x + 2

    result, code = code_of(lambda x: (first(x), second(x)), x)
    assert is_direct(code)
    assert torch.equal(result[0], x + 1)
    assert torch.equal(result[1], x + 2)


def test_in_a_branch(ns: str, x: Tensor) -> None:
    double = doubling(ns)

    def run(x: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, lambda x: double(x), lambda x: double(x, 3.0), (x,))  # noqa: PLW0108
        return found

    result, code = code_of(run, x)
    assert "call_" in code
    assert torch.equal(result, x * 2)
    assert torch.equal(torch.compile(run)(-x), -x * 3)
