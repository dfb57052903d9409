# SPDX-License-Identifier: Apache-2.0
"""Linear algebra of the default ATen surface: `from magi_opschema.aten.linalg import ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from ._stubs.linalg import *  # noqa: F403  # the names that mypy sees


if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        from ._dispatch.load import submodule_attribute

        value = globals()[name] = submodule_attribute("linalg", name)
        return value
