# SPDX-License-Identifier: Apache-2.0
"""Several bodies of one op, and which of them a call runs.

    @norm.implementation(when=lambda x: x.shape[-1] <= 1024, devices=("cuda",), priority=10)
    def norm_of_short_rows(x: Tensor, weight: Tensor, cfg: NormCfg) -> Tensor: ...

A call runs the first that serves it, by priority, and the op's own body where none does. An op without others does not
pass here: with the first one, its kernel and its flat twin call `Choice.body` where they called the user's function.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from magi_opschema._call.bridge import Bridge
from magi_opschema._call.checks import CallCheck
from magi_opschema._call.conditions import Condition
from magi_opschema._codegen.functions import compile_twin
from magi_opschema._environment import IMPLEMENTATIONS
from magi_opschema._model.schema import as_tuple
from magi_opschema._text import location, nearest, show_value, show_with_type
from magi_opschema.errors import EnvironmentVariableError, RuleError

from .catalogue import OpDef, forms_of, op_def
from .registration import registering
from .rules import check_parameters


OWN = "default"
"""The name of the body that the op was registered with."""
SERVED: dict[str, Counter[str]] = {}
"""By op, how often each body ran or was traced. It is not part of `Choice`, which compile caches make their key of."""
CHOSEN: defaultdict[str, dict[object, str]] = defaultdict(lambda: {None: ""})
"""By op, the bodies that were asked for, the latest last: by the environment, for which the key is None, and by each
open `use_implementation`."""


@dataclass(frozen=True)
class Implementation:
    """Another body of an op.

    Attributes:
        name: What `use_implementation` calls it.
        fn: The body, at the op's own signature.
        priority: Those with a higher one are asked first.
        condition: The calls that it serves.
    """

    name: str
    fn: Callable[..., Any]
    priority: int
    condition: Condition

    def __str__(self) -> str:
        condition = self.condition
        asked = [f"{self.name} at {location(self.fn)}", f"priority {self.priority}"]
        asked += sorted(condition.devices or ()) + sorted(map(str, condition.dtypes or ()))
        if condition.capability is not None:
            asked.append(f"capability {'.'.join(map(str, condition.capability))}")
        if condition.when is not None:
            asked.append(f"when at {location(condition.when)}")
        return ", ".join(asked)


class Choice:
    """The bodies of one op; compile caches read its attributes, which only change with what a call runs."""

    def __init__(self, op: str, fn: Callable[..., Any]) -> None:
        self.op, self.fn = op, fn
        self.implementations: tuple[Implementation, ...] = ()
        self.forced = ""

    def select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Implementation | None:
        """The body that a call at the user's signature runs; None for the op's own."""
        asked = self.implementations
        if self.forced:
            asked = tuple(one for one in asked if one.name == self.forced)
            if not asked and self.forced != OWN:
                raise RuleError(self.unknown(self.forced))
        found = next((one for one in asked if one.condition.is_open or one.condition.holds(args, kwargs)), None)
        SERVED[self.op][OWN if found is None else found.name] += 1
        return found

    @property
    def served(self) -> dict[str, int]:
        """How often each body ran or was traced."""
        return dict(SERVED[self.op]) if self.implementations else {}

    def unknown(self, name: object) -> str:
        """The sentence about a *name* that no body has."""
        names = [one.name for one in self.implementations] + [OWN]
        return (
            f"{self.op} has no implementation {show_value(name)}.{nearest(str(name), names)} "
            f"There are {', '.join(names)}."
        )

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """A context in which calls run the body *name*, if it serves them; of several, the one that began last."""
        chosen, token = CHOSEN[self.op], object()
        chosen[token] = name
        self._force(chosen)
        try:
            yield
        finally:
            # It may not be the last one, because contexts of threads overlap.
            del chosen[token]
            self._force(chosen)

    def begin(self) -> None:
        """Count calls from now on, and run the body that the environment names, unless a context names another."""
        SERVED[self.op], chosen = Counter(), CHOSEN[self.op]
        chosen[None] = ""
        for entry in filter(None, os.environ.get(IMPLEMENTATIONS, "").split(",")):
            name, is_pair, body = entry.partition("=")
            if not is_pair or not body:
                raise EnvironmentVariableError(f"{IMPLEMENTATIONS}: '{entry}' is not 'namespace::op=implementation'.")
            if name.strip() == self.op:
                chosen[None] = body.strip()
                break
        self._force(chosen)

    def _force(self, chosen: dict[object, str]) -> None:
        self.forced = list(chosen.values())[-1]

    def compared(
        self, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any], tolerances: dict[str, Any]
    ) -> Iterator[tuple[Implementation, Exception | str]]:
        """Each implementation with what a comparison with the op's own body says of it.

        *call* calls the op with copies of *args* and *kwargs*, and returns its outputs and what it wrote into.
        """
        with self.using(OWN):
            expected = call() if self.implementations else None
        for one in self.implementations:
            if not one.condition.holds(args, kwargs):
                yield one, "SKIPPED: its condition does not hold for these arguments"
                continue
            try:
                with self.using(one.name):
                    torch.testing.assert_close(call(), expected, equal_nan=True, **tolerances)
            except AssertionError as error:
                yield one, RuleError(f"{self.op}: the implementation {one} differs from the op's own body: {error}")
            else:
                yield one, "SUCCESS"

    def body(self, run: Callable[[Implementation], Callable[..., Any]]) -> Callable[..., Any]:
        """The body that calls the one that is selected, as *run* has it; it looks like the op's own."""
        choice = self

        def body(*args: Any, **kwargs: Any) -> Any:
            found = choice.select(args, kwargs)
            return (choice.fn if found is None else run(found))(*args, **kwargs)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(body, name, getattr(self.fn, name))
        body.__signature__ = inspect.signature(self.fn)  # type: ignore[attr-defined]
        return body


def implementation(
    op: object,
    fn: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    priority: int = 0,
    when: Callable[..., bool] | None = None,
    devices: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    capability: tuple[int, int] | None = None,
) -> Any:
    """Add another body to *op*, for the calls that satisfy all of its conditions. Without *fn*, this is a decorator.

    Of those that serve a call, the one with the highest priority runs; of equal ones, the one that was added first; if
    there is none, the op's own body. It has the fake and the gradient of the op, so its outputs must look like those
    of the others: its first real call is compared with the fake, and `opcheck` compares its values with those of the
    op's own body. A body that `register_kernel` gave to a device type stands before all of them.

    The compiler sees through an op to the body that serves the call that it traces; sizes that `when` compares become
    guards. Code that stays opaque chooses at each call.

    Args:
        op: What the decorator returned, the OpOverload, or the name.
        fn: The body, at the op's own signature.
        name: What `use_implementation` calls it; by default the name of *fn*.
        priority: Those with a higher one are asked first.
        when: Called with those of the op's arguments that it has parameters for, by name. It must not read the values
            of tensors.
        devices: The device types on which every Tensor of a call must be.
        dtypes: The dtypes that its first Tensor may have.
        capability: The least compute capability of its GPU, such as (9, 0).

    Returns:
        *fn*, or the decorator.

    Raises:
        UnknownOpError: magi-opschema registered no such op.
        RuleError: *fn* or *when* has other parameters than the op, the name is taken, or a condition is wrong.

    Example:
        >>> from torch import Tensor
        >>> @magi_register_custom_op("doc::total", infer_output_meta_fn=lambda x: x.sum(-1))
        ... def total(x: Tensor) -> Tensor:
        ...     return x.sum(-1)
        >>> @total.implementation(when=lambda x: x.shape[-1] == 1, priority=1)
        ... def of_one(x: Tensor) -> Tensor:
        ...     return x.squeeze(-1).clone()
        >>> total(torch.ones(2, 1)), op_def(total).served
        (tensor([1., 1.]), {'of_one': 1})
    """
    if fn is None:
        options: dict[str, Any] = {"devices": devices, "dtypes": dtypes, "capability": capability}
        return lambda decorated: implementation(op, decorated, name=name, priority=priority, when=when, **options)
    definition = op_def(op)
    check_parameters(definition, fn)
    choice, sentence = definition.choice, definition.lowering.sentence
    title: object = getattr(fn, "__name__", None) if name is None else name
    if not isinstance(title, str) or not title.isidentifier() or title == OWN:
        fix = f"Give name= as an identifier other than '{OWN}', which is the op's own body."
        raise RuleError(sentence(f"{show_with_type(title)} cannot be the name of an implementation. {fix}"))
    wanted: object = priority
    if type(wanted) is not int:
        raise RuleError(sentence(f"priority={show_with_type(wanted)} is not an int."))
    selected = _by_name(definition, when)
    condition = Condition.of(devices, dtypes, capability, selected, lambda text: RuleError(sentence(text)))
    with registering:
        if any(one.name == title for one in choice.implementations):
            text = f"it has an implementation '{title}' already; {location(fn)} would be a second. Give name=."
            raise RuleError(sentence(text))
        if not choice.implementations:
            choice.begin()
            for form in forms_of(op):
                form.registration.replace_body(choice.body(_checked_once(form)))
                vars(form).pop("lowered_fn", None)  # which was made of the op's own body
        added = (*choice.implementations, Implementation(title, fn, priority, condition))
        choice.implementations = tuple(sorted(added, key=lambda one: -one.priority))
    return fn


@contextlib.contextmanager
def use_implementation(op: object, name: str) -> Iterator[None]:
    """A context in which calls of *op* run the body *name*, if it serves them, otherwise the op's own.

    It holds for all threads; of several contexts, the one that began last counts. Code that was compiled with another
    choice, and in which the compiler saw through the op, keeps that: compile within the context.
    `MAGI_OPSCHEMA_IMPLEMENTATIONS=mylib::norm=fast,mylib::gelu=default` in the environment does the same for a process.

    Raises:
        UnknownOpError: magi-opschema registered no such op.
        RuleError: *op* has no such implementation; `default` is its own body.
    """
    choice = op_def(op).choice
    if name != OWN and all(one.name != name for one in choice.implementations):
        raise RuleError(choice.unknown(name))
    with choice.using(name):
        yield


def _by_name(definition: OpDef, when: Callable[..., bool] | None) -> Callable[..., bool] | None:
    """*when* as a function of all arguments of the op; raises if it has a parameter that the op has not."""
    if when is None:
        return None
    parameters = definition.lowering.signature.parameters
    names, given = list(parameters), cast("Any", when)
    defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    try:
        wanted = list(inspect.signature(given).parameters)
    except (TypeError, ValueError):
        text = f"when={show_with_type(given)} does not say what it takes. Wrap it in a function."
        raise RuleError(definition.lowering.sentence(text)) from None
    if unknown := [name for name in wanted if name not in names]:
        text = f"when asks for '{unknown[0]}', but the op has no such parameter.{nearest(unknown[0], names)}"
        raise RuleError(definition.lowering.sentence(f"{text} Its parameters are {', '.join(names)}."))

    def holds(*args: Any, **kwargs: Any) -> bool:
        values = defaults | dict(zip(names, args, strict=False)) | kwargs
        try:
            return given(**{name: values[name] for name in wanted})  # type: ignore[no-any-return]
        except Exception as error:
            # The error itself stays what it is, because tracers raise and catch errors of their own here.
            text = f"raised by `when` of an implementation ({location(given)})"
            fix = f"It gets ({', '.join(wanted)}) of each call, and returns whether the implementation serves it"
            error.add_note(definition.lowering.sentence(f"{text}. {fix}."))
            raise

    holds.__wrapped__ = given  # type: ignore[attr-defined]  # where errors and descriptions say that it is
    return holds


def _checked_once(form: OpDef) -> Callable[[Implementation], Callable[..., Any]]:
    """From an implementation to its body with the check of its first real call."""
    bridge = Bridge(form.lowering)

    @functools.cache
    def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
        lowering = replace(form.lowering, location=location(fn))  # where an error says that the mistake is
        check = CallCheck(lowering, form.torch_op, lambda: form.registration.fake.runs_body)
        lowered = compile_twin(lowering, fn, "lowered")

        def body(*args: Any, **kwargs: Any) -> Any:
            if not check.pending:
                return fn(*args, **kwargs)
            flat = check.run(lowered, bridge.flatten(*args, **kwargs))
            if lowering.returns is None:
                return None
            return bridge.rebuild_output(*as_tuple(flat, len(lowering.return_leaves)))

        return body

    return lambda implementation: checked(implementation.fn)
