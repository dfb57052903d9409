# SPDX-License-Identifier: Apache-2.0
"""Where a setting's value comes from, who wins, what reaches Inductor, and how an error comes out of torch.compile.

Then what a wrong type or value is answered with, at every public entry: a sentence, where the value was given.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import magi_opschema
import magi_tritonwrap
import pytest
import torch
from _settings_page import PAGE, drawn
from magi_backend import (
    BackendError,
    CompileConfig,
    MagiOptions,
    PassConfig,
    _settings,
    aot_compile,
    explain,
    magi,
    magi_compile,
    magi_register_custom_op,
)
from magi_backend._passes import chosen_passes
from magi_backend._settings import described, fields, read_request, variable
from magi_backend.errors import ConfigError, OptionError, TargetError, TargetTypeError
from magi_passes import MagiInductorPass, PassPipeline
from magi_passes.errors import UndeclaredConfigMutationError
from pydantic import TypeAdapter
from torch import Tensor, nn


SetEnv = Callable[[str, str], None]


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("MODE", "max-autotune", "mode", "max-autotune"),
        ("CHECK", "1", "check", True),
        ("PROGRESS", "false", "progress", False),
        ("REPORT", "runs/1", "report", "runs/1"),
        ("BOUNDARY_OPS", "a::b, c::d", "boundary_ops", ("a::b", "c::d")),
        ("MEMORY_BUDGET", "0.5", "memory_budget", 0.5),
        ("COMPILE_SIZES", '[{"x": [1, 16], "n": 3}]', "compile_sizes", ({"x": (1, 16), "n": 3},)),
        ("PASS_CONFIG__MAX_TILES", "2", "pass_config.max_tiles", 2),
    ],
)
def test_environment(set_env: SetEnv, variable: str, text: str, name: str, value: object) -> None:
    set_env(variable, text)
    config = CompileConfig()

    assert dict(config.items())[name] == value
    assert config.origin(name) == f"environment MAGI_COMPILE_{variable}"


def test_options_win_over_patch_over_environment_over_default(set_env: SetEnv) -> None:
    set_env("CHECK", "1")
    set_env("TUNE", "1")
    set_env("PROGRESS", "0")

    config = CompileConfig.resolve(config_patch={"tune": False, "progress": True}, options={"progress": False})

    assert (config.check, config.tune, config.progress, config.memory_budget) == (True, False, False, None)
    rows = {line.split()[0]: line.split()[1:] for line in str(config).splitlines()}
    assert rows["check"] == ["True", "environment", "MAGI_COMPILE_CHECK"]
    assert rows["tune"] == ["False", "config_patch"]
    assert rows["progress"] == ["False", "options"]
    assert rows["memory_budget"] == ["None", "default"]


def test_a_patch_may_be_a_function_of_the_settings(set_env: SetEnv) -> None:
    set_env("MEMORY_BUDGET", "0.8")

    halved = CompileConfig.resolve(config_patch=lambda config: {"memory_budget": (config.memory_budget or 1) / 2})
    replaced = CompileConfig.resolve(config_patch=lambda config: config.replace({"check": True}))

    assert halved.memory_budget == 0.4
    assert replaced.check
    assert replaced.origin("check") == "config_patch"
    assert replaced.origin("memory_budget") == "environment MAGI_COMPILE_MEMORY_BUDGET"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        CompileConfig().check = True


DOORS: dict[str, tuple[str, Callable[[str], object]]] = {
    "options": ("'magi.{}'", lambda name: read_request(options={f"magi.{name}": 1})),
    "options without the prefix": ("'magi.{}'", lambda name: read_request(options={name: 1})),
    "explain": ("'magi.{}'", lambda name: explain(add_one, {f"magi.{name}": 1})),
    "aot_compile": ("'magi.{}'", lambda name: aot_compile(nn.ReLU(), "p.pt2", (), options={f"magi.{name}": 1})),
    "resolve": ("'magi.{}'", lambda name: CompileConfig.resolve(options={name: 1})),
    "config_patch": ("'{}'", lambda name: magi_compile(add_one, config_patch={name: 1})),
    "config_patch with the prefix": ("'{}'", lambda name: magi_compile(add_one, config_patch={f"magi.{name}": 1})),
    "a function": ("'{}'", lambda name: magi_compile(add_one, config_patch=lambda _: {name: 1})),
    "replace": ("'{}'", lambda name: CompileConfig().replace({name: 1})),
    "a field": ("'{}'", lambda name: CompileConfig(**{name: 1})),
    "origin": ("'{}'", lambda name: CompileConfig().origin(name)),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_misspelt_name_is_an_error_with_the_nearest_one(door: str) -> None:
    spelling, go_through = DOORS[door]
    for name in fields():
        for misspelt in (name[:-1], name.upper(), name.replace("_", "-"), name.rpartition(".")[2][1:]):
            if misspelt != name:
                with pytest.raises(ConfigError, match=rf"Did you mean {re.escape(spelling.format(name))}( or .*)?\?"):
                    go_through(misspelt)


@pytest.fixture
def unread(set_env: SetEnv, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The warning about the variable of that name, which comes once; empty without one."""

    def warned(name: str) -> str:
        _settings._warn_once.cache_clear()
        monkeypatch.setenv(name, "1")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            configs = [CompileConfig() for _ in range(3)]
        monkeypatch.delenv(name)
        assert configs == [CompileConfig()] * 3
        assert len(caught) <= 1
        return "".join(str(one.message) for one in caught)

    return warned


def test_a_misspelt_variable_is_one_warning_with_the_nearest_one(unread: Callable[[str], str]) -> None:
    for name in map(variable, fields()):
        typing_errors = [name[:-1], name.replace("COMPILE_", "", 1), name.replace("COMPILE", "COMPLIE", 1)]
        typing_errors += ["MAGI_COMPILE_" + name.rpartition("__")[2]] * ("__" in name)
        for misspelt in typing_errors:
            assert f"The magi backend reads no setting from {misspelt} (did you mean {name}?)" in unread(misspelt)


FOREIGN = ["MAGI_MODEL", "MAGI_HOME", "MAGI_CACHE", "MAGICK_DEBUG", "MAGI_ATTENTION_MODE", "MAGI"]
OF_OTHER_PACKAGES = ["MAGI_OPSCHEMA_CHECK", "MAGI_PASSES_DISABLE", "MAGI_SLOT_add"]


@pytest.mark.parametrize("name", [*FOREIGN, *OF_OTHER_PACKAGES])
def test_a_variable_of_another_program_or_package_is_not_ours(name: str, unread: Callable[[str], str]) -> None:
    assert unread(name) == ""


def test_a_variable_that_is_near_to_none_does_not_stop_a_compilation(set_env: SetEnv) -> None:
    _settings._warn_once.cache_clear()
    set_env("TOPOLOGY_KEY", "1")

    with pytest.warns(UserWarning, match=r"reads no setting from MAGI_COMPILE_TOPOLOGY_KEY\. The variables are: MAGI"):
        torch.testing.assert_close(torch.compile(add_one, backend="magi")(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("CHECK", "maybe", "MAGI_COMPILE_CHECK = 'maybe': the setting check takes True or False."),
        ("MODE", "max-autotun", "'max-autotune-no-cudagraphs'. Did you mean 'max-autotune'?"),
        ("MEMORY_BUDGET", "2", "MAGI_COMPILE_MEMORY_BUDGET = '2': the setting memory_budget takes float from 0 to 1"),
        ("PASS_CONFIG__MAX_TILES", "many", "= 'many': the setting pass_config.max_tiles takes int from 2 to 3"),
        ("COMPILE_SIZES", "x", "MAGI_COMPILE_COMPILE_SIZES = 'x': the setting compile_sizes takes a sequence of dicts"),
        ("COMPILE_SIZES", '{"x": [1]}', "the setting compile_sizes takes a sequence of dicts"),
    ],
)
def test_a_bad_variable_is_named(set_env: SetEnv, variable: str, text: str, sentence: str) -> None:
    set_env(variable, text)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        CompileConfig()


def test_the_options_for_editors_are_the_settings() -> None:
    hints = {name.removeprefix("magi."): kind for name, kind in get_type_hints(MagiOptions).items()}

    assert list(hints) == list(fields())
    for name, (field, adapter) in fields().items():
        if hints[name] != field.annotation:
            # What is held as a tuple may be given as any sequence.
            assert name in {"boundary_ops", "buckets", "compile_sizes", "regions"}
            empty: object = {} if name == "buckets" else ()
            assert adapter.validate_python(TypeAdapter(hints[name]).validate_python(empty), strict=True) == empty


def test_settings_and_inductor_keys_are_told_apart() -> None:
    request = read_request(options={"magi.check": True, "triton.max_tiles": 2, "epilogue-fusion": False})

    assert request.config.check
    assert dict(request.inductor) == {"triton.max_tiles": 2, "epilogue_fusion": False}


def test_a_mode_sets_inductor_keys_and_the_user_overrides_them() -> None:
    by_argument = read_request(mode="max-autotune")
    by_option = read_request(options={"magi.mode": "max-autotune"})
    overruled = read_request(options={"magi.mode": "max-autotune", "max_autotune": False})

    assert dict(by_argument.inductor) == torch._inductor.list_mode_options("max-autotune")
    assert by_option.inductor == by_argument.inductor
    assert overruled.inductor["max_autotune"] is False


def test_torch_compile_raises_the_error_itself() -> None:
    compiled = torch.compile(add_one, backend="magi", options={"magi.chek": True})

    with pytest.raises(OptionError, match=r"^'magi.chek' is not a setting .* Did you mean 'magi.check'\?") as caught:
        compiled(torch.ones(2))

    assert isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed)  # for code that expects what torch raises
    assert type(caught.value.inner_exception) is OptionError
    assert len(caught.traceback) < 8, "Dynamo's own frames are left out"


def test_torch_may_swallow_the_error_and_run_eager() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="magi", options={"magi.chek": True})

    with torch._dynamo.config.patch(suppress_errors=True):
        torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_an_error_inside_inductor_comes_out_as_itself() -> None:
    @dataclass(frozen=True)
    class Meddling(MagiInductorPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            torch._inductor.config.triton.max_tiles = 3

    options = PassPipeline([Meddling()]).inductor_options()

    with pytest.raises(UndeclaredConfigMutationError, match=r"^\S+Meddling changed"):
        torch.compile(add_one, backend="magi", options=options)(torch.ones(5))


def test_an_inductor_option_reaches_inductor() -> None:
    seen: list[bool] = []

    def look(graph: torch.fx.Graph) -> None:
        seen.append(torch._inductor.config.epilogue_fusion)

    options: dict[str, Any] = {"epilogue_fusion": False, "post_grad_custom_pre_pass": look}
    torch.compile(add_one, backend="magi", options=options)(torch.ones(3))

    assert seen == [False]
    assert torch._inductor.config.epilogue_fusion


@pytest.mark.parametrize("tune", [False, True])
def test_the_settings_choose_the_passes(tune: bool) -> None:
    config = CompileConfig(tune=tune, tune_seconds=60.0, pass_config={"enable_conv_layout": False, "max_tiles": 2})
    passes: dict[str, Any] = {
        type(each).__name__: each for each in chosen_passes(config, torch.fx.symbolic_trace(add_one), ())
    }

    chooser = passes["ConvChooser"]
    assert (chooser.tune, chooser.tune_seconds) == (tune, 60.0)
    assert (chooser.layout, chooser.temporal, chooser.max_tiles) == (False, True, 2)
    assert ("NDTilingWorkaroundPass" in passes) is not tune


def test_the_page_on_settings_is_drawn_from_the_code_and_has_every_variable() -> None:
    page, sources = PAGE.read_text(), (PAGE.parent.parent / "packages").glob("*/src/**/*.py")
    variables = {name for file in sources for name in re.findall(r'"(MAGI_[A-Z_]*[A-Z])"', file.read_text())}

    assert page == drawn(page), "run python tests/_settings_page.py"
    assert {"MAGI_OPSCHEMA_CHECK", "MAGI_PASSES_DISABLE"} <= variables
    assert [name for name in {*variables, *map(variable, fields())} if f"`{name}`" not in page] == []
    assert all(all(described(name).values()) for name in fields())


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
