# SPDX-License-Identifier: Apache-2.0
r"""The source of a user's Triton kernel keeps its backslashes (torch < 2.13).

Inductor writes the kernel, the functions that it calls and the constants that it names into the generated module,
between three single quotes, and escapes nothing but such quotes (``define_user_defined_triton_kernel`` in
torch/_inductor/codegen/wrapper.py). So Python interprets each backslash once too often: ``"\n"`` becomes a line end
inside a string, inline PTX of several lines is invalid, and ``"\\t"`` becomes another string.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "escape_kernel_sources"

_writing: ContextVar[bool] = ContextVar("magi_writing_a_kernel", default=False)
"""Whether the source will be written between quotes, rather than into the key of a cache."""


def patch() -> None:
    """Double each backslash of a source that is written between quotes."""
    from torch._inductor.codegen import wrapper

    def make_definition(original: Callable[..., Any]) -> Callable[..., Any]:
        def define_user_defined_triton_kernel(*args: Any, **kwargs: Any) -> Any:
            token = _writing.set(is_active(NAME))
            try:
                return original(*args, **kwargs)
            finally:
                _writing.reset(token)

        return define_user_defined_triton_kernel

    def make_source(original: Callable[..., str]) -> Callable[..., str]:
        def source_code(*args: Any, **kwargs: Any) -> str:
            source = original(*args, **kwargs)
            if "\\" not in source or not _writing.get():
                return source
            report(NAME)
            return source.replace("\\", "\\\\")

        return source_code

    replace(wrapper.PythonWrapperCodegen, "define_user_defined_triton_kernel", make_definition)
    replace(wrapper, "user_defined_triton_kernel_transitive_closure_source_code", make_source)


DEFECT = Defect(
    name=NAME,
    effect="a Triton kernel of the user with a backslash in its source or in a constant has another text, or does not "
    "compile: 'SyntaxError: unterminated string literal'",
    severity="wrong code",
    since=(2, 10, 0),
    fixed=(2, 13, 0),
    repair="backslashes in the source of the user's Triton kernels are escaped",
    patch=patch,
)
