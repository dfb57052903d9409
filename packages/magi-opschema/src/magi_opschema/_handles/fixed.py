# SPDX-License-Identifier: Apache-2.0
"""The parts of an object for Dynamo: numbers are constants, and Tensors are inputs that stay in place."""

from __future__ import annotations

from typing import Any

from magi_opschema._torch_compat import fix_local, run_at_trace_time


def fixed(value: Any) -> Any:
    """*value*, a part of an object, marked as fixed while Dynamo traces.

    A number of an object would become symbolic when a second object has another value, but a body may need a constant,
    for example for the block size of a kernel. A CUDA graph would copy a Tensor to memory of its own at each replay,
    but the weights of a layer stay where they are, like parameters.
    """
    if isinstance(value, (list, tuple)):
        return [fixed(item) for item in value]
    run_at_trace_time(_fix)
    return value


def _fix(context: Any) -> None:
    fix_local(context, "value")
