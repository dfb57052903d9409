# SPDX-License-Identifier: Apache-2.0
"""An operator of which only a run can tell whether its body launches Triton kernels."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from magi_opschema import OpDef
from magi_opschema.errors import HandleError
from magi_tritonwrap import KernelReport, NoFakeError, OpaqueFallbackWarning, fake_from_body, probe_launches
from torch.utils._pytree import tree_leaves


class UndecidedOp:
    """The fake of such an operator, which runs the body with every launch dropped when it is called.

    If the body launches a kernel, the operator is seen through from then on. If the body runs to its end, it is its own
    fake. A body that does I/O or communicates with other ranks is not run, and one that reads data is stopped. Then the
    operator stays opaque, and its outputs look like its tensor inputs in order.

    Args:
        name: The operator, for messages.
        fn: Its body.
        kernels: What is known of the body from the names in its code.
        infer: The fake that its author gave, if any.
        on_launch: Called once, when the body has launched something.
        on_opaque: Called once, with the reason why it cannot be found out.
        definition: The operator's definition, once it has one.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        kernels: KernelReport,
        infer: Callable[..., Any] | None,
        on_launch: Callable[[], None],
        on_opaque: Callable[[str], None],
        definition: Callable[[], OpDef],
    ) -> None:
        self._name, self._fn, self._infer = name, fn, infer
        self._own = fake_from_body(fn)
        self._on_launch, self._on_opaque, self._definition = on_launch, on_opaque, definition
        self._lock = threading.RLock()
        self._launches = False
        self._effect = kernels.effects[0] if kernels.effects else ""
        self._opaque_because = ""

    def fake(self) -> Callable[..., Any]:
        """The fake at the signature of the body."""

        @functools.wraps(self._infer or self._fn)
        def fake(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                reason = self._decide(args, kwargs)
            if self._infer is not None:
                return self._infer(*args, **kwargs)
            return self._like_inputs(args, kwargs, reason) if reason else self._own(*args, **kwargs)

        fake.__signature__ = inspect.signature(self._infer or self._fn)  # type: ignore[attr-defined]
        if self._infer is None:
            fake.adopt_fake = self._adopt  # type: ignore[attr-defined]
        return fake

    def _adopt(self, infer: Callable[..., Any]) -> Callable[..., Any]:
        """The fake after the author gave *infer* later than the definition.

        The body is still run to find its launches.
        """
        self._infer = infer
        return self.fake()

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the body cannot be run in this call; empty if it can."""
        if self._launches or self._opaque_because:
            return self._opaque_because
        if self._effect:
            return self._stay_opaque(f"it is not run to find out, because {self._effect}")
        probe = probe_launches(self._fn, args, kwargs)
        if probe.launches:
            self._launches = True
            self._on_launch()
        elif probe.stopped_by:
            # A fake never gets the object behind a handle, so this is not an error of the body.
            is_handle = isinstance(probe.error, HandleError)
            reason = f"its body does not run on fake tensors: {probe.stopped_by}"
            if is_handle and self._definition().by_handle is not None:
                return reason  # the operator that gets the objects themselves has this fake too
            return self._stay_opaque(reason, warn=not is_handle)
        return ""

    def _stay_opaque(self, reason: str, *, warn: bool = True) -> str:
        self._opaque_because = reason
        self._on_opaque(reason)
        if warn and self._infer is None:
            text = f"{self._name}: whether it launches Triton kernels is known only at run time, and {reason}."
            fix = "It stays opaque, and its outputs are taken to look like its tensor inputs."
            msg = f"{text} {fix} State them with infer_output_meta_fn."
            warnings.warn(OpaqueFallbackWarning(msg), stacklevel=2)
        return reason

    def _like_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        """Return outputs that look like the tensor inputs, in order, for one output or a tuple of them."""
        bound = inspect.signature(self._fn).bind(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((bound.args, bound.kwargs)) if isinstance(leaf, torch.Tensor)]
        lowering = self._definition().lowering
        if lowering.returns is None:
            return None
        kinds = [leaf.schema_type for leaf in lowering.return_leaves]
        is_tuple = len(kinds) > 1
        if len(inputs) < len(kinds) or set(kinds) != {"Tensor"} or lowering.rebuilds_returns:
            text = f"{self._name}: its outputs are not known before it runs, because {reason}."
            msg = f"{text} Give infer_output_meta_fn, a function that returns tensors like the outputs."
            raise NoFakeError(msg)
        outputs = tuple(torch.empty_like(inputs[at]) for at in range(len(kinds)))
        return outputs if is_tuple else outputs[0]
