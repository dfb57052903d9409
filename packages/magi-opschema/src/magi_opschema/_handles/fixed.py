# SPDX-License-Identifier: Apache-2.0
"""What Dynamo is told of the parts of an object: numbers are constants, and Tensors are inputs that stay in place."""

from __future__ import annotations

from typing import Any

from magi_opschema._torch_compat import fix_local, run_at_trace_time


def fixed(value: Any) -> Any:
    """*value*, a part of an object, while Dynamo traces.

    A number of an object would become symbolic once a second object has another; a body may need it where only
    constants can stand, such as the block size of a kernel. A CUDA graph would copy a Tensor to a place of its own at
    each replay; the weights of a layer stay where they are, as parameters do.
    """
    if isinstance(value, (list, tuple)):
        return [fixed(item) for item in value]
    run_at_trace_time(_fix)
    return value


def _fix(context: Any) -> None:
    fix_local(context, "value")
