# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between a pass, its pipeline and Inductor; one class per mistake."""

from __future__ import annotations


class MagiPassesError(Exception):
    """Root of every error that this package raises."""


class PassDefinitionError(MagiPassesError, TypeError):
    """A pass class, or what it returned, does not follow the rules of `MagiInductorPass`."""


class PassIdentityError(MagiPassesError, TypeError):
    """A pass holds a value that cannot become part of a stable uuid, so a cache could serve it stale code."""


class UnknownConfigKeyError(MagiPassesError, KeyError):
    """A pass declares an Inductor configuration key that the running torch does not have."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would put a sentence in quotes.
        return str(self.args[0])


class UndeclaredConfigMutationError(MagiPassesError, RuntimeError):
    """A pass changed Inductor configuration that it did not declare; the change was taken back."""


class PassesWouldBeDroppedError(MagiPassesError, RuntimeError):
    """Inductor was asked to compile in a way that silently drops every custom pass."""
