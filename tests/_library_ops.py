# SPDX-License-Identifier: Apache-2.0
"""The functions of libraries that benchmarks/libraries.py measures, as ops: `_library_ops.py (graphs|numbers) liger`.

`graphs` compiles each up to AOTAutograd with a driver that needs no GPU; `numbers` compares the compiled op with the
library's own call, with TRITON_INTERPRET=1. Either prints a line of JSON for each op.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from _library_scan import pretended_gpu
from triton.language.extra import libdevice
from triton.runtime import interpreter


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from _library_case import ops_of, with_one_config
from _library_op import LibraryOp


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    return tl.exp(x)


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


def complete_the_interpreter() -> None:
    """Give Triton's interpreter what it lacks of the compiler, before a library is imported."""
    with_one_config()
    # It calls no function of CUDA's library.
    libdevice.tanh, libdevice.exp, libdevice.rsqrt = tanh, exp, rsqrt
    original: Callable[..., Any] = interpreter._implicit_cvt

    def converted(given: Any) -> Any:
        """The compiler makes float32 of a float, and kernels ask for its type."""
        if not isinstance(given, float):
            return original(given)
        return tl.tensor(interpreter.TensorHandle(np.array([given], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = converted


def graphs(made: Any, op: LibraryOp, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """How the op comes out of AOTAutograd: its launches, or itself."""
    from magi_opschema import op_def
    from magi_tritonwrap.testing import aot_graphs, launches_of

    (graph,) = aot_graphs(made, *inputs, device="cpu")
    stays = op_def(made).torch_op in {node.target for node in graph.graph.nodes}
    return {"launches": len(launches_of(graph)), "opaque": stays}


def numbers(made: Any, op: LibraryOp, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Whether the op, compiled and not, gives what the library gives."""
    expected = (op.library or op.body)(*inputs)
    torch.compiler.reset()  # Dynamo counts the ops of one signature together
    compiled: Any = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    for found in (compiled(*inputs), made(*inputs)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return {}


def main(mode: str, *libraries: str) -> None:
    """Print a line for each op; one that fails says with what."""
    from magi_backend import magi_register_custom_op

    run = {"graphs": graphs, "numbers": numbers}[mode]
    if mode == "numbers":
        complete_the_interpreter()
    with pretended_gpu(for_triton=mode == "graphs"):
        ops = {name: op for library in libraries for name, op in ops_of(library).items()}
    for name, op in ops.items():
        torch.manual_seed(0)
        inputs = op.inputs(op.sizes["tiny"], torch.bfloat16 if mode == "graphs" else torch.float32)
        with (
            pretended_gpu(is_available=False, for_triton=mode == "graphs"),
            torch.no_grad(),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            try:
                found = run(magi_register_custom_op(f"library_ops::{name}")(op.body), op, inputs)
            except Exception as error:  # noqa: BLE001 - each op is tried, and what it fails with is its result
                found = {"error": f"{type(error).__name__}: {str(error).strip()}"}
        found["warnings"] = [
            str(one.message) for one in caught if type(one.message).__name__ == "OpaqueFallbackWarning"
        ]
        sys.stdout.write(json.dumps({"op": name, **found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
