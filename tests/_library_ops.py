# SPDX-License-Identifier: Apache-2.0
"""Thirty functions of three libraries, registered as ops: `python tests/_library_ops.py graphs` or `numbers`.

`graphs` compiles each up to AOTAutograd with a driver that needs no GPU; `numbers` compares the compiled op with the
library's own call, under Triton's interpreter. Either prints a line of JSON for each op.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


torch.manual_seed(0)
ROWS = torch.randn(8, 64)
MORE = torch.randn(8, 64)
SCALE = torch.randn(64)
HEADS = torch.randn(1, 64, 2, 32)
LABELS = torch.randint(0, 64, (8,))
COS = torch.randn(1, 8, 16)
LENGTHS = torch.tensor([0, 16, 64])
# Triton's interpreter takes `and` of two masks for Python's: where blocks are whole, there is nothing to mask.
WHOLE_BLOCKS = torch.randn(32, 512)


@dataclass(frozen=True)
class LibraryOp:
    """A function of a library.

    Attributes:
        place: its module and name.
        inputs: tensors of the op.
        call: from the function and the tensors to a tensor, as a user would write the body; the function alone if None.
    """

    place: str
    inputs: tuple[Tensor, ...] = (ROWS,)
    call: Callable[..., Any] | None = None

    @property
    def function(self) -> Any:
        """The library's function."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)


def _first(*rest: Any) -> Callable[..., Any]:
    return lambda function, *tensors: function(*tensors, *rest)[0]


LIGER, FLA, GEMS = "liger_kernel.ops", "fla", "flag_gems.ops"


# What a user writes around a function: which of its results is wanted, which settings it gets.
def _third(f: Any, a: Tensor, b: Tensor) -> Any:
    return f(a, b)[2]


def _in_chunks(f: Any, x: Tensor) -> Any:
    return f(x.contiguous(), 16)


FOUR_HEADS = torch.randn(1, 4, 8, 16)
OPS = (
    LibraryOp(f"{LIGER}.rms_norm:rms_norm_forward", (ROWS, SCALE), _first(1e-6, 0.0, "llama", None)),
    LibraryOp(f"{LIGER}.layer_norm:layer_norm_forward", (ROWS, SCALE, SCALE), _first(1e-6)),
    LibraryOp(
        f"{LIGER}.group_norm:group_norm_forward",
        (HEADS, torch.ones(64), torch.ones(64)),
        lambda f, x, weight, bias: f(x, 64, 4, weight, bias, 1e-6)[0],
    ),
    LibraryOp(
        f"{LIGER}.fused_add_rms_norm:fused_add_rms_norm_forward", (ROWS, MORE, SCALE), _first(1e-6, 0.0, "llama")
    ),
    LibraryOp(f"{LIGER}.poly_norm:poly_norm_forward", (ROWS, torch.ones(3), torch.ones(1)), _first(1e-6)),
    LibraryOp(f"{LIGER}.swiglu:swiglu_forward", (ROWS, MORE), _third),
    LibraryOp(f"{LIGER}.geglu:geglu_forward", (ROWS, MORE), _third),
    LibraryOp(f"{LIGER}.relu_squared:relu_squared_forward"),
    LibraryOp(f"{LIGER}.softmax:_softmax_forward", (ROWS,), _first()),
    LibraryOp(f"{LIGER}.sparsemax:_sparsemax_forward", (ROWS,), _first(-1)),
    LibraryOp(f"{LIGER}.dyt:liger_dyt_fwd", (ROWS, torch.ones(1), SCALE, SCALE)),
    LibraryOp(
        f"{LIGER}.kl_div:kldiv_forward_triton", (ROWS, MORE.softmax(-1)), lambda f, p, q: f(p, q, False, "none", 1e-9)
    ),
    LibraryOp(
        f"{LIGER}.tvd:tv_distance_forward_triton",
        (ROWS.softmax(-1), MORE.softmax(-1)),
        lambda f, p, q: f(p, q, None, "none", -100, False)[0],
    ),
    LibraryOp(
        f"{LIGER}.rope:rope_forward",
        (FOUR_HEADS, FOUR_HEADS[:, :2], COS, COS),
        lambda f, q, k, cos, sin: f(q.clone(), k.clone(), cos, sin)[0],
    ),
    LibraryOp(
        f"{LIGER}.cross_entropy:cross_entropy_forward",
        (ROWS, LABELS),
        lambda f, x, labels: f(x.clone(), labels, None, -100, 0.0, 0.0, "mean", None, False)[0],
    ),
    LibraryOp(f"{FLA}.modules.activations.ops:sigmoid_fwd"),
    LibraryOp(f"{FLA}.modules.activations.ops:swish_fwd"),
    LibraryOp(f"{FLA}.modules.activations.ops:logsigmoid_fwd"),
    LibraryOp(f"{FLA}.modules.activations.ops:elu_p1_fwd"),
    LibraryOp(f"{FLA}.modules.norm.l2norm:l2norm_fwd", (ROWS,), _first()),
    LibraryOp(f"{FLA}.ops.utils.logsumexp:logsumexp_fwd"),
    LibraryOp(f"{FLA}.ops.utils.softmax:softmax_fwd"),
    LibraryOp(f"{FLA}.ops.utils.pooling:mean_pooling_fwd", (HEADS,), _in_chunks),
    LibraryOp(f"{FLA}.ops.utils.cumsum:chunk_local_cumsum", (HEADS[..., 0],), _in_chunks),
    LibraryOp(
        f"{FLA}.ops.utils.cumsum:chunk_local_cumsum",
        (HEADS[..., 0], LENGTHS),
        lambda f, x, lengths: f(x.contiguous(), 16, cu_seqlens=lengths),
    ),
    LibraryOp(f"{GEMS}.log_softmax:log_softmax", (WHOLE_BLOCKS,), lambda f, x: f(x, 1)),
    LibraryOp(f"{GEMS}.mv:mv", (ROWS, SCALE)),
    LibraryOp(f"{GEMS}.sum:sum_dim", (WHOLE_BLOCKS,), lambda f, x: f(x, [1])),
    LibraryOp(f"{GEMS}.cumsum:cumsum", (ROWS,), lambda f, x: f(x, 1)),
    LibraryOp(
        f"{GEMS}.log_softmax:log_softmax_backward",
        (WHOLE_BLOCKS, WHOLE_BLOCKS.log_softmax(1)),
        lambda f, grad, output: f(grad, output, 1, torch.float32),
    ),
)


def body_of(op: LibraryOp) -> Callable[..., Tensor]:
    """The op's body at a flat signature."""
    function = op.function
    call: Callable[..., Tensor] = function if op.call is None else partial(op.call, function)

    def one(x: Tensor) -> Tensor:
        return call(x)

    def two(x: Tensor, y: Tensor) -> Tensor:
        return call(x, y)

    def three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return call(x, y, z)

    def four(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return call(x, y, z, w)

    bodies: tuple[Callable[..., Tensor], ...] = (one, two, three, four)
    return bodies[len(op.inputs) - 1]


def registered(number: int, op: LibraryOp) -> Any:
    from magi_backend import magi_register_custom_op

    name = op.place.rpartition(":")[2].strip("_")
    return magi_register_custom_op(f"library_ops::{name}_{number}")(body_of(op))


def graphs(number: int, op: LibraryOp) -> dict[str, Any]:
    """How the op comes out of AOTAutograd: its launches, or itself with the warnings that say why."""
    from magi_opschema import op_def
    from magi_tritonwrap.testing import aot_graphs, launches_of

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = registered(number, op)
        (graph,) = aot_graphs(made, *op.inputs, device="cpu")
    stays = op_def(made).torch_op in {node.target for node in graph.graph.nodes}
    said = [str(one.message) for one in caught if type(one.message).__name__ == "OpaqueFallbackWarning"]
    return {"launches": len(launches_of(graph)), "opaque": stays, "warnings": said}


def numbers(number: int, op: LibraryOp) -> dict[str, Any]:
    """Whether the op, compiled and not, gives what the library gives."""
    expected = body_of(op)(*op.inputs)
    made = registered(number, op)
    torch.compiler.reset()  # Dynamo counts the ops of one signature together
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    return {"equal": bool(torch.equal(compiled(*op.inputs), expected) and torch.equal(made(*op.inputs), expected))}  # type: ignore[no-untyped-call]


def main(mode: str, *only: str) -> None:
    """Print a line for each op; one that fails says with what."""
    run = {"graphs": graphs, "numbers": numbers}[mode]
    os.environ["GEMS_VENDOR"] = "nvidia"
    if mode == "numbers":
        os.environ["TRITON_INTERPRET"] = "1"
        from _interpreted_libraries import prepare

        prepare()
    from _library_scan import pretended_gpu

    for number, op in enumerate(OPS):
        if only and str(number) not in only:
            continue
        with pretended_gpu(for_triton=mode == "graphs"):
            importlib.import_module(op.place.partition(":")[0])
        with pretended_gpu(is_available=False, for_triton=mode == "graphs"):
            try:
                found = run(number, op)
            except Exception as error:  # noqa: BLE001 - each op is tried, and what it fails with is its result
                found = {"error": f"{type(error).__name__}: {str(error).strip()}"}
        sys.stdout.write(json.dumps({"op": f"{number} {op.place}", **found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
