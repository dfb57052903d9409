# SPDX-License-Identifier: Apache-2.0
"""The classes of operators, and calls of an OpOverload whose errors are translated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

from .tracing import hide_from_dynamo


class TranslatingOverload(OpOverload):
    """An OpOverload whose call passes the dispatcher's error to a function that may raise a better one.

    A wrapper would cost each call, and would not be the OpOverload that graphs hold. The call is that of
    torch/_ops.py, `OpOverload.__call__`, from torch 2.10 to 2.13.
    """

    _magi_translate: Callable[..., None]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the op; an error is translated, or raised as it is."""
        try:
            return self._op(*args, **kwargs)
        except Exception as error:
            self._magi_translate(error, args, kwargs)
            raise


class TranslatingCall(TranslatingOverload):
    """A TranslatingOverload for releases whose own call does more than call the dispatcher, such as torch 2.15.

    There it has a table of Python implementations besides the dispatcher's. This costs one more Python frame for each
    call.
    """

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the op; an error is translated, or raised as it is."""
        try:
            return OpOverload.__call__(self, *args, **kwargs)
        except Exception as error:
            self._magi_translate(error, args, kwargs)
            raise


class TranslatingPacket(OpOverloadPacket):
    """The OpOverloadPacket of such an op, `torch.ops.namespace.op`: it does not go through the OpOverload."""

    _magi_translate: Callable[..., None]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the op; an error is translated, or raised as it is."""
        try:
            return OpOverloadPacket.__call__(self, *args, **kwargs)
        except Exception as error:
            self._magi_translate(error, args, kwargs)
            raise


def functionalize_by(op: OpOverload, rule: Callable[..., Any]) -> None:
    """Make AOTAutograd call *rule* with a call of *op* where it makes a graph functional.

    If *rule* returns NotImplemented, torch makes the call functional itself. Nothing changes outside of a compiler.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def functionalize(mode: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            output = rule(*args, **kwargs)
        return mode.__torch_dispatch__(op, (), args, kwargs) if output is NotImplemented else output

    op.py_impl(FunctionalTensorMode)(functionalize)


def translate_errors(op: OpOverload, translate: Callable[..., None]) -> None:
    """Make a call of *op*, or of its packet, that raises an error call `translate(error, args, kwargs)`."""
    if type(op) is OpOverload:
        is_plain = OpOverload.__call__.__code__.co_names == ("_op",)
        op.__class__ = TranslatingOverload if is_plain else TranslatingCall
        packet = op._overloadpacket
        packet.__class__ = TranslatingPacket
        for translating in (op, packet):
            vars(translating)["_magi_translate"] = translate
            hide_from_dynamo(translating.__class__.__call__)
