# SPDX-License-Identifier: Apache-2.0
"""The function that Dynamo calls instead of a compiled graph, as source.

It reads the size inputs, looks for code for them, and calls that code with the other inputs. The source is written for
each graph, because a loop over the inputs would take longer than all of this.
"""

from __future__ import annotations

import itertools
import linecache
import re
import weakref
from typing import TYPE_CHECKING, Any

from . import _torch_compat


if TYPE_CHECKING:
    from collections.abc import Callable

    from .inputs import GraphInputs


_numbers = itertools.count()

MOST_PARAMETERS = 64
"""With more inputs than this, one tuple of all of them is faster than a parameter for each."""


def dispatch_source(inputs: GraphInputs, name: str) -> str:
    """The source of a function that makes the function *name* of the graph's inputs."""
    places = {size.place for size in inputs.sizes}
    if len(inputs.names) <= MOST_PARAMETERS:
        names = [f"size{place}" if place in places else f"input{place}" for place in range(len(inputs.names))]
        parameters = whole = ", ".join(names)
        values = [names[size.place] for size in inputs.sizes]
        kept = [f"inputs = [{', '.join(name for place, name in enumerate(names) if place not in places)}]"]
    else:
        parameters, whole = "*args", "*args"
        values = [f"args[{size.place}]" for size in inputs.sizes]
        dropped = ", ".join(f"inputs[{size.place}]" for size in reversed(inputs.sizes))
        kept = ["inputs = list(args)", f"del {dropped}"]
    under_hooks = [
        "hooks = saved_tensor_hooks(True)",
        "if hooks is not None:",
        f"    return under_hooks(hooks, key, ({whole},))",
    ]
    body = [
        f"key = ({', '.join(values)},)  # {', '.join(size.path for size in inputs.sizes)}",
        *(under_hooks if inputs.differentiates else ()),
        "try:",
        "    code = find(key)",
        "except TypeError:  # a symbolic size: the call is traced",
        f"    return general({whole})",
        "if code is None:",
        f"    return other(key, ({whole},))",
        "try:",
        "    note_use(key)",
        "except KeyError:  # another thread has dropped it, but this call still runs it",
        "    pass",
        "code.hits += 1",
        *kept,
        "return code.run(inputs)",
    ]
    lines = [
        "def make(find, other, general, under_hooks, saved_tensor_hooks, note_use):",
        f"    def {name}({parameters}):",
        *(f"        {line}" for line in body),
        "",
        f"    return {name}",
    ]
    return "\n".join(lines) + "\n"


def make_dispatch(inputs: GraphInputs, label: str, **parts: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, whose source is shown in tracebacks.

    *parts* are the values that its source uses, by name.
    """
    name = "sizes_of_" + re.sub(r"\W+", "_", label).strip("_").lower()
    source = dispatch_source(inputs, name)
    file = f"<magi_backend sizes {label} {next(_numbers)}>"
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec"), namespace)  # noqa: S102 - it is written above
    dispatch: Callable[..., Any] = namespace["make"](saved_tensor_hooks=_torch_compat.top_saved_tensor_hooks, **parts)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    weakref.finalize(dispatch, linecache.cache.pop, file, None)
    return dispatch
