# SPDX-License-Identifier: Apache-2.0
"""Compares the schemas of torchgen with those of the dispatcher; the only step of generating that imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magi_opschema.aten.errors import VerificationError


if TYPE_CHECKING:
    from .schema import Base


def verify(bases: list[Base]) -> int:
    """Compare every overload of *bases* with the dispatcher's schema, and return how many were compared.

    Raises:
        VerificationError: One or more differ, or are not registered; all of them in one error.
    """
    from magi_opschema.aten._torch_compat import dispatcher_schemas, parsed_schema

    registered = {
        (schema.name, schema.overload_name): schema
        for schema in dispatcher_schemas()
        if schema.name.startswith("aten::")
    }
    overloads = [overload for base in bases for overload in base.overloads]
    problems = []
    for overload in overloads:
        schema = registered.get((f"aten::{overload.base}", overload.name))
        if schema is None:
            problems.append(f"aten::{overload.qualified} is not registered")
        elif str(schema) != str(parsed_schema(f"aten::{overload.schema}")):
            problems.append(f"torchgen reads aten::{overload.schema}, the dispatcher has {schema}")
    if problems:
        listed = "\n  ".join(problems)
        msg = f"torchgen and the dispatcher disagree on {len(problems)} of {len(overloads)} overloads:\n  {listed}"
        raise VerificationError(msg)
    return len(overloads)
