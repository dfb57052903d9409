# SPDX-License-Identifier: Apache-2.0
"""``explain`` and ``magi.check`` see inside records: those returned, those written to, and gradients in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from _wrong import Becomes, aten
from magi_backend import MismatchError, explain
from magi_backend._verify.compare import compare_trees, copy_inputs, leaves_of, state_of, with_leaves
from magi_opschema import magi_register_custom_op
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Known:
    """An operator takes it below, so that it is a pytree node."""

    weight: Tensor
    eps: float = float("nan")


@dataclass(frozen=True)
class Frozen:
    weight: Tensor
    eps: float = float("nan")


@dataclass(frozen=True, slots=True)
class Slotted:
    weight: Tensor
    eps: float = 1.0


@dataclass
class Mutable:
    weight: Tensor
    eps: float = 1.0

    def __post_init__(self) -> None:
        assert isinstance(self.weight, Tensor), "copies run nothing of the user's"


@dataclass(frozen=True)
class Outer:
    inner: Any
    tensors: tuple[Any, ...] = ()


KINDS: list[Any] = [Known, Frozen, Slotted, Mutable]
MAKERS: dict[str, Callable[[Tensor], Any]] = {
    **{kind.__name__: kind for kind in KINDS},
    "nested": lambda tensor: Outer(Known(tensor)),
    "in a tuple": lambda tensor: Outer(None, (1, Frozen(tensor))),
    "in a list": lambda tensor: [Slotted(tensor)],
    "in a dict": lambda tensor: {"cfg": Mutable(tensor)},
}


# All are taken apart and built again, fast; what else happens to them goes the same way, shown for three of them.
FAST = {"Known", "Slotted", "in a tuple"}
COMPILED = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in MAKERS]


@magi_register_custom_op("backend_records::double")
def double(cfg: Known) -> Tensor:
    return cfg.weight * 2


def weight_of(value: Any) -> Tensor:
    (weight,) = [leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor)]
    return weight


def wrong(eager: Callable[..., Any], otherwise: Callable[..., Any]) -> Any:
    """*eager*, which does something else once it is compiled."""

    @torch.compile(backend="magi")
    def fn(*args: Any) -> Any:
        return otherwise(*args) if torch.compiler.is_compiling() else eager(*args)

    return fn


def differing(eager: Callable[..., Any], otherwise: Callable[..., Any], *args: Any) -> list[str]:
    (call,) = explain(wrong(eager, otherwise))(*args).calls
    return [difference.name for difference in call.differences if not difference.agrees]


@pytest.mark.parametrize("kind", MAKERS)
def test_trees_are_taken_apart_and_built_again(kind: str) -> None:
    value = MAKERS[kind](torch.ones(2))
    twin = with_leaves(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)

    assert type(twin) is type(value)
    assert weight_of(twin) is not weight_of(value)
    assert all(difference.agrees for difference in compare_trees("value", twin, value))
    assert [path for path, _ in leaves_of(twin)] == [path for path, _ in leaves_of(value)]


def test_a_node_without_names_for_its_children() -> None:
    class Bag:
        def __init__(self, *items: Any) -> None:
            self.items = items

    pytree.register_pytree_node(Bag, lambda bag: (list(bag.items), None), lambda items, _: Bag(*items))
    assert [path for path, _ in leaves_of([Bag(1, 2)])] == ["[0][0]", "[0][1]"]
    (difference,) = (d for d in compare_trees("bag", Bag(1, 2), Bag(1, 3)) if not d.agrees)
    assert difference.name == "bag[1]"


@pytest.mark.parametrize("kind", COMPILED)
def test_a_returned_record_is_compared(kind: str) -> None:
    make = MAKERS[kind]

    assert differing(lambda x: make(x + 1), lambda x: make(x + 1), torch.ones(2)) == []
    (name,) = differing(lambda x: make(x + 1), lambda x: make(x + 2), torch.ones(2))
    assert name.startswith("output")
    assert name.endswith(".weight")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Frozen(torch.ones(1), 1.0), Frozen(torch.ones(1), 2.0)),
        (Known(torch.ones(1), 1.0), Known(torch.ones(1), 2.0)),
        (Frozen(torch.ones(1)), Slotted(torch.ones(1))),
        (Outer(None), Outer(Frozen(torch.ones(1)))),
        (Outer(1), Outer(True)),
    ],
    ids=["field", "context", "class", "none", "type"],
)
def test_other_fields_and_classes_differ(one: Any, other: Any) -> None:
    assert not all(difference.agrees for difference in compare_trees("output", one, other))
    assert all(difference.agrees for difference in compare_trees("output", one, one))


@pytest.mark.parametrize("kind", COMPILED)
def test_a_record_that_is_written_to_is_copied_and_compared(kind: str) -> None:
    record = MAKERS[kind](torch.ones(3))

    def written(by: float) -> Callable[[Any], Tensor]:
        def write(value: Any) -> Tensor:
            weight_of(value).mul_(by)
            return torch.ones(1)

        return write

    assert differing(written(2), written(2), record) == []
    (name,) = differing(written(2), written(3), record)
    assert name.startswith("argument[0][0]")
    assert name.endswith(".weight after the call")
    torch.testing.assert_close(weight_of(record), torch.ones(3))


def test_a_field_that_is_set_and_a_list_that_grows() -> None:
    def grow(amount: float) -> Callable[..., None]:
        def fn(state: Mutable, seen: list[Tensor]) -> None:
            state.weight = state.weight + amount
            seen.append(state.weight)

        return fn

    state, seen = Mutable(torch.ones(2)), [torch.zeros(2)]
    assert differing(grow(1), grow(1), state, seen) == []
    assert differing(grow(1), grow(2), state, seen) == [
        "argument[0][0].weight after the call",
        "argument[0][1][1] after the call",
    ]
    assert len(seen) == 1
    torch.testing.assert_close(state.weight, torch.ones(2))


@pytest.mark.parametrize("kind", COMPILED)
def test_a_wrong_gradient_inside_a_record(kind: str) -> None:
    record = MAKERS[kind](torch.ones(3, requires_grad=True))

    def right(value: Any) -> Tensor:
        return weight_of(value) * 2

    def planted(value: Any) -> Tensor:
        weight = weight_of(value)
        return weight.detach() * 2 + (weight - weight.detach()) * 3

    assert differing(right, right, record) == []
    (name,) = differing(right, planted, record)
    assert name.startswith("gradient of argument[0][0]")
    assert name.endswith(".weight")
    assert weight_of(record).grad is None


def test_a_wrong_compiler_is_found_by_explain_and_by_check() -> None:
    def fn(value: Outer) -> Tensor:
        return torch.cos(value.inner.weight) * 2

    record = Outer(Known(torch.randn(5, requires_grad=True)))
    # The gradient of a cosine is one.
    planted = {"post_grad_custom_pre_pass": Becomes(aten.sin.default, aten.cos.default)}
    (call,) = explain(fn, planted)(record).calls
    assert [d.name.split(".")[-1] for d in call.differences if not d.agrees] == ["weight"]
    assert explain(fn)(record).agrees
    with pytest.raises(
        MismatchError,
        match="magi.check: graph 0: gradient of value.inner.weight of the compiled code differs from eager",
    ):
        torch.compile(fn, backend="magi", options={"magi.check": True, **planted})(record)


def test_an_operator_over_a_record() -> None:
    report = explain(lambda cfg, x: replace(cfg, weight=double(cfg) * x))(Known(torch.ones(2)), torch.ones(2))

    assert report.agrees
    assert [difference.name for difference in report.calls[0].differences] == ["output.weight"]
    assert report.calls[0].inputs == ("float32[2]", "float32[2]")


def test_copies_share_what_the_originals_share() -> None:
    base = torch.arange(4.0)
    copies, _ = copy_inputs((Frozen(base[:2]), {"other": Mutable(base[2:])}, base))
    first, second, whole = (leaf for _, leaf in leaves_of(copies) if isinstance(leaf, Tensor))

    whole.add_(1)
    torch.testing.assert_close(first, torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(second, torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(base, torch.arange(4.0))


def test_copies_share_what_detached_originals_share() -> None:
    """Neither a detached tensor nor one of inference mode knows of which tensor it is a view."""
    base = torch.arange(4.0)
    with torch.inference_mode():
        inferred = torch.arange(4.0)
        pairs = [(base[2:].detach(), base), (inferred[2:], inferred)]
    pairs.append((base.view(torch.int32)[1:].detach(), base))
    for part, whole in pairs:
        with torch.inference_mode():
            part_copy, whole_copy = copy_inputs((part, whole))[0]
        assert torch.equal(part, part_copy)
        assert torch.equal(whole, whole_copy)
        assert part_copy.is_inference() == whole_copy.is_inference() == whole.is_inference()
        with torch.inference_mode():
            whole_copy.zero_()
        assert not part_copy.any()
        assert part.any()


def test_a_tensor_at_two_places_has_one_copy() -> None:
    x = torch.ones(3, requires_grad=True)
    copies, wanted = copy_inputs([x, {"again": x}])
    assert copies[0] is copies[1]["again"]
    assert copies[0] is not x
    assert wanted["[0]"] is copies[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex64], ids=str)
def test_writes_in_inference_mode_are_seen(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        tensor = torch.ones(2, 3).t().to(dtype)
        before = state_of(tensor)
        assert state_of(tensor) == before
        tensor[0, 0] = 0
        assert state_of(tensor) != before
        nan = torch.tensor(float("nan"))
        assert state_of(nan) == state_of(nan)


def test_floats_are_named_with_the_way_out() -> None:
    @magi_register_custom_op("backend_records::floats")
    def floats(x: Tensor, cfg: Known, by: float, rates: list[float], count: int) -> Tensor:
        return x * by

    @magi_register_custom_op("backend_records::tensors")
    def tensors(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    def counted(fn: Any, values: list[Any]) -> Any:
        explained = explain(fn)
        for value in values:
            report = explained(torch.ones(2), value)
        return report

    known = Known(torch.ones(2), 1.0)
    report = counted(lambda x, by: floats(x, known, by, [1.0], 2), [0.1, 0.2, 0.3])
    assert len(report.compilations) == 3
    (op,) = report.compilations[0].ops
    assert op.floats == ("cfg.eps", "by", "rates")
    sentence = "floats     cfg.eps, by, rates: each value compiles a graph of its own; a Tensor without"
    assert sentence in op.text
    assert "floats     cfg.eps, by, rates: each value" in " ".join(report.to_text(width=200).split("\n"))
    assert "floats     cfg.eps, by, rates" in report.to_html()

    report = counted(tensors, [torch.tensor(value) for value in (0.1, 0.2, 0.3)])
    assert len(report.compilations) == 1
    assert "floats" not in report.compilations[0].ops[0].text.split("calls")[1]
