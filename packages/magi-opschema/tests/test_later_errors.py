# SPDX-License-Identifier: Apache-2.0
"""What is asked of an op after its definition, and refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _bad_inputs import Inner, X, plain, two_outputs
from magi_opschema import (
    annotate,
    errors,
    lower_signature,
    magi_register_custom_op,
    op_def,
    opcheck,
    register_autocast,
    register_kernel,
    register_sharding,
    register_vmap,
)
from magi_opschema.errors import ArgumentError, OpSchemaError, RuleError, UnknownOpError


def test_unknown_op() -> None:
    magi_register_custom_op("opschema_unknown::normalize")(plain)
    with pytest.raises(UnknownOpError, match="Did you mean 'opschema_unknown::normalize'?"):
        op_def("opschema_unknown::normalise")
    with pytest.raises(UnknownOpError, match="'aten::add' is not an op that magi-opschema registered."):
        op_def(torch.ops.aten.add.Tensor)
    with pytest.raises(UnknownOpError, match="is not an op that magi-opschema registered."):
        annotate(plain, "key", "text")
    with pytest.raises(LookupError, match="is not an op that magi-opschema registered."):
        register_vmap(len, lambda *args: args)


NO_FUNCTION: Any = 3


AFTERWARDS: dict[str, tuple[Callable[[Any], Any], type[OpSchemaError], str]] = {
    "vmap, no function": (
        lambda op: register_vmap(op, NO_FUNCTION),
        RuleError,
        "rule is 3 (int), expected a function.",
    ),
    "vmap, other arguments": (
        lambda op: register_vmap(op, lambda x: x),
        RuleError,
        "rule is called as rule(info, in_dims, x), which test_later_errors.py",
    ),
    "sharding, no function": (
        lambda op: register_sharding(op, NO_FUNCTION),
        RuleError,
        "rule is 3 (int), expected a function.",
    ),
    "kernel, no function": (
        lambda op: register_kernel(op, "cpu", NO_FUNCTION),
        RuleError,
        "the body is 3 (int), expected a function.",
    ),
    "kernel, no device": (
        lambda op: register_kernel(op, "zpu", plain),
        RuleError,
        "'zpu' is not a device type of torch. Use 'cpu', 'cuda' or another.",
    ),
    "autocast, no device": (
        lambda op: register_autocast(op, "zpu", torch.float16),
        RuleError,
        "'zpu' is not a device type of torch. Use 'cpu', 'cuda' or another.",
    ),
    "autocast, a text": (
        lambda op: register_autocast(op, "cpu", "float16"),  # type: ignore[arg-type]
        RuleError,
        "autocast casts to 'float16', expected a dtype of floating-point numbers, such as torch.bfloat16.",
    ),
    "autocast, ints": (
        lambda op: register_autocast(op, "cpu", torch.int8),
        RuleError,
        "autocast casts to torch.int8, expected a dtype of floating-point numbers",
    ),
    "opcheck, a Tensor": (
        lambda op: opcheck(op, X),  # type: ignore[arg-type]
        ArgumentError,
        "opcheck takes the arguments as a tuple, and got a Tensor. Write opcheck(op, (x,)).",
    ),
    "opcheck, too many": (
        lambda op: opcheck(op, (X, X, X)),
        ArgumentError,
        "the call gives 3 arguments by position, expected at most 1.",
    ),
    "lower_signature of an op": (lower_signature, errors.DuplicateOpError, "is an op already."),
    "lower_signature of a class": (lambda op: lower_signature(Inner), errors.OptionError, "is not a Python function."),
}


@pytest.mark.parametrize("case", AFTERWARDS)
def test_what_is_asked_of_an_op_afterwards(ns: str, case: str) -> None:
    op = magi_register_custom_op(f"{ns}::plain")(plain)
    ask, error, sentence = AFTERWARDS[case]
    with pytest.raises(error, match=re.escape(sentence)):
        ask(op)


def test_rule_for_a_batch_is_told_what_is_wrong(ns: str) -> None:
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=lambda x: (x * 2, x * 3))(two_outputs)
    register_vmap(op, lambda info, in_dims, x: (two_outputs(x), (0, 0, 0)))
    with pytest.raises(RuleError, match="out_dims for 'output' has 3 entries, expected 2"):
        torch.vmap(op)(torch.ones(2, 3))
