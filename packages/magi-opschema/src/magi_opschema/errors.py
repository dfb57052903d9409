# SPDX-License-Identifier: Apache-2.0
"""Every error that magi-opschema raises on purpose.

Each says what is wrong, where (dotted path, file and line of the user's function), why, and what to do. All have the
base class `OpSchemaError`. Each has a second, built-in base class, so that code that does not know this package can
catch it as a `TypeError`, `ValueError`, `RuntimeError` or `LookupError`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One bad place in a signature: its dotted path (`cfg.opt.betas`) and the message about it."""

    path: str
    sentence: str


class OpSchemaError(Exception):
    """Base class of every error of this package."""


class SignatureError(OpSchemaError, TypeError):
    """A signature cannot be lowered. All its bad places are in `problems` and in the message.

    `function` is the op's qualified name; without an op, the function's name with brackets.
    """

    def __init__(self, function: str, location: str, problems: tuple[Problem, ...]) -> None:
        self.function = function
        self.location = location
        self.problems = problems
        if len(problems) == 1:
            message = f"{function}: {problems[0].sentence} ({location})"
        else:
            listed = "\n".join(f"  - {problem.sentence}" for problem in problems)
            counted = f"{len(problems)} places of the signature have no flat schema form"
            message = f"{function}: {counted} ({location}):\n{listed}"
        super().__init__(message)


class OpNameError(OpSchemaError, ValueError):
    """An op name is not `namespace::op`."""


class DuplicateOpError(OpSchemaError, ValueError):
    """An op of this name exists, or the decorated object is an op already."""


class UnknownOpError(OpSchemaError, LookupError):
    """magi-opschema has registered no op of this name, or for this object."""


class OptionError(OpSchemaError, ValueError):
    """An option of the decorator names something that the signature does not have, or contradicts another."""


class ArgumentError(OpSchemaError, TypeError):
    """A call does not fit the signature, or a value is not of the class in the signature."""


class ArgumentValueError(OpSchemaError, ValueError):
    """A value at a call is of the right class, but not among the values that the signature allows."""


class HandleError(OpSchemaError, LookupError):
    """A handle names no object of this process, or an object was read where there is none."""


class ObjectFieldError(OpSchemaError, AttributeError):
    """A body wrote an attribute of an object that was rebuilt for it, or read one that the object was not given."""


class ReturnValueError(OpSchemaError, TypeError):
    """A body or a fake returned a value that does not fit the signature."""


class RoundTripError(OpSchemaError, ValueError):
    """A record differs after it was taken apart and rebuilt."""


class FakeMismatchError(OpSchemaError, RuntimeError):
    """The fake describes other outputs than the body returned."""


class AliasingError(OpSchemaError, RuntimeError):
    """A body returned one of its inputs, a view of one, or the same tensor twice."""


class MissingBackwardError(OpSchemaError, NotImplementedError):
    """A gradient was requested from an op that has no `backward_fn`."""


class ForwardModeError(OpSchemaError, NotImplementedError):
    """A forward-mode derivative was requested from an op."""


class EnvironmentVariableError(OpSchemaError, ValueError):
    """An environment variable of this package has an unknown name, or a value that cannot be used."""


class MutationError(OpSchemaError, RuntimeError):
    """A body wrote into a Tensor that it must not change, or that requires a gradient."""


class GradientError(OpSchemaError, RuntimeError):
    """`backward_fn` returned gradients that do not fit the op's parameters."""


class RecordTreeError(OpSchemaError, TypeError):
    """A record cannot be part of a saved program."""


class RuleError(OpSchemaError, TypeError):
    """A vmap, autocast or sharding rule does not fit the op."""
