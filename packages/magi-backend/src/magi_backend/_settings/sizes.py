# SPDX-License-Identifier: Apache-2.0
"""What ``compile_sizes`` holds: shapes and numbers by input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode


def _read(value: object) -> object:
    """*value* as sizes by input, each a shape or a number; it may be JSON from an environment variable."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, list | tuple) or not all(isinstance(sizes, Mapping) and sizes for sizes in value):
        msg = "not a sequence of dicts"
        raise ValueError(msg)
    return tuple({name: _shape(shape) for name, shape in sizes.items()} for sizes in value)


def _shape(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else value


_Number = Annotated[int, Field(ge=0, strict=True)]
_Sizes = Mapping[str, _Number | tuple[_Number, ...]]
SizeSets = Annotated[tuple[_Sizes, ...], NoDecode, BeforeValidator(_read)]
