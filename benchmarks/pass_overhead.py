# SPDX-License-Identifier: Apache-2.0
"""What a pipeline of passes adds to the compilation of a graph of 1,000 nodes.

The arm ``pipeline`` is everything that magi_passes does around and inside Inductor for that graph (configuration saved
and put back, seven passes asked, records written), with an Inductor that does nothing else. The arm ``compile`` is a
whole cold ``torch.compile`` of the same function without passes. Their quotient is the share that a user pays; the
difference of two compilations would drown in their noise.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import magi_passes as mp
import torch
from _results import Row, rows_of, write
from torch import Tensor
from torch._inductor import compile_fx, config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.fx import GraphModule


NODES = 1000
CONVOLUTIONS = 20
REPEATS, COMPILATIONS = 21, 3
PASSES: tuple[mp.MagiInductorPass, ...] = (
    *(mp.ConvChooser(), mp.ConvPaddingPass(), mp.ChannelMomentsPass(), mp.TemporalConvPass()),
    *(mp.ConvLayoutPass(), mp.NDTilingWorkaroundPass(), mp.NDTilingWorkaroundPass(max_tiles=2)),
)


def model(x: Tensor, weight: Tensor) -> Tensor:
    """`NODES` operators, a convolution after each stretch of pointwise ones."""
    stretch = NODES // CONVOLUTIONS - 1
    for _ in range(CONVOLUTIONS):
        x = functional.conv2d(x, weight, padding=1)
        for place in range(stretch):
            x = x.sin() if place % 2 else x * 1.5
    return x


def traced(x: Tensor, weight: Tensor) -> tuple[GraphModule, list[Any]]:
    """The graph as Inductor's inner compilation gets it, with symbolic sizes; and its fake inputs."""
    graph = make_fx(model, tracing_mode="symbolic")(x, weight)
    return graph, [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def only_inner(module: GraphModule, inputs: list[Any], *, config_patches: dict[str, Any], **_: object) -> Any:
    """In the place of `compile_fx`: options are put in place, and the graph goes to the inner compilation."""
    with config.patch(config_patches):
        return compile_fx._compile_fx_inner(module, inputs, is_inference=True, graph_id=0)  # noqa: SLF001


def only_hooks(module: GraphModule, _inputs: object, **_: object) -> GraphModule:
    """In the place of Inductor's inner compilation: the hooks are called."""
    for name in ("post_grad_custom_pre_pass", "post_grad_custom_post_pass"):
        hook: Any = getattr(config, name)
        if hook is not None:
            hook(module.graph)
    return module


def without_inductor(module: Any) -> None:
    """Leave only the frame of Inductor, for the first pipeline of this process to wrap."""
    module.compile_fx, module._compile_fx_inner = only_inner, only_hooks  # noqa: SLF001


def pipeline_seconds(graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]) -> float:
    """The time of everything that the pipeline does for one graph."""
    module, inner = copy.deepcopy(graph), compile_fx.compile_fx
    start = time.perf_counter()
    inner(module, inputs, config_patches=dict(options))
    return time.perf_counter() - start


def compile_seconds(x: Tensor, weight: Tensor) -> float:
    """A whole compilation without passes and without caches."""
    torch.compiler.reset()
    with config.patch(force_disable_caches=True), torch.no_grad():
        start = time.perf_counter()
        torch.compile(model, dynamic=True)(x, weight)
        return time.perf_counter() - start


def measure() -> list[Row]:
    """Both arms."""
    x, weight = torch.randn(2, 8, 12, 16), torch.randn(8, 8, 3, 3)
    torch.compile(lambda x: x + 1)(x)  # starts the compiler
    compiling = [compile_seconds(x, weight) for _ in range(COMPILATIONS)]
    without_inductor(compile_fx)
    graph, inputs = traced(x, weight)
    options = mp.PassPipeline(PASSES).inductor_options()
    with mp.collect_records() as records:
        pipeline = [pipeline_seconds(graph, inputs, options) for _ in range(REPEATS + 1)][1:]
    assert len(records) == len(PASSES) * (REPEATS + 1), records
    return rows_of("graph_of_1000", {"pipeline": tuple(pipeline), "compile": tuple(compiling)})


def main() -> None:
    """Measure and write."""
    nodes = len(traced(torch.randn(2, 8, 12, 16), torch.randn(8, 8, 3, 3))[0].graph.nodes)
    note = f"{len(PASSES)} passes on a graph of {nodes} nodes with symbolic sizes, against compiling it on this CPU."
    write("pass_overhead", measure(), note=note)


if __name__ == "__main__":
    main()
