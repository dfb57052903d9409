# SPDX-License-Identifier: Apache-2.0
"""A user's Triton kernel may have a constant that is infinite or not a number (every torch from 2.10 on).

Inductor writes the constants that a kernel names, its constant arguments and the configurations of its autotuner into a
separate module with `repr` (torch/_inductor/codegen/wrapper.py): ``-inf`` for ``float("-inf")``. That module does not
import the name ``inf``, so the graph does not compile. Attention masks, for example, use this constant.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._kernels import is_of_the_user
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


NAME = "define_infinite_constants"

_IMPORTS = "\nimport triton\n"


def patch() -> None:
    """Import the two names if the module of a kernel reads them."""
    from torch._inductor.codegen import wrapper

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def define_kernel(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> Any:
            # `escape_kernel_constants`, whose name sorts later, is called first, so the text between the quotes can be
            # parsed.
            if is_active(NAME) and is_of_the_user(kernel_body) and names_a_float(_module(kernel_body)):
                report(NAME)
                kernel_body = kernel_body.replace(_IMPORTS, f"\nfrom math import inf, nan{_IMPORTS}", 1)
            return original(self, kernel_name, kernel_body, *args, **kwargs)

        return define_kernel

    replace(wrapper.PythonWrapperCodegen, "define_kernel", make)


def _module(body: str) -> str:
    """The source of the module of a kernel, read from *body*, the call that defines the kernel."""
    match ast.parse(body.strip(), mode="eval").body:
        case ast.Call(args=[_, ast.Constant(value=str(source))]):
            return source
    raise AssertionError(f"Inductor defines a kernel in another way: {body[:80]}")


def names_a_float(module: str) -> bool:
    """Whether the source of a kernel's *module* reads ``inf`` or ``nan`` outside of the bodies of its functions."""
    if "inf" not in module and "nan" not in module:
        return False
    read = (node for part in _outside_of_bodies(ast.parse(module)) for node in ast.walk(part))
    return any(isinstance(node, ast.Name) and node.id in ("inf", "nan") for node in read)


def _outside_of_bodies(module: ast.Module) -> Iterator[ast.AST]:
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef):
            yield from statement.decorator_list
        else:
            yield statement


DEFECT = Defect(
    name=NAME,
    effect="a Triton kernel of the user with an infinite constant does not compile: 'name 'inf' is not defined'",
    severity="no code",
    since=(2, 10, 0),
    fixed=None,
    repair="the module of a user's Triton kernel imports the names of infinite constants",
    patch=patch,
)
