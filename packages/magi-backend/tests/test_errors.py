# SPDX-License-Identifier: Apache-2.0
"""What a wrong type or value is answered with, at every public entry: a sentence, where the value was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import magi_opschema
import magi_tritonwrap
import pytest
import torch
from magi_backend import BackendError, CompileConfig, PassConfig, explain, magi, magi_compile, magi_register_custom_op
from magi_backend._settings import read_request
from magi_backend.errors import ConfigError, OptionError, TargetError, TargetTypeError
from torch import Tensor, nn


if TYPE_CHECKING:
    from collections.abc import Callable


def scale(x: Tensor, n: int = 1) -> Tensor:
    return x * n


def compiled(**options: Any) -> Callable[[], object]:
    return lambda: magi_compile(scale, **options)


def explained(**options: Any) -> Callable[[], object]:
    return lambda: explain(scale, **options)


def resolved(options: Any) -> Callable[[], object]:
    return lambda: CompileConfig.resolve(options=options)


MAGI_COMPILE = [
    (compiled(dynamic_arg_dims=["x"]), TargetTypeError, "scale: dynamic_arg_dims=['x'] is a list; it takes a dict of"),
    (compiled(dynamic_arg_dims={"x": 0.0}), TargetError, "dynamic_arg_dims['x'] is 0.0; it takes a dimension such as"),
    (compiled(model_tag=3), TargetTypeError, "model_tag=3 is a int; it takes a name, a str"),
    (compiled(enable_if=True), TargetTypeError, "enable_if=True is a bool; it takes a function without arguments"),
    (compiled(config_patch=3), ConfigError, "config_patch gave a int. It is a dict of dotted names"),
    (compiled(config_patch={3: True}), ConfigError, "3 (a int) is not the name of a setting. Names are such as 'mode'"),
    (compiled(config_patch={"check": 1}), ConfigError, "check = 1 (a int, from config_patch): the setting takes True"),
    (compiled(config_patch={"chek": 1}, enable_if=lambda: False), ConfigError, "'chek' is not a setting"),
    (compiled(config_patch=lambda _: {"tune": None}), ConfigError, "tune = None (a NoneType, from config_patch)"),
    (
        lambda: magi_compile(3),  # type: ignore[call-overload]
        TargetTypeError,
        "magi_compile cannot compile an object of type int. It takes a subclass or an instance of torch.nn.Module",
    ),
    (lambda: magi_compile(dict), TargetTypeError, "magi_compile cannot compile the class dict."),
    (lambda: magi_compile(scale, dynamic_arg_dims={"xx": 0}), TargetError, "Did you mean 'x'? Its parameters are x, n"),
    (compiled(dynamic_arg_dims={"x": {"0": "maybe"}}), TargetError, "or how each varies, such as {0: 'unbacked'}"),
    (
        compiled(dynamic_arg_dims={"x": {0: "unbaked"}}),
        TargetError,
        "dynamic_arg_dims['x'][0] is 'unbaked'. Did you mean 'unbacked'? It takes one of dynamic, maybe, unbacked.",
    ),
]

SETTINGS = [
    (lambda: CompileConfig(check="yes"), "check = 'yes': the setting check takes True or False."),
    (lambda: CompileConfig(memory_budget="0.5"), "memory_budget = '0.5': the setting memory_budget takes float from 0"),
    (lambda: CompileConfig(memory_budget=float("nan")), "memory_budget = nan"),
    (lambda: CompileConfig(boundary_ops=[3]), "boundary_ops takes operator names such as 'ns::op'"),
    (lambda: CompileConfig(pass_config=3), "pass_config = 3: the settings pass_config take a PassConfig or a dict"),
    (lambda: CompileConfig(pass_config={"max_tiles": "2"}), "pass_config.max_tiles = '2': the setting pass_config.max"),
    (lambda: CompileConfig(pass_config={"tiles": 2}), "'pass_config.tiles' is not a setting"),
    (lambda: PassConfig(max_tiles=9), "pass_config.max_tiles = 9: the setting pass_config.max_tiles takes int from 2"),
    (resolved(3), "options = 3 is a int. It is a dict"),
    (resolved({"pass_config": {}}), "'magi.pass_config' is not a setting of the magi backend"),
    (lambda: CompileConfig().replace([]), "argument = [] is a list. It is a dict"),  # type: ignore[arg-type]
]

OPTIONS = [
    (explained(options=3), "options=3 is a int. It is a dict such as {'magi.check': True}."),
    (explained(options={"magi.chek": True}), "'magi.chek' is not a setting of the magi backend. Did you mean 'magi.ch"),
    (explained(options={"max_autotun": 1}), "Unknown option 'max_autotun' for the magi backend. Did you mean 'max_aut"),
    (explained(options={"frobnicate": 1}), "Its own options are magi.mode, magi.check, magi.tune"),
    (explained(options={3: True}), "The option 3 is a int; options have names"),
    (
        explained(options={"max_autotune": "yes"}),
        "The option max_autotune = 'yes' is a str; torch._inductor.config.max_autotune takes True or False.",
    ),
    (
        lambda: read_request(mode="max-autotune", options={"magi.mode": "default"}),
        """mode='max-autotune' and options={"magi.mode": 'default'} contradict each other.""",
    ),
    (explained(mode="fast"), "mode='fast' is not a mode of the magi backend. Choose one of: default, reduce-overhead"),
    (explained(mode="default", options={"magi.check": True}), "explain: mode='default' together with options."),
    (explained(repeats=True), "explain: repeats=True is not a number of calls"),
    (explained(repeats=-1), "explain: repeats=-1 is not a number of calls; it takes 0, 1, 2"),
    (
        lambda: explain(torch.compile(scale, backend="magi"), dynamic=True),
        "scale is compiled already, so dynamic would have no effect",
    ),
    (explained(dynamic="yes"), "explain: dynamic='yes' is a str; it takes True, False or None."),
    (explained(fullgraph=1), "explain: fullgraph=1 is a int; it takes True or False."),
    (lambda: torch.compile(scale, backend="magi", options={"magi.tune": 1})(torch.ones(2)), "magi.tune = 1 (a int"),
]

OBJECTS = [
    (lambda: explain(3), "explain takes a module or a function, and got 3 (a int)."),  # type: ignore[arg-type]
    (lambda: explain(nn.Linear), "explain takes a module or a function, and got <class"),
    (lambda: magi(scale, [torch.ones(2)]), "magi compiles a graph that Dynamo captured, and got <function scale"),  # type: ignore[arg-type]
    (lambda: magi(nn.ReLU(), [torch.ones(2)]), 'Write torch.compile(model, backend="magi").'),  # type: ignore[arg-type]
]

ROWS = [
    *MAGI_COMPILE,
    *((act, ConfigError, sentence) for act, sentence in SETTINGS),
    *((act, OptionError, sentence) for act, sentence in OPTIONS),
    *((act, TargetTypeError, sentence) for act, sentence in OBJECTS),
]


@pytest.mark.parametrize(("act", "kind", "sentence"), ROWS)
def test_a_wrong_argument(act: Callable[[], object], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        act()

    assert sentence in str(caught.value)
    assert isinstance(caught.value, BackendError)
    assert isinstance(caught.value, TypeError if kind is TargetTypeError else ValueError)


@pytest.mark.parametrize(("extra", "shown"), [(3, r"3 \(a int\)\. Give a list of"), ([scale], "<function scale")])
def test_extra_kernels_that_are_none(extra: Any, shown: str, ns: str) -> None:
    with pytest.raises(magi_tritonwrap.TritonWrapError, match=f"an extra kernel is {shown}"):
        magi_register_custom_op(f"{ns}::scale", extra_triton_kernels=extra)(scale)


def test_a_decorator_without_brackets_is_noticed() -> None:
    with pytest.raises(magi_opschema.OpSchemaError, match=r"takes a name, and got a function .* Write @magi_register"):
        magi_register_custom_op(scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [0, [0], (0, 1), range(1), [0, -2]])
def test_any_sequence_of_dimensions_is_taken(dims: Any) -> None:
    fn = magi_compile(scale, dynamic_arg_dims={"x": dims})

    torch.testing.assert_close(fn(torch.ones(3, 2), 2), torch.full((3, 2), 2.0))


@pytest.mark.parametrize("arguments", [(), (1, 2, 3)])
def test_wrong_arguments_are_refused_as_the_function_does_it(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"scale\(\) (missing|takes)"):
        magi_compile(scale, dynamic_arg_dims={"x": 0})(*arguments)
