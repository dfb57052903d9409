# SPDX-License-Identifier: Apache-2.0
"""Every public function with values of every wrong kind: each is an error of this package, or is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from magi_opschema import (
    annotate,
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
from magi_opschema.errors import OpSchemaError
from torch import Tensor


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def plain(x: Tensor) -> Tensor:
    return x * 2


VALUES: list[Any] = [
    None, 3, True, "zz", "", b"q", 1.5, Unshowable(), [], {}, [1], {"a": 1}, object(), int, Unshowable,
    lambda: 0, torch.ones(2), len,
]  # fmt: skip

Use = Callable[[str, Any, Any], object]
# entry -> its use with a namespace, an op and a wrong value; the values that are right
ENTRIES: dict[str, tuple[Use, tuple[type, ...]]] = {
    "name": (lambda ns, op, v: magi_register_custom_op(v)(plain), (type(None),)),
    "fn": (lambda ns, op, v: magi_register_custom_op(f"{ns}::a")(v), ()),
    "mutates_args": (lambda ns, op, v: magi_register_custom_op(f"{ns}::a", mutates_args=v)(plain), (list, dict)),
    "tags": (lambda ns, op, v: magi_register_custom_op(f"{ns}::a", tags=v)(plain), (str, list, dict)),
    "setup_context_fn": (
        lambda ns, op, v: magi_register_custom_op(f"{ns}::a", setup_context_fn=v, backward_fn=lambda c, g: g)(plain),
        (type(None), type),
    ),
    "is_compute_sensitive": (
        lambda ns, op, v: magi_register_custom_op(f"{ns}::a", is_compute_sensitive=v)(plain),
        (bool,),
    ),
    "is_subgraph_boundary": (
        lambda ns, op, v: magi_register_custom_op(f"{ns}::a", is_subgraph_boundary=v)(plain),
        (bool,),
    ),
    "override": (lambda ns, op, v: magi_register_custom_op(f"{ns}::a", override=v)(plain), (bool,)),
    "lower_signature": (lambda ns, op, v: lower_signature(v), ()),
    "lower_signature, mutates_args": (lambda ns, op, v: lower_signature(plain, mutates_args=v), (list, dict)),
    "op_def": (lambda ns, op, v: op_def(v), ()),
    "annotate": (lambda ns, op, v: annotate(v, "key", "text"), ()),
    "annotate, key": (lambda ns, op, v: annotate(op, v, "text"), (str,)),
    "annotate, text": (lambda ns, op, v: annotate(op, "key", v), (str,)),
    "opcheck": (lambda ns, op, v: opcheck(v, (torch.ones(2),)), ()),
    "opcheck, kwargs": (lambda ns, op, v: opcheck(op, (torch.ones(2),), v, test_utils="test_schema"),
                        (type(None), dict)),
    "register_kernel": (lambda ns, op, v: register_kernel(v, "cpu", plain), ()),
    "register_kernel, device": (lambda ns, op, v: register_kernel(op, v, plain), ()),
    "register_kernel, fn": (lambda ns, op, v: register_kernel(op, "cpu", v), (type(None),)),
    "register_vmap": (lambda ns, op, v: register_vmap(v, lambda info, in_dims, x: 0), ()),
    "register_vmap, rule": (lambda ns, op, v: register_vmap(op, v), (type(None), type)),
    "register_autocast": (lambda ns, op, v: register_autocast(v, "cpu", torch.half), ()),
    "register_autocast, device": (lambda ns, op, v: register_autocast(op, v, torch.half), ()),
    "register_autocast, dtype": (lambda ns, op, v: register_autocast(op, "cpu", v), ()),
    "register_sharding": (lambda ns, op, v: register_sharding(v, lambda x: 0), ()),
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
