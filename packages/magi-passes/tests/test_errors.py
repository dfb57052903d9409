# SPDX-License-Identifier: Apache-2.0
"""What is given to or declared by a pass, and the sentence for what does not fit."""

from __future__ import annotations

import functools
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from made_passes import HOOK
from magi_passes import (
    ConvChooser,
    ConvLayoutPass,
    ConvPaddingPass,
    MagiInductorPass,
    MagiPassesError,
    NDTilingWorkaroundPass,
    PassContext,
    PassPipeline,
    Reason,
    TemporalConvPass,
)
from magi_passes.errors import (
    PassArgumentError,
    PassArgumentTypeError,
    PassDefinitionError,
    UnknownConfigKeyError,
    UnknownPassNameError,
)
from torch.fx.experimental.proxy_tensor import make_fx


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph


TYPE, VALUE = PassArgumentTypeError, PassArgumentError
FIELDS: list[tuple[Callable[..., object], dict[str, Any], type[MagiPassesError], str]] = [
    (ConvChooser, {"tune": 1}, TYPE, r"tune must be bool, not 1 of type int\. Write bool\(\.\.\.\) around it\.$"),
    (ConvChooser, {"tune": "yes"}, TYPE, r"tune must be bool, not 'yes' of type str\.$"),
    (ConvChooser, {"tune": np.True_}, TYPE, r"tune must be bool, not .*True.* of type bool_?\. Write bool"),
    (ConvChooser, {"cache_dir": Path("x")}, TYPE, r"cache_dir must be str or None, .* Write str\(\.\.\.\) around it"),
    (ConvChooser, {"layout": ConvLayoutPass}, TYPE, "layout must be bool, .* Give an instance, not the class"),
    (ConvChooser, {"max_tiles": True}, TYPE, "max_tiles must be int, not True of type bool"),
    (ConvChooser, {"max_tiles": 3.0}, TYPE, "max_tiles must be int, not 3.0 of type float. Write int"),
    (ConvChooser, {"max_tiles": torch.tensor(3)}, TYPE, r"max_tiles must be int, .* of type Tensor\. Write int"),
    (ConvChooser, {"min_share": np.float64(0.5)}, TYPE, r"min_share must be float, .* of type float64\. Write float"),
    (ConvChooser, {"min_share": "0.5"}, TYPE, r"min_share must be float, not '0.5' of type str\.$"),
    (ConvChooser, {"min_share": True}, TYPE, "min_share must be float, not True of type bool"),
    (NDTilingWorkaroundPass, {"max_torch": 2.11}, TYPE, "max_torch must be str or None, not 2.11 of type float"),
    (Reason, {"applies": torch.tensor(True), "text": "x"}, TYPE, r"applies must be bool, .* Write bool"),
    (Reason, {"applies": True, "text": None}, TYPE, "text must be str, not None"),
    (ConvChooser, {"max_tiles": 4}, VALUE, "max_tiles=4: a Triton grid has up to three dimensions; use 2 or 3$"),
    (ConvChooser, {"min_share": 1.5}, VALUE, "min_share=1.5: it is a share of the .*; use a number from 0 to 1$"),
    (ConvChooser, {"min_share": float("nan")}, VALUE, "min_share=nan: it is a share"),
    (ConvLayoutPass, {"nodes_per_conv": 0}, VALUE, "nodes_per_conv=0: it is a number of .*; use 1 or more$"),
    (TemporalConvPass, {"max_taps": 0}, VALUE, "max_taps=0: a kernel has at least one tap"),
    (TemporalConvPass, {"min_skipped": -0.1}, VALUE, "min_skipped=-0.1: it is a share"),
]


@pytest.mark.parametrize(("make", "arguments", "error", "sentence"), FIELDS)
def test_a_field_that_cannot_be_used_is_an_error_that_teaches(
    make: Any, arguments: dict[str, Any], error: type[MagiPassesError], sentence: str
) -> None:
    with pytest.raises(error, match=f"^{make.__name__}: {sentence}") as caught:
        make(**arguments)
    assert isinstance(caught.value, TypeError if error is TYPE else ValueError)


def test_what_fits_is_taken() -> None:
    assert ConvChooser(min_share=1).min_share == 1
    assert TemporalConvPass(min_skipped=2).min_skipped == 2
    assert NDTilingWorkaroundPass(max_torch=None, max_tiles=2, nodes_per_conv=1).max_torch is None


@pytest.mark.parametrize(
    ("version", "max_torch", "is_older"),
    [
        ("2.13.0+cpu", "2.13.1", True),
        ("2.13.1", "2.13.1", False),
        ("2.13.10", "2.13.9", False),
        ("2.13.2", "2.13.10", True),
        ("2.13.1", "2.13.1.post1", True),
        ("2.13.1.post1", "2.13.1.post2", True),
        ("2.13.0a0+git0fc8", "2.13", False),
        ("2.13.0a0+git0fc8", "2.13.1", True),
        ("2.12.1", "2.13.0a0+git0fc8", True),
        ("2.13.0.dev20260101+cu130", "2.13.0", False),
        ("2.9.0a0+145a3a7bda.nv25.10", "2.10", True),
        ("2.13.0-vendor1", "2.13", False),
    ],
)
def test_releases_are_compared_to_the_patch(version: str, max_torch: str, is_older: bool) -> None:
    graph = make_fx(torch.conv2d, tracing_mode="symbolic")(torch.ones(1, 3, 8, 9), torch.ones(4, 3, 3, 3)).graph
    verdict = NDTilingWorkaroundPass(max_torch=max_torch).is_applicable(graph, PassContext(torch_version=version))
    assert verdict.applies is is_older, verdict.text


@pytest.mark.parametrize("release", ["new", "", "2", "2.x", "2.13.", "2.13.1.2.3", "2.11abc", ">=2.11", "2,11", "2.-1"])
def test_what_is_not_a_release(release: str) -> None:
    sentence = f"^NDTilingWorkaroundPass: max_torch='{release}' is not a torch release; write it as '2.11' or '2.13.1'"
    with pytest.raises(PassArgumentError, match=sentence):
        NDTilingWorkaroundPass(max_torch=release)


@pytest.mark.parametrize(
    ("passes", "error", "sentence"),
    [
        (None, PassArgumentTypeError, r"passes is None, of type NoneType\. Give a list of passes\.$"),
        (3, PassArgumentTypeError, "passes is 3, of type int"),
        ("ConvChooser", PassArgumentTypeError, "passes is 'ConvChooser', of type str"),
        ({"a": ConvPaddingPass()}, PassArgumentTypeError, "of type dict"),
        (ConvPaddingPass(), PassArgumentTypeError, r"Put it into a list: PassPipeline\(\[\.\.\.\]\)\.$"),
        (ConvPaddingPass, PassArgumentTypeError, r"Put it into a list"),
        ([ConvPaddingPass], PassDefinitionError, r"item 0 is .* Pass an instance, not the class"),
        ([ConvPaddingPass(), None], PassDefinitionError, "item 1 is None"),
        ([[ConvPaddingPass()]], PassDefinitionError, r"item 0 is \[ConvPaddingPass\(\)\]"),
    ],
)
def test_what_is_not_a_list_of_passes(passes: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"^PassPipeline: .*{sentence}"):
        PassPipeline(passes)


def test_any_iterable_of_passes_will_do() -> None:
    assert len(PassPipeline(one for one in (ConvPaddingPass(),))) == 1
    assert PassPipeline(PassPipeline((ConvPaddingPass(),))) == PassPipeline([ConvPaddingPass()])


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ([("triton.max_tiles", 2)], r"base must be a dict of Inductor's options by name, or None; got \["),
        ("max_autotune", "base must be a dict"),
        (True, "base must be a dict"),
        ({1: 2}, "base must be a dict"),
        ({HOOK: ConvPaddingPass}, f"ConvPaddingPass'> at {HOOK}, which is a class; pass an instance"),
        ({HOOK: [print, 3]}, f"base has 3 at {HOOK}, which is nothing that can be called"),
        ({"post-grad-custom-post-pass": "pass"}, f"base has 'pass' at {HOOK}"),
    ],
)
def test_what_is_not_a_dict_of_options(base: Any, sentence: str) -> None:
    with pytest.raises(PassArgumentTypeError, match=f"^inductor_options: .*{sentence}"):
        PassPipeline([ConvPaddingPass()]).inductor_options(base)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        # Passes of other tests are loaded too, so the names are close.
        ("ConvLayout", r"names 'ConvLayout', which is not a pass\. Did you mean 'ConvLayoutPass'\?"),
        ("ConvChooser,TemporalConv", r"names 'TemporalConv', which is not a pass\. Did you mean 'TemporalConvPass'\?"),
        ("convchooser", "names 'convchooser', .*Did you mean 'ConvChooser'"),
        ("ALL", "names 'ALL', which is not a pass"),
        ("1", r"names '1', which is not a pass\. Give the names of classes, .* or 'all'\. Loaded are .*Conv"),
        ("ConvChooser;ConvLayoutPass", "names 'ConvChooser;ConvLayoutPass'"),
    ],
)
def test_the_environment_names_passes_that_exist(monkeypatch: pytest.MonkeyPatch, value: str, sentence: str) -> None:
    monkeypatch.setenv("MAGI_PASSES_DISABLE", value)
    with pytest.raises(UnknownPassNameError, match=f"^MAGI_PASSES_DISABLE {sentence}"):
        PassPipeline([ConvPaddingPass()])
    graph = make_fx(torch.sin)(torch.ones(3)).graph
    with pytest.raises(UnknownPassNameError):
        ConvPaddingPass()(graph)


@pytest.mark.parametrize("value", ["", " ", ",", "all", " ConvChooser , ConvPaddingPass ", "all,ConvChooser"])
def test_names_may_be_surrounded_by_spaces(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MAGI_PASSES_DISABLE", value)
    assert len(PassPipeline([ConvPaddingPass()])) == 1


def _pass(**members: Any) -> Any:
    namespace = {"__call__": lambda self, graph: None, **members}
    return make_dataclass("Bad", [], bases=(MagiInductorPass,), namespace=namespace, frozen=True)


def _keys(*keys: str) -> dict[str, Any]:
    return {"inductor_config_keys_potentially_mutated_by_this_pass": keys}


TABLE: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: PassPipeline([_pass()]), PassDefinitionError, r"item 0 is <class .*Pass an instance, not the class\."),
    (lambda: PassPipeline([cast("Any", print)]), TypeError, r"item 0 is .*Subclass MagiInductorPass, or .*adapt\(\)"),
    (
        lambda: PassPipeline([_pass(**_keys("zzz"))()]),
        UnknownConfigKeyError,
        r"'zzz', which torch \S+ does not have\.$",
    ),
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
