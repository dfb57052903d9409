# SPDX-License-Identifier: Apache-2.0
"""`torch_ops_metadata.json`: every overload of a surface as data, described by the JSON Schema next to this module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .schema import Base, Overload, Parameter, Return, Variant


FILE_NAME = "torch_ops_metadata.json"
SCHEMA_VERSION = 1
ATEN_SLOT = 8
JSON_SCHEMA = Path(__file__).parents[1] / "torch_ops_metadata.schema.json"


def metadata_text(bases: list[Base], torch_version: str) -> str:
    """The text of the file, which is identical for the same surface."""
    ops = [
        _op(base, variant, overload) for base in bases for variant in base.variants for overload in variant.overloads
    ]
    document = {"schema_version": SCHEMA_VERSION, "torch": torch_version, "ops": ops}
    # One line for each operator, so that a diff between two versions of torch is readable.
    lines = ",\n    ".join(json.dumps(op) for op in ops)
    head = json.dumps({key: value for key, value in document.items() if key != "ops"})[1:-1]
    return f'{{\n  {head},\n  "ops": [\n    {lines}\n  ]\n}}\n'


def _op(base: Base, variant: Variant, overload: Overload) -> dict[str, Any]:
    partner = variant.functional if overload.kind == "out" else variant.out
    return {
        "aten_name": base.name,
        "overload": overload.name,
        "name": base.canonical,
        "kind": overload.kind,
        "pair": None if partner is None else partner.name,
        "params": [_param(p) for p in overload.params + overload.outs],
        "outs": [p.schema_name for p in overload.outs],
        "returns": [_return(r) for r in overload.returns],
        "tags": list(overload.tags),
        "autogen": overload.autogen,
        "slots": [ATEN_SLOT],
        "schema": overload.schema,
    }


def _param(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.schema_name,
        "python_name": parameter.name,
        "type": parameter.type.text,
        "default": parameter.default,
        "kwarg_only": parameter.kwarg_only,
        "alias": parameter.alias,
    }


def _return(returned: Return) -> dict[str, Any]:
    return {"name": returned.name, "type": returned.type.text, "alias": returned.alias}
