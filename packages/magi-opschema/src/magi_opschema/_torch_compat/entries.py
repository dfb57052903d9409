# SPDX-License-Identifier: Apache-2.0
"""The dispatcher's entries: which names it knows or refuses, and the end and the replacement of an op."""

from __future__ import annotations

import keyword
import weakref

import torch

from .overloads import OpOverload, OpOverloadPacket


_kept: dict[str, torch.library.Library] = {}

_replaced: dict[str, list[weakref.ref[OpOverload]]] = {}


def destroy(library: torch.library.Library) -> None:
    """Unregister everything that *library* holds, which has no public way before the library is collected.

    The library's finalizer would clear `torch.ops` again when it runs, and so separate the next op of the name from its
    OpOverload. So nothing is left for it to do, and the cache of signatures, which only it clears, is cleared here
    (torch/library.py, `_del_library`).
    """
    from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE

    library._destroy()
    for name in library._op_defs:
        _SCHEMA_TO_SIGNATURE_CACHE.pop((name, ""), None)
    library._op_defs.clear()
    library._op_impls.clear()


def keep_entry(op: OpOverload) -> None:
    """Keep the dispatcher's entry of *op* alive when all its registrations go.

    An OpOverload points to the entry, and calling it after the entry was freed is a crash
    (aten/src/ATen/core/dispatch/Dispatcher.cpp, `cleanup`). One registration at a key that no call reaches is enough.
    """
    name = str(op._schema.name)
    if name not in _kept:
        namespace, op_name = name.split("::")
        _kept[name] = torch.library.Library(namespace, "IMPL")
        _kept[name].impl(op_name, torch.library.fallthrough_kernel, "TESTING_ONLY_GenericMode")
    alive = [earlier for earlier in _replaced.get(name, []) if earlier() is not None]
    _replaced[name] = [*alive, weakref.ref(op)]


def speak_for_earlier(op: OpOverload) -> None:
    """Make the OpOverloads that had the name of *op* before equal to *op* in all their attributes.

    An entry that is kept also keeps the OpOverload that it first saw, and passes that one to tracers and dispatch modes
    (aten/src/ATen/core/dispatch/OperatorEntry.h, `getPythonOp`). Inductor would take a default from its old schema.
    """
    for reference in _replaced.get(str(op._schema.name), []):
        earlier = reference()
        if earlier is not None:
            earlier.__dict__ = op.__dict__


def restore_packet(op: OpOverload) -> None:
    """Make `torch.ops.namespace.op.default` be *op* again, after its definition was destroyed and made again."""
    packet = op._overloadpacket
    namespace = getattr(torch.ops, op.namespace)
    setattr(namespace, packet.__name__, packet)
    if packet.__name__ not in namespace._dir:
        namespace._dir.append(packet.__name__)


def is_registered(name: str) -> bool:
    """True if torch's dispatcher has a schema `namespace::op`, from any library."""
    return bool(torch._C._jit_get_schemas_for_operator(name))


def reserved_part(namespace: str, op: str) -> str:
    """The part of `namespace::op` that no op can have; empty if there is none.

    These are the keywords of the schema language (torch/csrc/jit/frontend/lexer.h), namespaces that torch.library
    refuses or that are attributes of torch.ops, and attributes that every torch.ops.namespace has.
    """
    words = {*keyword.kwlist, "Ellipsis", "NoneType"}
    if namespace in {*words, "prim", "_"} or type(getattr(torch.ops, namespace)) is not torch._ops._OpNamespace:
        return namespace
    if op in {*words, "__origin__"} or hasattr(torch._ops._OpNamespace, op):
        return op
    attribute = vars(getattr(torch.ops, namespace)).get(op)
    return "" if attribute is None or isinstance(attribute, OpOverloadPacket) else op
