# SPDX-License-Identifier: Apache-2.0
"""The form of an op whose objects are not taken apart, for calls that pass a handle instead of the object.

    mylib::run            (Tensor x, Tensor runner__weight, float runner__scale) -> Tensor
    mylib::run_by_handle  (Tensor x, SymInt runner) -> Tensor

Both have the same body. The second is opaque to every compiler, because a handle shows nothing of its object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from magi_opschema._lowering.annotations import Scope
from magi_opschema._lowering.signature import lower_signature_in
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.tree import dotted
from magi_opschema.errors import HandleError

from .fake import FakeSpec, sources_of


def lowered_by_handle(fn: Callable[..., Any], scope: Scope, lowering: SignatureLowering) -> SignatureLowering:
    """*lowering* with a handle for each object. A compiler does not see writes of the body into an object."""
    mutated = [leaf.name for slot in lowering.mutated for leaf in slot.leaves if not leaf.is_fixed]
    return lower_signature_in(fn, scope, mutated, f"{lowering.title}_by_handle", is_opaque=True)


def fake_by_handle(lowering: SignatureLowering, spec: FakeSpec) -> FakeSpec:
    """The fake *spec* of an op for its form with handles; raises if an output looks like a part of an object."""
    if callable(spec):
        return spec
    sources = sources_of(lowering, spec)
    inside = [dotted(leaf.path) for leaf in sources if leaf.is_fixed]
    if not inside:
        return [leaf.name for leaf in sources]

    def fake(*_: Any, **__: Any) -> NoReturn:
        text = f"an output looks like '{inside[0]}', and the call passes a handle, which hides it. Pass the object."
        raise HandleError(lowering.sentence(text))

    return fake
