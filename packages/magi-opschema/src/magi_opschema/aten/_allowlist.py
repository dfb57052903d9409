# SPDX-License-Identifier: Apache-2.0
"""The allowlist: which ATen bases a surface has."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ._names import nearest
from .errors import AllowlistError, MissingExtraError


if TYPE_CHECKING:
    from ._schema import Base
    from ._torchgen import InstalledSchemas


SHIPPED = Path(__file__).with_name("aten_ops.yaml")
"""The allowlist that `magi_opschema.aten` generates from."""


def read_allowlist(path: Path) -> list[str]:
    """Read a YAML list of base names.

    Raises:
        AllowlistError: The file is missing, is not YAML, is not a list of names, or holds a name twice.
        MissingExtraError: pyyaml is not installed.
    """
    if importlib.util.find_spec("yaml") is None:
        msg = f"Reading {path} needs pyyaml: pip install 'magi-opschema[aten]'."
        raise MissingExtraError(msg)
    import yaml

    try:
        names = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"the allowlist {path} cannot be read: {error.strerror}"
        raise AllowlistError(msg) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        msg = f"the allowlist {path} is not YAML: {error}"
        raise AllowlistError(msg) from error
    if not isinstance(names, list) or not names:
        msg = f"the allowlist {path} must be a YAML list of base names such as '- softmax', not {type(names).__name__}"
        raise AllowlistError(msg)
    for entry, name in enumerate(names, start=1):
        if not isinstance(name, str):
            msg = f"the allowlist {path}: entry {entry} is {name!r}, not a name; quote it where YAML misreads it"
            raise AllowlistError(msg)
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        msg = f"the allowlist {path} names {', '.join(repeated)} more than once"
        raise AllowlistError(msg)
    return names


def select_bases(names: list[str], schemas: InstalledSchemas, source: Path) -> list[Base]:
    """The schemas of *names*, sorted by name.

    Raises:
        AllowlistError: Names that the installed torch does not have, all of them in one error, each with the nearest.
    """
    problems = [_problem(name, schemas) for name in names if name not in schemas.out_counts]
    if problems:
        listed = "\n  ".join(problems)
        msg = f"the allowlist {source} does not fit torch {schemas.torch_version}:\n  {listed}"
        raise AllowlistError(msg)
    return [schemas.base(name) for name in sorted(names)]


def _problem(name: str, schemas: InstalledSchemas) -> str:
    if name in schemas.other_names:
        return f"{name!r} has no overload that writes into out="
    if "." in name and name.partition(".")[0] in schemas.out_counts:
        return f"{name!r} is one overload; name the base {name.partition('.')[0]!r}, which brings all of them"
    return f"no operator {name!r}{nearest(name, schemas.out_counts)}"
