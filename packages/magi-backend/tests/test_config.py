# SPDX-License-Identifier: Apache-2.0
"""Where a setting's value comes from, who wins, and how a bad one is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from magi_backend import CompileConfig
from magi_backend.errors import ConfigError


SetEnv = Callable[[str, str], None]


def test_defaults() -> None:
    assert dict(CompileConfig().items()) == {
        "mode": "default",
        "check": False,
        "tune": False,
        "progress": True,
        "boundary_ops": (),
        "memory_budget": None,
        "compile_sizes": (),
        "hot_sizes": 0,
        "hot_after": 3,
        "report": None,
        "profile": False,
        "strict": True,  # by the environment of all tests
        "on_unsupported": "error",
        "pass_config.enable_nd_tiling_workaround": True,
        "pass_config.enable_conv_layout": True,
        "pass_config.enable_temporal_conv": True,
        "pass_config.max_tiles": 3,
    }


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("MODE", "max-autotune", "mode", "max-autotune"),
        ("CHECK", "1", "check", True),
        ("ON_UNSUPPORTED", "opaque", "on_unsupported", "opaque"),
        ("PROGRESS", "false", "progress", False),
        ("REPORT", "runs/1", "report", "runs/1"),
        ("PROFILE", "1", "profile", True),
        ("BOUNDARY_OPS", "a::b, c::d", "boundary_ops", ("a::b", "c::d")),
        ("MEMORY_BUDGET", "0.5", "memory_budget", 0.5),
        ("PASS_CONFIG__ENABLE_ND_TILING_WORKAROUND", "0", "pass_config.enable_nd_tiling_workaround", False),
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
    assert [config.origin(name) for name in ("check", "tune", "progress", "memory_budget")] == [
        "environment MAGI_COMPILE_CHECK",
        "config_patch",
        "options",
        "default",
    ]


def test_a_patch_may_be_a_function_of_the_settings(set_env: SetEnv) -> None:
    set_env("MEMORY_BUDGET", "0.8")

    halved = CompileConfig.resolve(config_patch=lambda config: {"memory_budget": (config.memory_budget or 1) / 2})
    replaced = CompileConfig.resolve(config_patch=lambda config: config.replace({"check": True}))

    assert halved.memory_budget == 0.4
    assert replaced.check
    assert replaced.origin("check") == "config_patch"
    assert replaced.origin("memory_budget") == "environment MAGI_COMPILE_MEMORY_BUDGET"


def test_print_shows_each_value_and_its_origin(set_env: SetEnv) -> None:
    set_env("PASS_CONFIG__MAX_TILES", "2")

    text = str(CompileConfig.resolve(options={"check": True}))

    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["check"] == ["True", "options"]
    assert rows["pass_config.max_tiles"] == ["2", "environment", "MAGI_COMPILE_PASS_CONFIG__MAX_TILES"]
    assert rows["tune"] == ["False", "default"]


def test_arguments_of_the_program_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--check", "true", "--tune=1"])

    assert not CompileConfig().check


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        CompileConfig().check = True


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("CHECK", "maybe", "MAGI_COMPILE_CHECK = 'maybe': the setting check takes True or False."),
        ("MODE", "fast", "MAGI_COMPILE_MODE = 'fast': the setting mode takes one of 'default', 'reduce-overhead'"),
        ("MEMORY_BUDGET", "2", "MAGI_COMPILE_MEMORY_BUDGET = '2': the setting memory_budget takes float from 0 to 1"),
        (
            "PASS_CONFIG__MAX_TILES",
            "many",
            "MAX_TILES = 'many': the setting pass_config.max_tiles takes int from 2 to 3",
        ),
        (
            "CHEK",
            "1",
            "MAGI_COMPILE_CHEK does not name a setting of the magi backend. Did you mean MAGI_COMPILE_CHECK?",
        ),
        ("PASS_CONFIG", "{", "MAGI_COMPILE_PASS_CONFIG does not name a setting of the magi backend"),
    ],
)
def test_a_bad_variable_is_named(set_env: SetEnv, variable: str, text: str, sentence: str) -> None:
    set_env(variable, text)

    with pytest.raises(ConfigError) as caught:
        CompileConfig()

    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"chek": True},
            "'magi.chek' is not a setting of the magi backend. Did you mean 'magi.check'? The settings are: magi.mode",
        ),
        ({"check": "yes"}, "magi.check = 'yes' (a str, from options): the setting takes True or False."),
        ({"check": 1}, "magi.check = 1 (a int, from options)"),
        (
            {"memory_budget": -0.1},
            "magi.memory_budget = -0.1 (a float, from options): the setting takes float from 0 to 1",
        ),
        ({"boundary_ops": 3}, "the setting takes operator names such as 'ns::op'"),
        (
            {"pass_config.max_tiles": 4},
            "magi.pass_config.max_tiles = 4 (a int, from options): the setting takes int from 2",
        ),
        ({"pass_config": {}}, "'magi.pass_config' is not a setting of the magi backend"),
    ],
)
def test_a_bad_option_is_named(values: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompileConfig.resolve(options=values)

    assert sentence in str(caught.value)


def test_a_patch_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"config_patch gave a int\. It is a dict of dotted names"):
        CompileConfig.resolve(config_patch=lambda _: 3)  # type: ignore[arg-type, return-value]
