# SPDX-License-Identifier: Apache-2.0
"""Whether a function that the user gave can be called the way this package will call it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING

from magi_opschema._text import location, show_with_type
from magi_opschema.errors import OpSchemaError, OptionError


if TYPE_CHECKING:
    from magi_opschema._model.lowering import SignatureLowering


def check_callable(
    lowering: SignatureLowering,
    option: str,
    fn: object,
    positional: Iterable[str],
    keywords: Iterable[str] = (),
    error: type[OpSchemaError] = OptionError,
) -> None:
    """Raise if *fn*, the value of *option*, is not a function that accepts these arguments.

    Raises:
        OptionError: it is not; or the class *error* if that is given.
    """
    if not callable(fn):
        text = f"{option} is {show_with_type(fn)}, expected a function."
        raise error(lowering.sentence(text))
    names, by_name = list(positional), list(keywords)
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(*names, **dict.fromkeys(by_name))
    except TypeError as unfit:
        called = ", ".join([*names, *(f"{name}={name}" for name in by_name)])
        text = f"{option} is called as {option}({called}), which {location(fn)} does not take: {unfit}."
        raise error(lowering.sentence(text)) from None
