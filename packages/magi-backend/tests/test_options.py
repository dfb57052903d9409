# SPDX-License-Identifier: Apache-2.0
"""What ``torch.compile`` hands to the backend: settings, Inductor's keys, and modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_backend import BackendError
from magi_backend._settings.options import read_request
from magi_backend.errors import OptionError


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


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
    assert overruled.explicit == {"max_autotune"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"options": {"max_autotun": True}},
            "Unknown option 'max_autotun' for the magi backend. Did you mean 'max_autotune'",
        ),
        ({"options": {"check": True}}, "Did you mean 'magi.check'"),
        ({"options": {"frobnicate": 1}}, "Its own options are magi.mode, magi.check, magi.tune"),
        (
            {"options": {"max_autotune": "yes"}},
            "The option max_autotune = 'yes' is a str; torch._inductor.config.max_autotune takes True or False.",
        ),
        ({"options": {"triton.max_block": 3}}, "Unknown option 'triton.max_block'"),
        ({"options": {3: True}}, "The option 3 is a int; options have names"),
        (
            {"options": {"magi.chek": True}},
            "'magi.chek' is not a setting of the magi backend. Did you mean 'magi.check'?",
        ),
        ({"mode": "fast"}, "mode='fast' is not a mode of the magi backend. Choose one of: default, reduce-overhead"),
        (
            {"mode": "max-autotune", "options": {"magi.mode": "default"}},
            """mode='max-autotune' and options={"magi.mode": 'default'} contradict each other.""",
        ),
    ],
)
def test_bad_input_is_named(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_request(**arguments)  # type: ignore[arg-type]

    assert sentence in str(caught.value)
    assert isinstance(caught.value, BackendError | ValueError)


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
    from dataclasses import dataclass

    from magi_passes import MagiInductorPass, PassPipeline
    from magi_passes.errors import UndeclaredConfigMutationError

    @dataclass(frozen=True)
    class Meddling(MagiInductorPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            torch._inductor.config.triton.max_tiles = 3

    options = PassPipeline([Meddling()]).inductor_options()

    with pytest.raises(UndeclaredConfigMutationError, match=r"^\S+Meddling changed"):
        torch.compile(add_one, backend="magi", options=options)(torch.ones(5))


def test_the_backend_is_found_by_name() -> None:
    assert "magi" in torch.compiler.list_backends()
    torch.testing.assert_close(torch.compile(add_one, backend="magi")(torch.ones(2)), torch.full((2,), 2.0))


def test_an_inductor_option_reaches_inductor() -> None:
    seen: list[bool] = []

    class Spy(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(torch._inductor.config.epilogue_fusion)

        def uuid(self) -> None:
            return None

    options: dict[str, Any] = {"epilogue_fusion": False, "post_grad_custom_pre_pass": Spy()}
    torch.compile(add_one, backend="magi", options=options)(torch.ones(3))

    assert seen == [False]
    assert torch._inductor.config.epilogue_fusion
