# SPDX-License-Identifier: Apache-2.0
"""Never less able than stock: what fails with our passes, options and repairs is compiled once more without them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

from . import _torch_compat
from ._records.hidden import without_fractions
from .errors import family
from .records import FallBack


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._graph_log import GraphLog


T = TypeVar("T")


def able_as_stock(
    attempt: Callable[[], T], again: Callable[[FallBack], T], graphs: GraphLog, passes: Sequence[object]
) -> T:
    """What *attempt* returns; if it fails where stock might not, what *again* returns, with a warning.

    *graphs* knows what ran in the attempt, and *passes* are those that we added. If *again* fails too, its error is
    raised, which is that of stock Inductor.
    """
    try:
        return attempt()
    except Exception as error:
        if not _may_be_ours(error, passes):
            raise
        failed = f"{type(error).__name__}: {error}"
    fell_back = FallBack(without_fractions(failed), graphs.passes_at_work())
    result = again(fell_back)
    warnings.warn(
        f"{graphs.label} was {fell_back}. Results are right, but the code may be slower. Please report this with what "
        "MAGI_COMPILE_REPORT=FOLDER writes. MAGI_COMPILE_STRICT=1 raises the error instead.",
        stacklevel=2,
    )
    return result


def _may_be_ours(error: BaseException | None, passes: Sequence[object]) -> bool:
    """Whether *error* can come from what we changed: not from a pass of the user's, a wrong setting or a wrong op."""
    own = family()
    while error is not None:
        failed_pass = vars(error).get("failed_pass")
        if failed_pass is not None:
            return any(failed_pass is each for each in passes)
        if isinstance(error, own) or not _torch_compat.compiling.is_failure(error):
            return False
        error = getattr(error, "inner_exception", None) or error.__cause__
    return True
