# SPDX-License-Identifier: Apache-2.0
"""Where a setting's value comes from, who wins, what reaches Inductor, and how an error comes out of torch.compile."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest
import torch
from _settings_page import PAGE, drawn
from magi_backend import CompileConfig, MagiOptions, _settings, aot_compile, explain, magi_compile
from magi_backend._passes import chosen_passes
from magi_backend._settings import described, fields, read_request, variable
from magi_backend.errors import ConfigError, OptionError
from magi_passes import MagiInductorPass, PassPipeline
from magi_passes.errors import UndeclaredConfigMutationError
from pydantic import TypeAdapter
from torch import nn


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
    for name, (field, strict, _) in fields().items():
        if hints[name] != field.annotation:
            # What is held as a tuple may be given as any sequence.
            assert name in {"boundary_ops", "buckets", "compile_sizes", "regions"}
            empty: object = {} if name == "buckets" else ()
            assert strict.validate_python(TypeAdapter(hints[name]).validate_python(empty)) == empty


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
