# SPDX-License-Identifier: Apache-2.0
"""The entry: a captured graph compiled for any size, and for single sizes if the settings ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magi_backend._records.records import SizesOutcome

from .captured import capture
from .explicit import explicit_keys
from .outcome import sizes_outcome
from .table import SizeTable


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

    from magi_backend._records.log import CompilationLog
    from magi_backend._settings.config import CompileConfig

    from .captured import Compile


def with_sizes(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: CompileConfig,
    log: CompilationLog,
    compile_general: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    compile_static: Compile,
) -> Callable[..., Any]:
    """Compile *gm* for any size. Returns the function that also finds code for single sizes.

    If the settings are off and no report counts sizes, it returns the code for any size itself.

    Raises:
        CompileSizesError: ``magi.compile_sizes`` does not fit the graph.
    """
    wanted = config.hot_sizes or config.compile_sizes or log.watched
    captured = capture(gm, example_inputs) if wanted else None
    general = compile_general(gm, example_inputs)
    if captured is None:
        return general
    if captured.reason:
        log.update(sizes=SizesOutcome(captured.inputs.symbols, (), 0, 0, symbolic=captured.reason))
        return general
    captured.context.finish()
    table = SizeTable(
        captured,
        general,
        compile_static,
        hot_sizes=config.hot_sizes,
        hot_after=config.hot_after,
        explicit=explicit_keys(captured, config.compile_sizes),
        label=log.label,
    )
    log.count_sizes(lambda: sizes_outcome(table))
    dispatch = table.dispatch()
    # Ahead-of-time compilation reads these attributes of a backend's result, and saves the code for any size.
    for name in ("serialize", "zero_grad", "named_parameters", "named_buffers"):
        if hasattr(general, name):
            setattr(dispatch, name, getattr(general, name))
    return dispatch
