# SPDX-License-Identifier: Apache-2.0
r"""A string that a user's Triton kernel takes as a constant keeps its value (every torch from 2.10 on).

Constant arguments and the configurations of an autotuner are written above the kernel in the generated module, between
the same three single quotes (``define_user_defined_triton_kernel`` in torch/_inductor/codegen/wrapper.py). They are
written with `repr` and not escaped again: a ``tl.constexpr`` argument ``"a\nb"`` becomes invalid, ``r"\t"`` becomes a
tab, and ``"'''"`` ends the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._kernels import is_of_the_user
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "escape_kernel_constants"

_QUOTES = "'''"
_SOURCE = "\n@triton.jit\n"


def patch() -> None:
    """Escape the text above the source of such a kernel."""
    from torch._inductor.codegen import wrapper

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def define_kernel(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> Any:
            body = with_escaped_constants(kernel_body) if is_active(NAME) else kernel_body
            if body != kernel_body:
                report(NAME)
            return original(self, kernel_name, body, *args, **kwargs)

        return define_kernel

    replace(wrapper.PythonWrapperCodegen, "define_kernel", make)


def with_escaped_constants(body: str) -> str:
    """*body*, the call that defines a kernel, with the text above the source of the kernel escaped once."""
    if not is_of_the_user(body):
        return body
    opening, quotes, text = body.partition(_QUOTES)
    above, source, kernel = text.partition(_SOURCE)
    escaped = above.replace("\\", "\\\\").replace(_QUOTES, "\\'" * 3)
    return "".join((opening, quotes, escaped, source, kernel))


DEFECT = Defect(
    name=NAME,
    effect="a Triton kernel of the user that takes a text with a backslash, the end of a line or three quotes as a "
    "constant gets another text, or does not compile: 'SyntaxError: unterminated string literal'",
    severity="wrong code",
    since=(2, 10, 0),
    fixed=None,
    repair="texts among the constant arguments of the user's Triton kernels are escaped",
    patch=patch,
)
