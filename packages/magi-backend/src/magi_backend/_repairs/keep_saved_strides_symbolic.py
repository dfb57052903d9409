# SPDX-License-Identifier: Apache-2.0
"""The strides of tensors that are saved for the backward stay symbolic (torch >= 2.10).

Inductor tells AOTAutograd which strides the outputs of the forward have, and evaluates them for the sizes of the first
call (``set_tracing_context_output_strides``). Where these are not known to equal those of the trace, and symbolic ones
never are, the backward is compiled for tensors with these numbers as strides. So it is compiled again for each size, or
asserts the strides of another size: "expected size 2==2, stride 90==126".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "keep_saved_strides_symbolic"


def patch() -> None:
    """Give AOTAutograd the expressions instead of the numbers."""
    from torch._inductor import output_code
    from torch._inductor.utils import shape_env_from_inputs

    def make(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def set_tracing_context_output_strides(example_inputs: Any, compiled_graph: Any) -> None:
            original(example_inputs, compiled_graph)
            context: Any = torch._guards.TracingContext.try_get()
            environment: Any = shape_env_from_inputs(example_inputs)
            if not is_active(NAME) or environment is None or context is None or not context.output_strides:
                return
            for index, strides in enumerate(compiled_graph.output_strides):
                expressions = tuple(map(environment.deserialize_symexpr, strides or ()))
                if any(isinstance(stride, torch.SymInt) for stride in expressions):
                    context.output_strides[index] = expressions
                    report(NAME)

        return set_tracing_context_output_strides

    replace(output_code, "set_tracing_context_output_strides", make)


DEFECT = Defect(
    name=NAME,
    effect="a training step with dynamic sizes is compiled again for each size, or fails at the third: "
    "'expected size 2==2, stride 90==126'",
    severity="no code",
    since=(2, 10, 0),
    fixed=None,
    repair="strides of saved tensors are expressions of the sizes",
    patch=patch,
)
