# SPDX-License-Identifier: Apache-2.0
"""What the decorator refuses, an op refuses afterwards, wrong values at every entry, and environment variables."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _signatures import SHOWN, Inner, Unshowable, X, located, plain, returning, two_outputs
from magi_opschema import (
    annotate,
    errors,
    get_object,
    lower_signature,
    magi_register_custom_op,
    op_def,
    opcheck,
    register_autocast,
    register_kernel,
    register_object,
    register_sharding,
    register_vmap,
    release_object,
)
from magi_opschema._ops import catalogue
from magi_opschema.errors import OpSchemaError, OptionError
from torch import Tensor


def scaled(x: Tensor, cfg: Inner) -> Tensor:
    return x * cfg.scale


def writes(x: Tensor, out: Tensor, weights: list[Tensor] | None = None) -> None:
    out.copy_(x)


BAD: Any = Unshowable()

# function, options, sentence of the OptionError
OPTIONS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (writes, {"mutates_args": "out"}, "mutates_args='out' is one string. Write a tuple of names: ('out',)."),
    (writes, {"mutates_args": None}, "mutates_args=None is not a tuple of names."),
    (writes, {"mutates_args": ("outt",)},
     "mutates_args names 'outt', which is not a parameter, leaf path or flat name. Did you mean 'out'?"),
    (writes, {"mutates_args": (0,)}, "mutates_args names 0, which is not a parameter, leaf path or flat name."),
    (writes, {"mutates_args": ("weights",)},
     ("mutates_args names 'weights', a list of Tensors that may be None, which torch cannot functionalize "
     "(pytorch #144072). Use list[Tensor], empty for None.")),
    (scaled, {"mutates_args": ("cfg",)},
     "mutates_args names 'cfg', which holds no Tensor, and an op can write into Tensors only."),
    (scaled, {"mutates_args": ("cfg.scal",)}, "Did you mean 'cfg.scale'?"),
    (writes, {"mutates_args": ("out",), "backward_fn": lambda ctx: None},
     ("backward_fn together with mutates_args ('out'): the gradient of an op that writes into its arguments is not "
     "defined. Return new Tensors instead.")),
    (plain, {"setup_context_fn": lambda ctx, inputs, output: None},
     "setup_context_fn saves for a backward_fn, and there is none. Give one."),
    (plain, {"backward_fn": "formula"}, "backward_fn is 'formula' (str), expected a function."),
    (plain, {"backward_fn": lambda ctx: None},
     "backward_fn is called as backward_fn(ctx, grad), which test_option_errors.py:"),
    (two_outputs, {"backward_fn": lambda ctx, grad: None},
     "backward_fn is called as backward_fn(ctx, grad_0, grad_1), which test_option_errors.py:"),
    (plain, {"backward_fn": lambda ctx, grad: None, "setup_context_fn": lambda ctx: None},
     "setup_context_fn is called as setup_context_fn(ctx, inputs, output), which test_option_errors.py:"),
    (plain, {"infer_output_meta_fn": {"x"}},
     "infer_output_meta_fn: {'x'} is not a function, list of names or None. Write one of these."),
    (plain, {"infer_output_meta_fn": "x"}, "infer_output_meta_fn: 'x' is one string. Write a list of names: ['x']."),
    (plain, {"infer_output_meta_fn": []}, "infer_output_meta_fn: 0 names are given for 1 outputs. Give one for each."),
    (plain, {"infer_output_meta_fn": ["y"]},
     "infer_output_meta_fn: 'y' is not a Tensor parameter or leaf path. Name one."),
    (scaled, {"infer_output_meta_fn": ["cfg.scale"]},
     "infer_output_meta_fn: 'cfg.scale' is not a Tensor parameter or leaf path."),
    (plain, {"infer_output_meta_fn": [0]}, "infer_output_meta_fn: 0 is not a Tensor parameter or leaf path."),
    (plain, {"infer_output_meta_fn": lambda: X},
     "infer_output_meta_fn is called as infer_output_meta_fn(x), which test_option_errors.py:"),
    (two_outputs, {},
     ("infer_output_meta_fn: there are 2 outputs and 1 Tensor inputs, so output i cannot look like input i. "
     "Pass a function, or names.")),
    (returning(float), {},
     "infer_output_meta_fn: 'output' is a float, which looks like no Tensor input. Pass a function."),
    (returning(list[Tensor]), {"infer_output_meta_fn": ["x"]},
     "infer_output_meta_fn: 'output' and 'x' are not both lists. Pass a function."),
    (plain, {"tags": ("core",)}, "tags=('core',) is not a tuple of torch.Tag values."),
    (plain, {"register_pytree": 0}, "register_pytree=0 (int) is not True or False."),
    (plain, {"is_subgraph_boundary": 0}, "is_subgraph_boundary=0 (int) is not True or False."),
    (plain, {"tags": [BAD]}, f"tags=[{SHOWN}] is not a tuple"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "options", "sentence"), OPTIONS, ids=[f"{i}-{row[2][:40]}" for i, row in enumerate(OPTIONS)]
)
def test_options_are_refused_at_decoration(
    ns: str, fn: Callable[..., Any], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(sentence)) as caught:
        magi_register_custom_op(f"{ns}::op", **options)(fn)
    assert str(caught.value).startswith(f"{ns}::op: ")
    assert str(caught.value).endswith(located(fn))
    assert not torch._C._jit_get_schemas_for_operator(f"{ns}::op")


NOT_A_NAME = "is not 'namespace::op'"
KEPT = "for itself. Choose another."


NAMES = [
    ("norm", f"the op name 'norm' {NOT_A_NAME}. Write 'namespace::norm'."),
    ("", f"the op name '' {NOT_A_NAME}. Write 'namespace::op', two identifiers."),
    ("a:b", f"the op name 'a:b' {NOT_A_NAME}. Write 'namespace::op', two identifiers."),
    ("a::b.overload", f"the op name 'a::b.overload' {NOT_A_NAME}."),
    ("::b", f"the op name '::b' {NOT_A_NAME}."),
    ("a::b\n", NOT_A_NAME),
    ("a::größe", f"the op name 'a::größe' {NOT_A_NAME}."),
    ("a::1b", f"the op name 'a::1b' {NOT_A_NAME}."),
    ("opschema_names::class", f"the op name 'opschema_names::class' cannot be used: torch keeps 'class' {KEPT}"),
    ("opschema_names::NoneType", f"torch keeps 'NoneType' {KEPT}"),
    ("opschema_names::name", f"torch keeps 'name' {KEPT}"),
    ("opschema_names::_dir", f"torch keeps '_dir' {KEPT}"),
    ("opschema_names::__init__", f"torch keeps '__init__' {KEPT}"),
    ("opschema_names::__origin__", f"torch keeps '__origin__' {KEPT}"),
    ("_::op", f"torch keeps '_' {KEPT}"),
    ("load_library::op", f"torch keeps 'load_library' {KEPT}"),
    ("higher_order::op", f"torch keeps 'higher_order' {KEPT}"),
]


@pytest.mark.parametrize(("name", "sentence"), NAMES)
def test_name_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(errors.OpNameError, match=re.escape(sentence)) as caught:
        magi_register_custom_op(name)(plain)
    assert str(caught.value).startswith("plain(): ")
    assert str(caught.value).endswith(located(plain))


def test_names_that_only_look_kept_are_taken(ns: str) -> None:
    for op in ("load_library", "default", "self", "op_names", "match"):
        assert torch.equal(magi_register_custom_op(f"{ns}::{op}")(plain)(X), X * 2)


def test_a_lambda_has_no_name() -> None:
    anonymous: Any = lambda x: x  # noqa: E731
    anonymous.__annotations__ = {"x": Tensor, "return": Tensor}
    with pytest.raises(errors.OpNameError, match=re.escape("<lambda>' is not 'namespace::op'")):
        magi_register_custom_op()(anonymous)


def test_decorator_without_brackets() -> None:
    fix = "Write @magi_register_custom_op() with brackets, or @magi_register_custom_op('namespace::op')."
    sentence = f"takes a name, and got a function {located(plain)}. {fix}"
    with pytest.raises(errors.OpNameError, match=re.escape(sentence)):
        magi_register_custom_op(plain)  # type: ignore[arg-type]
    with pytest.raises(errors.OpNameError, match=re.escape("the op name 5 (int) is not a string.")):
        magi_register_custom_op(5)  # type: ignore[arg-type]


def test_duplicate_name_of_ours(ns: str) -> None:
    magi_register_custom_op(f"{ns}::op")(plain)
    sentence = (
        f"{ns}::op: the op is registered already, by plain {located(plain)}. Choose another name, "
        "or pass override=True to replace it, as after a reload."
    )
    with pytest.raises(errors.DuplicateOpError, match=re.escape(sentence)):
        magi_register_custom_op(f"{ns}::op")(scaled)


def test_duplicate_name_of_another_library(ns: str) -> None:
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    sentence = (
        f"{ns}::op: the op is registered already, by another library. "
        "Choose another name, or take that one away: override=True replaces only what magi-opschema registered."
    )
    for override in (False, True):
        with pytest.raises(errors.DuplicateOpError, match=re.escape(sentence)):
            magi_register_custom_op(f"{ns}::op", override=override)(plain)


def test_decorating_an_op_again(ns: str) -> None:
    direct = magi_register_custom_op(f"{ns}::direct")(plain)
    exposed = magi_register_custom_op(f"{ns}::exposed")(scaled)
    packet = getattr(torch.ops, ns).direct
    sentence = "is an op already. Decorate a function once; op_def(op).fn is the plain function."
    for op in (direct, exposed, packet, op_def(exposed).torch_op):
        with pytest.raises(errors.DuplicateOpError, match=re.escape(sentence)):
            magi_register_custom_op(f"{ns}::again")(op)
    custom = torch.library.custom_op(f"{ns}::custom", plain, mutates_args=())
    with pytest.raises(
        errors.DuplicateOpError, match=r"registered by torch.library.custom_op\. Take that decorator off\."
    ):
        magi_register_custom_op(f"{ns}::again")(custom)


@pytest.mark.parametrize(("thing", "shown"), [(builtins.len, "<built-in"), (BAD, SHOWN)])
def test_an_object_that_is_not_a_function(ns: str, thing: Any, shown: str) -> None:
    sentence = f"^{shown}.* is not a Python function. Wrap it in one whose parameters have annotations."
    with pytest.raises(OptionError, match=sentence):
        magi_register_custom_op(f"{ns}::op")(thing)


def test_a_static_or_class_method(ns: str) -> None:
    sentence = f"plain is a staticmethod already. Put it above this decorator. {located(plain)}"
    with pytest.raises(OptionError, match=re.escape(sentence)):
        magi_register_custom_op(f"{ns}::op")(staticmethod(plain))
    with pytest.raises(OptionError, match="plain is a classmethod already. Use a static method: an op has no class."):
        magi_register_custom_op(f"{ns}::op")(classmethod(plain))  # type: ignore[arg-type]


def test_unknown_op() -> None:
    magi_register_custom_op("opschema_unknown::normalize")(plain)
    with pytest.raises(errors.UnknownOpError, match="Did you mean 'opschema_unknown::normalize'?"):
        op_def("opschema_unknown::normalise")
    with pytest.raises(errors.UnknownOpError, match="'aten::add' is not an op that magi-opschema registered."):
        op_def(torch.ops.aten.add.Tensor)
    with pytest.raises(errors.UnknownOpError, match="is not an op that magi-opschema registered."):
        annotate(plain, "key", "text")
    with pytest.raises(LookupError, match="is not an op that magi-opschema registered."):
        register_vmap(len, lambda *args: args)


def test_the_name_of_an_operator_itself_is_not_searched_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "nearest", lambda *_: pytest.fail("a backend asks this for each node of a graph"))
    with pytest.raises(errors.UnknownOpError, match="registered. Register it with @magi_register_custom_op first."):
        op_def(torch.ops.aten.add.Tensor)


NO_FUNCTION: Any = 3


# what is asked of an op, error class, sentence
AFTERWARDS: list[tuple[Callable[[Any], Any], type[OpSchemaError], str]] = [
    (lambda op: register_vmap(op, NO_FUNCTION), errors.RuleError, "rule is 3 (int), expected a function."),
    (lambda op: register_vmap(op, lambda x: x), errors.RuleError,
     "rule is called as rule(info, in_dims, x), which test_option_errors.py"),
    (lambda op: register_sharding(op, NO_FUNCTION), errors.RuleError, "rule is 3 (int), expected a function."),
    (lambda op: register_kernel(op, "cpu", NO_FUNCTION), errors.RuleError, "the body is 3 (int), expected a function."),
    (lambda op: register_kernel(op, "zpu", plain), errors.RuleError,
     "'zpu' is not a device type of torch. Use 'cpu', 'cuda' or another."),
    (lambda op: register_autocast(op, "zpu", torch.float16), errors.RuleError,
     "'zpu' is not a device type of torch. Use 'cpu', 'cuda' or another."),
    (lambda op: register_autocast(op, "cpu", "float16"), errors.RuleError,  # type: ignore[arg-type]
     "autocast casts to 'float16', expected a dtype of floating-point numbers, such as torch.bfloat16."),
    (lambda op: register_autocast(op, "cpu", torch.int8), errors.RuleError,
     "autocast casts to torch.int8, expected a dtype of floating-point numbers"),
    (lambda op: opcheck(op, X), errors.ArgumentError,  # type: ignore[arg-type]
     "opcheck takes the arguments as a tuple, and got a Tensor. Write opcheck(op, (x,))."),
    (lambda op: opcheck(op, (X, X, X)), errors.ArgumentError, "gives 3 arguments by position, expected at most 1."),
    (lower_signature, errors.DuplicateOpError, "is an op already."),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "error", "sentence"), AFTERWARDS, ids=map(str, range(len(AFTERWARDS))))
def test_what_is_asked_of_an_op_afterwards(
    ns: str, ask: Callable[[Any], Any], error: type[OpSchemaError], sentence: str
) -> None:
    op = magi_register_custom_op(f"{ns}::plain")(plain)
    with pytest.raises(error, match=re.escape(sentence)):
        ask(op)


def test_rule_for_a_batch_is_told_what_is_wrong(ns: str) -> None:
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=lambda x: (x * 2, x * 3))(two_outputs)
    register_vmap(op, lambda info, in_dims, x: (two_outputs(x), (0, 0, 0)))
    with pytest.raises(errors.RuleError, match="out_dims for 'output' has 3 entries, expected 2"):
        torch.vmap(op)(torch.ones(2, 3))


VALUES: list[Any] = [
    None, 3, True, "zz", "", b"q", 1.5, Unshowable(), [], {}, [1], {"a": 1}, object(), int, Unshowable,
    lambda: 0, torch.ones(2), len, [Unshowable()],
]  # fmt: skip

Use = Callable[[str, Any, Any], object]


def with_option(option: str, **others: Any) -> Use:
    return lambda ns, op, value: magi_register_custom_op(f"{ns}::a", **{option: value}, **others)(plain)


# entry -> its use with a namespace, an op and a wrong value; the values that are right
ENTRIES: dict[str, tuple[Use, tuple[type, ...]]] = {
    "name": (lambda ns, op, v: magi_register_custom_op(v)(plain), (type(None),)),
    "fn": (lambda ns, op, v: magi_register_custom_op(f"{ns}::a")(v), ()),
    "mutates_args": (with_option("mutates_args"), (list, dict)),
    "tags": (with_option("tags"), (str, list, dict)),
    "infer_output_meta_fn": (with_option("infer_output_meta_fn"), (type(None), type, type(len))),
    "backward_fn": (with_option("backward_fn"), (type(None), type)),
    "setup_context_fn": (with_option("setup_context_fn", backward_fn=lambda c, g: g), (type(None), type)),
    "is_compute_sensitive": (with_option("is_compute_sensitive"), (bool,)),
    "is_subgraph_boundary": (with_option("is_subgraph_boundary"), (bool,)),
    "override": (with_option("override"), (bool,)),
    "register_pytree": (with_option("register_pytree"), (bool,)),
    "lower_signature": (lambda ns, op, v: lower_signature(v), ()),
    "lower_signature, mutates_args": (lambda ns, op, v: lower_signature(plain, mutates_args=v), (list, dict)),
    "op_def": (lambda ns, op, v: op_def(v), ()),
    "annotate, key": (lambda ns, op, v: annotate(op, v, "text"), (str,)),
    "annotate, text": (lambda ns, op, v: annotate(op, "key", v), (str,)),
    "opcheck, kwargs": (lambda ns, op, v: opcheck(op, (torch.ones(2),), v, test_utils="test_schema"),
                        (type(None), dict)),
    "register_kernel, device": (lambda ns, op, v: register_kernel(op, v, plain), ()),
    "register_kernel, fn": (lambda ns, op, v: register_kernel(op, "cpu", v), (type(None),)),
    "register_vmap, rule": (lambda ns, op, v: register_vmap(op, v), (type(None), type)),
    "register_autocast, device": (lambda ns, op, v: register_autocast(op, v, torch.half), ()),
    "register_autocast, dtype": (lambda ns, op, v: register_autocast(op, "cpu", v), ()),
    "register_object, weak": (lambda ns, op, v: register_object(plain, weak=v), (bool,)),
    "get_object": (lambda ns, op, v: get_object(v), ()),
    "release_object": (lambda ns, op, v: release_object(v), ()),
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_wrong_value_is_an_error_of_this_package(ns: str, entry: str) -> None:
    use, right = ENTRIES[entry]
    op = magi_register_custom_op(f"{ns}::op")(plain)
    refused = 0
    for i, value in enumerate(VALUES):
        try:
            use(f"{ns}_{i}", op, value)
        except OpSchemaError:
            refused += 1
        else:
            assert isinstance(value, right), value
    assert refused > len(VALUES) / 2
    assert str(op_def(op)).startswith("signature")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("MAGI_OPSCHEMA_CHEKC", " Did you mean 'MAGI_OPSCHEMA_CHECK'?"), ("MAGI_OPSCHEMA_SOMETHING_ELSE_ALTOGETHER", "")],
)
def test_an_unknown_name(ns: str, monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    monkeypatch.setenv(name, "1")
    sentence = f"the environment variable {name} is not a setting of magi-opschema.{hint} Choose one of these ("
    for use in (magi_register_custom_op(f"{ns}::op"), lower_signature):
        with pytest.raises(errors.EnvironmentVariableError, match=re.escape(sentence)) as caught:
            use(plain)
        for known in ("MAGI_OPSCHEMA_CHECK", "MAGI_OPSCHEMA_DUMP", "MAGI_OPSCHEMA_CACHE_DIR"):
            assert f"{known}: " in str(caught.value)
    assert not torch._C._jit_get_schemas_for_operator(f"{ns}::op")
    monkeypatch.delenv(name)
    magi_register_custom_op(f"{ns}::op")(plain)


@pytest.mark.parametrize("value", ["yes", " 1"])
def test_a_switch_that_is_neither_on_nor_off(ns: str, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MAGI_OPSCHEMA_CHECK", value)
    sentence = f"MAGI_OPSCHEMA_CHECK={value!r} is neither on nor off. Set it to 1 or 0, or unset it."
    with pytest.raises(errors.EnvironmentVariableError, match=re.escape(sentence)):
        magi_register_custom_op(f"{ns}::op")(plain)
    assert not torch._C._jit_get_schemas_for_operator(f"{ns}::op")
    for off in ("", "0"):
        monkeypatch.setenv("MAGI_OPSCHEMA_CHECK", off)
        magi_register_custom_op(f"{ns}::off{off}")(plain)


def test_a_dump_folder_that_cannot_be_written(ns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    monkeypatch.setenv("MAGI_OPSCHEMA_DUMP", str(folder))
    sentence = f"MAGI_OPSCHEMA_DUMP={folder} is not a folder that can be written: "
    with pytest.raises(errors.EnvironmentVariableError, match=re.escape(sentence)) as caught:
        magi_register_custom_op(f"{ns}::op")(plain)
    assert str(caught.value).endswith(". Name another folder, or unset it.")
    monkeypatch.delenv("MAGI_OPSCHEMA_DUMP")
    magi_register_custom_op(f"{ns}::op")(plain)  # nothing was left behind
