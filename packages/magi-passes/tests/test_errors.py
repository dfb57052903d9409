# SPDX-License-Identifier: Apache-2.0
"""The sentence of each error that a definition can raise."""

from __future__ import annotations

import functools
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import MagiInductorPass, MagiPassesError, PassPipeline
from magi_passes.errors import PassDefinitionError, UnknownConfigKeyError


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph


def _pass(**members: Any) -> Any:
    namespace = {"__call__": lambda self, graph: None, **members}
    return make_dataclass("Bad", [], bases=(MagiInductorPass,), namespace=namespace, frozen=True)


def _keys(*keys: str) -> dict[str, Any]:
    return {"inductor_config_keys_potentially_mutated_by_this_pass": keys}


TABLE: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: PassPipeline([_pass()]), PassDefinitionError, r"item 0 is <class .*Pass an instance, not the class\."),
    (lambda: PassPipeline([print]), TypeError, r"item 0 is .*Subclass MagiInductorPass\."),  # type: ignore[list-item]
    (
        lambda: PassPipeline([_pass(**_keys("triton.max_tile"))()]),
        UnknownConfigKeyError,
        r"^Bad declares the Inductor key 'triton.max_tile', which torch .* Did you mean 'triton.max_tiles'",
    ),
    (lambda: PassPipeline([_pass(**_keys("zzz"))()]), KeyError, r"'zzz', which torch \S+ does not have\.$"),
    (
        lambda: _pass(inductor_config_keys_potentially_mutated_by_this_pass="triton.max_tiles"),
        PassDefinitionError,
        r"must be a tuple of strings, such as \('triton.max_tiles',\); got 'triton.max_tiles'",
    ),
    (
        lambda: _pass(__call__=functools.partialmethod(print)),
        PassDefinitionError,
        r"^Bad.__call__ is a partialmethod; define it with def",
    ),
    (lambda: _pass(hook="post_grad"), PassDefinitionError, r"Bad.hook is 'post_grad'; Inductor has pre_grad_custom"),
    (
        lambda: _pass(hook="joint_custom_pre_pass", **_keys("size_asserts")),
        PassDefinitionError,
        r"declares configuration keys but runs at joint_custom_pre_pass, long before",
    ),
]


@pytest.mark.parametrize(("make", "error", "sentence"), TABLE)
def test_definition_errors(make: Callable[[], object], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence) as caught:
        make()
    assert isinstance(caught.value, MagiPassesError)


def test_an_answer_that_is_neither_bool_nor_reason(inductor: Any) -> None:
    @dataclass(frozen=True)
    class Vague(MagiInductorPass):
        def is_applicable(self, graph: Graph, context: Any) -> Any:
            return "perhaps"

        def __call__(self, graph: Graph) -> None:
            pass

    compiled = torch.compile(lambda x: x @ x, options=PassPipeline([Vague()]).inductor_options())
    with pytest.raises(Exception, match=r"Vague.is_applicable returned 'perhaps'; return a bool, or Reason"):
        compiled(torch.ones(4, 4))
