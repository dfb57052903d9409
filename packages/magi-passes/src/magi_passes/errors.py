# SPDX-License-Identifier: Apache-2.0
"""Errors between a pass, its pipeline and Inductor, one class for each mistake."""

from __future__ import annotations


class MagiPassesError(Exception):
    """Base class of every error that this package raises."""


class PassDefinitionError(MagiPassesError, TypeError):
    """A pass class, or what it returned, does not follow the rules of `MagiInductorPass`."""


class PassIdentityError(MagiPassesError, TypeError):
    """A pass holds a value that cannot be part of a stable uuid, so a cache could return stale code."""


class UnknownConfigKeyError(MagiPassesError, KeyError):
    """A pass declares an Inductor configuration key that the running torch does not have."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would put the message in quotes.
        return str(self.args[0])


class UndeclaredConfigMutationError(MagiPassesError, RuntimeError):
    """A pass changed Inductor configuration that it did not declare; the change was taken back."""


class PassesWouldBeDroppedError(MagiPassesError, RuntimeError):
    """Inductor was asked to compile in a way that silently drops every custom pass."""


class UnscopedConfigError(MagiPassesError, RuntimeError):
    """A pass that changes Inductor configuration was called where nothing would restore the old values."""


class PassFailedError(MagiPassesError, RuntimeError):
    """A pass raised an error of its own, which is the cause of this one."""


class BrokenGraphError(MagiPassesError, RuntimeError):
    """A pass left a graph that cannot be compiled."""


class UnknownPassNameError(MagiPassesError, ValueError):
    """The environment variable MAGI_PASSES_DISABLE names a pass that does not exist."""


class UnknownVariableWarning(UserWarning):
    """An environment variable has a name like those that this package reads, and is not one of them."""


class PassArgumentTypeError(MagiPassesError, TypeError):
    """An argument of a pass, a pipeline or a `Reason` has the wrong type."""


class PassArgumentError(MagiPassesError, ValueError):
    """An argument of a pass has a value that the pass cannot use."""
