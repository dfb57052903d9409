# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Launch options: the compiled kernel has them, or its op stays opaque; unknown ones are errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from graph_questions import Ops, launch_of, launches, op_stays
from magi_tritonwrap import (
    OpaqueFallbackWarning,
    UnsupportedLaunchError,
    capture_launches,
    make_see_through,
    see_through_report,
    unsupported_launches,
)
from magi_tritonwrap._torch_compat.options import options_by_inductor, options_for_this_gpu, options_of_backends
from magi_tritonwrap.testing import aot_graphs, launches_of, stub_driver
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget


NVIDIA, AMD = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
TELLS = hasattr(CachingAutotuner, "_create_compile_options")
pytestmark = pytest.mark.skipif(not TELLS, reason="torch 2.10 does not say what it compiles with: all ops stay opaque")
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
TAKES_ALL_OF_AMD = RELEASE >= (2, 13)


def options_of_launch(ops: Ops, kernel: Any = patterns.double_kernel, **options: Any) -> dict[str, Any]:
    """The options of a launch in a graph, as the config holds them."""
    body = patterns.through(kernel, BLOCK=128, **options)
    launch = launch_of(ops.seen("launched", body))
    (config,) = launch.kernel.configs
    made, plain = options_by_inductor(launch.kernel.fn, [config], config), options_for_this_gpu({})
    assert all(value in (made[name], plain[name]) for name, value in options.items())
    return dict(config.kwargs)


CARRIED = [
    (NVIDIA, {"enable_fp_fusion": False}),
    *([(NVIDIA, {"enable_reflect_ftz": False})] if RELEASE >= (2, 11) else []),
    (NVIDIA, {"launch_pdl": True}),
    (NVIDIA, {"launch_cooperative_grid": True}),
    (AMD, {"waves_per_eu": 2}),
    (AMD, {"matrix_instr_nonkdim": 16, "waves_per_eu": 1}),
    *(
        (AMD, option)
        for option in ({"kpack": 2}, {"enable_fp_fusion": False}, {"schedule_hint": "x"})
        if TAKES_ALL_OF_AMD
    ),
]
LOST = [
    (NVIDIA, "maxnreg", 64),
    (NVIDIA, "num_ctas", 2),
    (NVIDIA, "ptx_options", "-O1"),
    *([(AMD, "kpack", 2)] if RELEASE == (2, 11) else []),
]


@pytest.mark.parametrize(("target", "options"), CARRIED)
def test_an_option_that_inductor_compiles_with(target: GPUTarget, options: dict[str, Any], ops: Ops) -> None:
    with stub_driver(target):
        assert options_of_launch(ops, **options) == options


@pytest.mark.parametrize("target", [NVIDIA, AMD])
def test_an_option_that_changes_nothing_is_left_out(target: GPUTarget, ops: Ops) -> None:
    with stub_driver(target):
        usual = {"enable_fp_fusion": True, "num_ctas": 1, "launch_cooperative_grid": False, "debug": False}
        assert options_of_launch(ops, num_warps=8, **usual | ({"maxnreg": None} if target is NVIDIA else {})) == {}


def test_warps_and_stages_are_those_of_eager(ops: Ops) -> None:
    """Triton's backend for AMD has two stages where `triton.Config` has three."""
    body = patterns.through(patterns.double_kernel, BLOCK=128, waves_per_eu=2)
    with stub_driver(AMD), capture_launches() as log, FakeTensorMode():
        body(torch.ones(300))
    assert len(log.launches) == 1
    with stub_driver(AMD):
        (config,) = launch_of(ops.seen("stages", body)).kernel.configs
    assert (config.num_warps, config.num_stages) == (4, 2)


@pytest.mark.parametrize(("target", "name", "value"), LOST)
def test_an_option_that_inductor_leaves_out_keeps_the_op_opaque(
    target: GPUTarget, name: str, value: Any, ops: Ops
) -> None:
    body = patterns.through(patterns.double_kernel, BLOCK=128, **{name: value})
    op = ops.define("lost", body)
    with stub_driver(target):
        made = options_for_this_gpu({})[name]
        make_see_through(op, body)
        sentence = f"'double_kernel' is launched with {name}={value!r}, and Inductor compiles it with {name}={made!r}"
        with pytest.warns(OpaqueFallbackWarning, match=f"lost stays opaque .*{sentence}; leave it out to have it in"):
            assert op_stays(op)
        (fallback,) = see_through_report(op).fallbacks
        assert sentence in fallback
        with pytest.raises(UnsupportedLaunchError, match=name), FakeTensorMode(), capture_launches():
            body(torch.ones(300))


# Triton refuses another value for these GPUs.
REFUSED = [(AMD, "num_ctas"), (NVIDIA, "clc")]
OTHER_VALUES: dict[type, Callable[[Any], Any]] = {bool: lambda value: not value, int: lambda value: 2 * (value or 1)}


@pytest.mark.filterwarnings("ignore:.*stays opaque")
@pytest.mark.parametrize("target", [NVIDIA, AMD])
def test_every_option_of_triton_is_compiled_with_or_keeps_its_op_opaque(target: GPUTarget, ops: Ops) -> None:
    with stub_driver(target):
        usual = options_for_this_gpu({})
        for name in sorted(options_of_backends()["nvidia" if target is NVIDIA else "amd"] & usual.keys()):
            make_other = OTHER_VALUES.get(type(usual[name]))
            if make_other is None or (target, name) in REFUSED:
                continue
            options = {name: make_other(usual[name])}
            body = patterns.through(patterns.double_kernel, BLOCK=128, **options)
            op = ops.seen(f"op_{name}", body)
            (graph,) = aot_graphs(op, torch.ones(300))
            wanted = options_for_this_gpu(options)
            for launch in launches_of(graph):
                tuned = getattr(launch.kernel, "configs", [triton.Config({})])
                made = options_by_inductor(getattr(launch.kernel, "fn", launch.kernel), tuned, tuned[0])
                assert made[name] == wanted[name] or wanted[name] == usual[name], name
            assert launches_of(graph) or see_through_report(op).fallbacks


@triton.jit
def dependent_kernel(x, out, n, BLOCK: tl.constexpr, launch_pdl: tl.constexpr = False):
    """As vLLM writes it: the option is a parameter as well."""
    if launch_pdl:
        tl.extra.cuda.gdc_wait()
    patterns.double_kernel(x, out, n, BLOCK)


@pytest.mark.usefixtures("stub")
def test_an_option_that_is_a_parameter_too(ops: Ops) -> None:
    assert options_of_launch(ops, dependent_kernel, launch_pdl=True) == {"launch_pdl": True}
    launch = launch_of(ops.seen("without", patterns.through(dependent_kernel, BLOCK=128)))
    assert launch.arguments["launch_pdl"] is False


@pytest.mark.usefixtures("stub")
def test_options_of_an_autotuned_launch(ops: Ops) -> None:
    def tuned(*options: dict[str, Any]) -> Any:
        configs = [triton.Config({"BLOCK": 128 << at, **each}) for at, each in enumerate(options)]
        return triton.autotune(configs=configs, key=[])(patterns.double_kernel)

    bodies = {
        "at_launch": patterns.through(tuned({}, {}), enable_fp_fusion=False),
        "in_configs": patterns.through(tuned({"enable_fp_fusion": False}, {"enable_fp_fusion": False})),
        "differing": patterns.through(tuned({"enable_fp_fusion": False}, {"enable_fp_fusion": True})),
    }
    for name, body in bodies.items():
        op = ops.seen(name, body)
        if name == "differing":
            with pytest.warns(OpaqueFallbackWarning, match="enable_fp_fusion=True, and Inductor compiles it with"):
                assert op_stays(op)
            continue
        launch = launch_of(op)
        assert [config.kwargs for config in launch.kernel.configs] == [
            {"BLOCK": 128, "enable_fp_fusion": False},
            {"BLOCK": 256, "enable_fp_fusion": False},
        ]


UNKNOWN = {
    "enable_fp_fussion": "launch option of Triton; did you mean enable_fp_fusion=",
    "zzz": "launch option of Triton; leave it out",
    "waves_per_eu": r"waves_per_eu=, an option of Triton for other GPUs \(amd\) than the one here; leave it out",
}


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_option_is_an_error(name: str, ops: Ops) -> None:
    body = patterns.through(patterns.double_default_kernel, **{name: 2})
    op = ops.seen("unknown", body)
    error = pytest.raises(BackendCompilerFailed, match=f"UnsupportedLaunchError: .*{UNKNOWN[name]}")
    with unsupported_launches("error"), error:
        aot_graphs(op, torch.ones(300))


def warmed_up(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    patterns.two_configs_kernel.warmup(x, out, x.numel(), grid=(1,))
    patterns.double_kernel.warmup(torch.float32, torch.float32, 4, BLOCK=128, grid=(1,))
    patterns.launch_double(x, out)
    return out


@pytest.mark.usefixtures("stub")
def test_a_kernel_that_is_compiled_beside_its_launch(ops: Ops) -> None:
    with capture_launches(drop=True) as log:
        warmed_up(torch.ones(300))
    assert len(log.launches) == 1
    op = ops.seen("warmed", warmed_up)
    assert [launch.kernel for launch in launches(op, torch.ones(300))] == [patterns.double_kernel]
