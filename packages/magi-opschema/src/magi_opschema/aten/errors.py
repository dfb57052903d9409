# SPDX-License-Identifier: Apache-2.0
"""Errors of the generated ATen surface."""

from __future__ import annotations

from magi_opschema.errors import OpSchemaError


class AtenError(OpSchemaError):
    """Base of every error that `magi_opschema.aten` raises."""


class MissingExtraError(AtenError, ImportError):
    """A package of the extra `[aten]`, or torch's code generator, is not installed."""


class AllowlistError(AtenError, ValueError):
    """The allowlist cannot be read, or names an operator that the installed torch does not have."""


class SchemaTypeError(AtenError, TypeError):
    """An ATen schema uses a type that this package cannot express in Python."""


class VerificationError(AtenError, RuntimeError):
    """The schemas that were read differ from the dispatcher's."""


class OutputError(AtenError, OSError):
    """The output folder cannot be written, or holds something that this command did not write."""


class SurfaceError(AtenError, RuntimeError):
    """A generated surface cannot be loaded."""


class UnknownOpError(AtenError, AttributeError, LookupError):
    """The surface has no operator of that name."""

    def __str__(self) -> str:
        # The str of a LookupError would show the repr of the message.
        return str(self.args[0])


class SlotError(AtenError, ValueError):
    """A slot number is out of range, taken, or has no kernel."""


class KernelSignatureError(AtenError, TypeError):
    """A kernel's signature is not that of any overload of its operator."""


class ScaffoldError(AtenError, FileExistsError):
    """`magi-opschema aten new` would overwrite a file."""
