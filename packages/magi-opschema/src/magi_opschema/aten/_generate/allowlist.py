# SPDX-License-Identifier: Apache-2.0
"""The allowlist: which ATen bases a surface has."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi_opschema.aten.errors import AllowlistError, MissingExtraError

from .names import nearest


if TYPE_CHECKING:
    from .schema import Base
    from .torchgen import InstalledSchemas


SHIPPED = Path(__file__).parents[1] / "aten_ops.yaml"
"""The allowlist that `magi_opschema.aten` generates from."""

_COMPARISONS = {"<": operator.lt, ">=": operator.ge}


def read_allowlist(path: Path) -> list[str]:
    """Read a YAML list of base names, and return those for the installed torch.

    An entry is a name, `softmax`, or a name with the releases of torch that have it: `cholesky: "<2.14"`,
    `new: ">=2.12"`, both ends with a comma.

    Raises:
        AllowlistError: The file is missing, is not YAML, is not a list of such entries, or holds a name twice.
        MissingExtraError: pyyaml is not installed.
    """
    if importlib.util.find_spec("yaml") is None:
        msg = f"Reading {path} needs pyyaml: pip install 'magi-opschema[aten]'."
        raise MissingExtraError(msg)
    import yaml

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"the allowlist {path} cannot be read: {error.strerror}"
        raise AllowlistError(msg) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        msg = f"the allowlist {path} is not YAML: {error}"
        raise AllowlistError(msg) from error
    if not isinstance(entries, list) or not entries:
        kind = type(entries).__name__
        msg = f"the allowlist {path} must be a YAML list of base names such as '- softmax', not {kind}"
        raise AllowlistError(msg)
    release = _numbers(importlib.metadata.version("torch"))
    names: list[str] = []
    served: dict[str, bool] = {}
    for place, entry in enumerate(entries, start=1):
        name, releases = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, "")
        if not isinstance(name, str):
            msg = f"the allowlist {path}: entry {place} is {name!r}, not a name; quote it where YAML misreads it"
            raise AllowlistError(msg)
        names.append(name)
        served[name] = _serves(releases, release, f"the allowlist {path}: entry {place}, {name!r},")
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        msg = f"the allowlist {path} names {', '.join(repeated)} more than once"
        raise AllowlistError(msg)
    return [name for name in names if served[name]]


def _serves(releases: Any, running: tuple[int, int], where: str) -> bool:
    if releases == "":
        return True
    parts = str(releases).replace(" ", "").split(",")
    bounds = [re.fullmatch(r"(<|>=)(\d+\.\d+)", part) for part in parts]
    if not all(bounds):
        msg = f"{where} has the releases {releases!r}; write them as '<2.14', '>=2.12' or '>=2.12,<2.14'"
        raise AllowlistError(msg)
    return all(_COMPARISONS[bound[1]](running, _numbers(bound[2])) for bound in bounds if bound)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def select_bases(names: list[str], schemas: InstalledSchemas, source: Path) -> list[Base]:
    """The schemas of *names*, sorted by name.

    Raises:
        AllowlistError: The installed torch does not have some names; the error lists all of them, each with the nearest
            name.
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
