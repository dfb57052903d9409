# SPDX-License-Identifier: Apache-2.0
"""Errors of magi-backend. They have one base class, and a second, built-in one for the kind of mistake."""

from __future__ import annotations

from collections.abc import Iterable


class BackendError(Exception):
    """Base class of every error that magi-backend raises."""


class ConfigError(BackendError, ValueError):
    """A setting has a value that its field does not accept, or a name that no field has."""


class OptionError(ConfigError):
    """An entry of ``options=`` is unknown, has the wrong type, or contradicts another one."""


class CompileSizesError(ConfigError):
    """Sizes in ``magi.compile_sizes`` do not fit the captured graph, or leave one of its symbols open."""


class BucketsError(ConfigError):
    """Sizes in ``magi.buckets`` do not fit the captured graph, or what it computes for one row depends on others."""


class TargetError(BackendError, ValueError):
    """``magi_compile`` was given a parameter or a dimension that its target does not have."""


class TargetTypeError(TargetError, TypeError):
    """The object to compile, or an option or argument of its compilation, has a type that is not accepted."""


class BoundaryOpError(BackendError, LookupError):
    """A graph should be split at an operator that was never registered."""


class MismatchError(BackendError, ArithmeticError):
    """A compiled piece and eager PyTorch disagree beyond the tolerance of their dtype."""


class PackageError(BackendError, ValueError):
    """A model calls an operator that cannot be part of a package that is compiled ahead of time."""


class WarmStartError(BackendError, RuntimeError):
    """There is nothing to save for a warm start, or its folder cannot be used."""


class ReportError(BackendError, LookupError):
    """A folder holds no record of a run."""


def did_you_mean(close: Iterable[str]) -> str:
    """A sentence that proposes the *close* names, after a space; empty if there are none."""
    proposed = " or ".join(map(repr, close))
    return f" Did you mean {proposed}?" if proposed else ""


def family() -> tuple[type[Exception], ...]:
    """The base classes of the errors of these packages, which reach a user unwrapped."""
    from magi_opschema import OpSchemaError
    from magi_passes import MagiPassesError
    from magi_tritonwrap import TritonWrapError

    return BackendError, OpSchemaError, MagiPassesError, TritonWrapError
