# SPDX-License-Identifier: Apache-2.0
"""What is known of each registered op, where it is looked up, and torch.library.opcheck at the user's signature."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from magi_opschema._call.bridge import Bridge
from magi_opschema._call.misfit import check_call
from magi_opschema._codegen.functions import compile_twin
from magi_opschema._lowering.signature import TORCH_OP_ATTRIBUTE
from magi_opschema._model.lowering import LoweringPath, SignatureLowering, entry, show_signature
from magi_opschema._text import nearest, show_value, show_with_type
from magi_opschema.errors import ArgumentError, UnknownOpError


if TYPE_CHECKING:
    from .implementations import Choice, Implementation
    from .registration import Registration

OPS: dict[str, OpDef] = {}
"""The ops that this package registered, by name; `define` writes it."""


@dataclass(frozen=True, eq=False, repr=False)
class OpDef:
    """A registered op and its four slots: `fn` → `lowered_fn` → `torch_op` → `exposed_op`.

    Attributes:
        name: `namespace::op`.
        fn: the user's function.
        lowered_fn: its flat twin, which takes the schema's arguments; `fn` itself on the direct path.
        torch_op: the registered OpOverload.
        exposed_op: what the decorator returned, a function that calls `torch_op`.
        lowering: signature, schema and tree.
        traits: `"compute_sensitive"`, `"subgraph_boundary"`; a backend reads them.
        by_handle: the op for calls that pass the handle of an object instead of the object, and for compiled calls that
            pass a torch.Generator; None if the signature has neither an object that is taken apart nor a Generator.
    """

    name: str
    fn: Callable[..., Any]
    torch_op: torch._ops.OpOverload
    exposed_op: Callable[..., Any]
    lowering: SignatureLowering
    traits: frozenset[str]
    registration: Registration
    choice: Choice
    by_handle: OpDef | None = None
    _notes: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def lowered_fn(self) -> Callable[..., Any]:
        """The flat twin of `fn`; of an op with implementations, of what chooses one of them."""
        fn = self.choice.body(lambda one: one.fn) if self.implementations else self.fn
        return fn if self.path == "direct" else compile_twin(self.lowering, fn, "lowered")

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """The bodies that `implementation` of the op added, in the order in which they are asked."""
        return self.choice.implementations

    @property
    def served(self) -> dict[str, int]:
        """How often each body ran or was traced in this process, by name; the op's own is `default`.

        It is empty for an op that has no other body.
        """
        return self.choice.served

    @property
    def path(self) -> LoweringPath:
        """`direct`, `lowered` or `flattened`."""
        return self.lowering.path

    @property
    def notes(self) -> Mapping[str, str]:
        """The notes that were added with `annotate`, by key."""
        return MappingProxyType(self._notes)

    def __str__(self) -> str:
        lines = [self.lowering.describe(self.name)]
        if self.traits:
            lines.append(entry("traits", ", ".join(sorted(self.traits))))
        lines += [entry("body", str(one)) for one in self.implementations]
        if self.served:
            lines.append(entry("served", ", ".join(f"{name} {count}" for name, count in self.served.items())))
        # A key may be as wide as the column, as `see-through` is.
        lines += [entry(f"{key}  ", text) for key, text in self._notes.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<op {self.name}: {show_signature(self.lowering.name, self.lowering.signature)}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def op_def(op: object) -> OpDef:
    """The definition of a registered op.

    Args:
        op: what the decorator returned, the OpOverload, or the name `namespace::op`.

    Raises:
        UnknownOpError: magi-opschema registered no such op.

    Example:
        >>> from torch import Tensor
        >>> @magi_register_custom_op("doc::twice")
        ... def twice(x: Tensor) -> Tensor:
        ...     return x * 2
        >>> print(op_def("doc::twice"))
        signature  twice(x: Tensor) -> Tensor
        schema     doc::twice(Tensor x) -> Tensor
        tree       x ─ Tensor
        path       direct
    """
    name = _name_of(op)
    try:
        return OPS[name]
    except KeyError:
        # Only text can be misspelt. The search takes a millisecond, and a backend asks for each node of a graph.
        near = nearest(name, OPS) if isinstance(op, str) else ""
        hint = near or " Register it with @magi_register_custom_op first."
        raise UnknownOpError(f"'{name}' is not an op that magi-opschema registered.{hint}") from None


def forms_of(op: object) -> tuple[OpDef, ...]:
    """The definitions that share one body: that of *op*, and that of the op for handles if there is one."""
    definition = op_def(op)
    return (definition,) if definition.by_handle is None else (definition, definition.by_handle)


def _name_of(op: object) -> str:
    if isinstance(op, str):
        return op
    torch_op = getattr(op, TORCH_OP_ATTRIBUTE, op)
    schema = getattr(torch_op, "_schema", None)
    if schema is not None:
        return str(schema.name)
    packet = getattr(torch_op, "_qualified_op_name", None)  # torch.ops.ns.op, without an overload
    return str(packet) if packet is not None else show_value(op)


def annotate(op: object, key: str, text: str) -> None:
    """Add a line to `OpDef.notes`; it is shown after `path`, and replaces one of the same key.

    Raises:
        UnknownOpError: magi-opschema registered no such op.
        ArgumentError: *key* or *text* is not a str.
    """
    definition = op_def(op)
    for name, value in (("key", key), ("text", text)):
        if not isinstance(value, str):
            raise ArgumentError(f"{definition.name}: the {name} of a note is {show_with_type(value)}, expected a str.")
    definition._notes[key] = text  # noqa: SLF001


def opcheck(op: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, **options: Any) -> dict[str, str]:
    """Test that *op* is registered correctly, with the arguments that a user would pass.

    Args:
        op: what the decorator returned, the OpOverload, or the name.
        args: positional arguments at the user's signature.
        kwargs: keyword arguments at the user's signature.
        options: passed to torch.library.opcheck, such as `test_utils`, `atol` and `rtol`.

    Returns:
        What torch.library.opcheck returns: "SUCCESS" by the name of each test; the same by the name of each
        implementation that serves these arguments, whose outputs are compared with those of the op's own body.

    Raises:
        torch.testing._internal.optests.OpCheckError: a test failed.
        RuleError: an implementation returns something else than the op's own body.
        UnknownOpError: magi-opschema registered no such op.
        ArgumentError: the op cannot be called with these arguments.

    Example:
        >>> from torch import Tensor
        >>> @magi_register_custom_op("doc::negate")
        ... def negate(x: Tensor) -> Tensor:
        ...     return -x
        >>> sorted(set(opcheck(negate, (torch.ones(2),)).values()))
        ['SUCCESS']
    """
    definition = op_def(op)
    lowering = definition.lowering
    given: object = kwargs
    if given is not None and not isinstance(given, Mapping):
        text = f"opcheck takes the keyword arguments as a dict, and got {show_with_type(given)}."
        raise ArgumentError(lowering.sentence(text))
    kwargs = dict(kwargs or {})
    if not isinstance(args, (tuple, list)):
        text = f"opcheck takes the arguments as a tuple, and got a {type(args).__name__}. Write opcheck(op, (x,))."
        raise ArgumentError(lowering.sentence(text))
    check_call(lowering, args, kwargs)
    given = tuple(args), kwargs
    if definition.path == "flattened":
        args, kwargs = Bridge(lowering).flatten(*args, **kwargs), {}
    results: dict[str, Any] = torch.library.opcheck(definition.torch_op, tuple(args), kwargs, **options)

    def call() -> Any:
        copied = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (tuple(args), kwargs))
        return definition.torch_op(*copied[0], **copied[1]), tree_leaves(copied)

    tolerances: dict[str, Any] = {name: options[name] for name in ("atol", "rtol") if name in options}
    for one, result in definition.choice.compared(call, *given, tolerances):
        if isinstance(result, Exception) and options.get("raise_exception", True):
            raise result
        results[f"implementation {one.name}"] = result
    return results
