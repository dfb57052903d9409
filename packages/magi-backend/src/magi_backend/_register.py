# SPDX-License-Identifier: Apache-2.0
"""``magi_register_custom_op`` in full: signature lowered, Triton kernels visible to the compiler, traits noted."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar, cast

import magi_opschema
import magi_tritonwrap
import torch
from magi_opschema.errors import HandleError, UnknownOpError
from magi_tritonwrap import NoFakeError, OpaqueFallbackWarning
from torch.utils._pytree import tree_leaves

from ._settings import CompileConfig
from ._torch_compat.nodes import overloads_of


_BY_HANDLE = "no: these calls pass the handle of an object, which hides it; pass the object"
P = ParamSpec("P")
R = TypeVar("R")


def magi_register_custom_op(
    name: str | None = None,
    mutates_args: Sequence[str] = (),
    infer_output_meta_fn: Callable[..., Any] | Sequence[str] | None = None,
    setup_context_fn: Callable[..., Any] | None = None,
    backward_fn: Callable[..., Any] | None = None,
    is_compute_sensitive: bool = False,
    is_subgraph_boundary: bool = False,
    *,
    tags: Sequence[Any] = (),
    override: bool = False,
    register_pytree: bool = True,
    extra_triton_kernels: Iterable[Any] = (),
    on_unsupported: Literal["error", "opaque"] | None = None,
) -> Callable[[Callable[P, R]], magi_opschema.RegisteredOp[P, R]]:
    """Register a function as a PyTorch operator that the compiler sees through to its Triton launches.

    It does what ``magi_opschema.magi_register_custom_op`` does; in addition, launches of Triton kernels in the body
    become nodes of the compiled graph, as if each had been wrapped by hand. So do calls of another library's operators
    that may launch kernels. An operator whose body does neither is opaque.

    Args:
        name: ``namespace::op``; without it, from the function's module and name.
        mutates_args: Parameters, leaf paths or flat names that the body writes to.
        infer_output_meta_fn: The shapes of the outputs: a function at the user's signature, or a list of paths of
            parameters that the outputs look like. Without it, the outputs of an operator that launches Triton kernels
            are those of its body, run with every launch dropped; the outputs of any other operator look like its tensor
            inputs, in order. If only a run shows whether the body launches a kernel, it is run in that way at the first
            fake call. A fake that is registered with ``register_fake`` of the result before the first call is used
            instead.
        setup_context_fn: ``(ctx, inputs, output)``, as for magi-opschema.
        backward_fn: ``(ctx, *grads)``, as for magi-opschema.
        is_compute_sensitive: The outputs are saved for the backward rather than computed again.
        is_subgraph_boundary: The backend ``magi`` splits graphs at this operator.
        tags: Tags of the operator.
        override: Replace an operator of this name, for notebooks and reloads.
        register_pytree: Make the records of the signature nodes of torch's pytrees, as for magi-opschema.
        extra_triton_kernels: All kernels that no name in the code of the body leads to, for the report and the cache
            key. With them, a graph with their launches is stored in the cache. All launches are captured when the
            operator is compiled, in any case.
        on_unsupported: What to do if no graph can carry a kernel or a launch: ``"opaque"`` keeps the operator opaque,
            with a warning; ``"error"`` raises. None means the setting ``MAGI_COMPILE_ON_UNSUPPORTED``.

    Returns:
        The decorator.

    Raises:
        magi_opschema.OpSchemaError: The signature has no schema, or another argument is refused by magi-opschema.
        magi_tritonwrap.TritonWrapError: With ``on_unsupported="error"``, torch cannot compile a kernel.

    Example:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Scale:
        ...     factor: float = 2.0
        >>> @magi_register_custom_op("doc_magi_backend::scale")
        ... def scale(x: torch.Tensor, cfg: Scale) -> torch.Tensor:
        ...     return x * cfg.factor
        >>> scale(torch.ones(2), Scale(3.0))
        tensor([3., 3.])
    """
    magi_opschema.magi_register_custom_op(name)  # refuses what is not a name, such as the function itself

    def register(fn: Callable[P, R]) -> magi_opschema.RegisteredOp[P, R]:
        kernels = _kernels_of(fn, extra_triton_kernels)
        title = name or fn.__qualname__
        # A body that does I/O is not run to see what it calls.
        calls_foreign_ops = not kernels.effects and any(map(_is_foreign, kernels.inner_ops))
        is_seen = kernels.may_launch or calls_foreign_ops
        exposed: Any

        def definition() -> magi_opschema.OpDef:
            return magi_opschema.op_def(exposed)

        def see_through() -> None:
            is_alone = not definition().implementations
            with magi_tritonwrap.unsupported_launches(CompileConfig().on_unsupported):
                report = magi_tritonwrap.make_see_through(
                    definition().torch_op,
                    definition().lowered_fn,
                    kernels=kernels if is_alone else _kernels_of(definition().lowered_fn, extra_triton_kernels),
                    on_unsupported=on_unsupported,
                )
            magi_opschema.annotate(exposed, "see-through", _see_through_note(report))

        def implementation(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
            """Add another body, as magi-opschema does it, and let the compiler see through the op to that one too."""
            if fn is None:
                return functools.partial(implementation, **options)
            add(_as_body(fn, found := _kernels_of(fn, ()), title), **options)
            if is_seen or found.may_launch:
                see_through()
            return fn

        infer = infer_output_meta_fn
        is_undecided = kernels.only_a_run_tells and not calls_foreign_ops and (infer is None or callable(infer))
        if is_undecided:
            infer = _UndecidedOp(title, fn, kernels, cast("Any", infer), see_through, definition).fake()
        elif infer is None and is_seen:
            infer = magi_tritonwrap.fake_from_body(fn)
            infer.runs_body = True  # type: ignore[attr-defined]
            # A fake that the author registers later replaces it.
            infer.adopt_fake = lambda given: given  # type: ignore[attr-defined]
        exposed = magi_opschema.magi_register_custom_op(
            name,
            mutates_args=mutates_args,
            infer_output_meta_fn=infer,
            setup_context_fn=setup_context_fn,
            backward_fn=backward_fn,
            is_compute_sensitive=is_compute_sensitive,
            is_subgraph_boundary=is_subgraph_boundary,
            tags=tags,
            override=override,
            register_pytree=register_pytree,
        )(_as_body(fn, kernels, title))
        add, exposed.implementation = exposed.implementation, implementation
        if is_seen and not is_undecided:
            see_through()
        if (by_handle := definition().by_handle) is not None:
            magi_opschema.annotate(by_handle.torch_op, "see-through", _BY_HANDLE)
        return cast("magi_opschema.RegisteredOp[P, R]", exposed)

    return register


def _as_body(fn: Callable[..., Any], kernels: magi_tritonwrap.KernelReport, title: str) -> Callable[..., Any]:
    """*fn* as the body of an op in eager calls."""
    # There, a launch that is wrapped by hand would go through the higher-order op, which is slow.
    body = magi_tritonwrap.launch_directly(fn) if kernels.may_wrap else fn
    return magi_tritonwrap.translate_cpu_errors(body, title) if kernels.kernels else body


def _kernels_of(fn: Callable[..., Any], extra: object) -> magi_tritonwrap.KernelReport:
    """The kernels that *fn* can launch, including those of the methods of its parameters."""
    listed: Any = tuple(extra) if isinstance(extra, Iterable) else extra
    kernels = magi_tritonwrap.find_kernels(fn, extra=listed)
    if not (kernels.doubtful or kernels.unresolved):
        return kernels
    try:
        classes = magi_opschema.lower_signature(fn).objects
    except magi_opschema.OpSchemaError:
        return kernels  # the registration raises for the same reason, with the name of the operator
    return magi_tritonwrap.find_kernels(fn, extra=listed, classes=classes) if classes else kernels


def registered(target: object) -> magi_opschema.OpDef | None:
    """The definition of the operator that a graph node calls; None if it was not registered with magi-opschema."""
    if not overloads_of(target):
        return None
    try:
        return magi_opschema.op_def(target)
    except UnknownOpError:
        return None


def _is_foreign(inner: magi_tritonwrap.InnerOp) -> bool:
    """Whether another library registered the operator, so that only that library knows what it launches."""
    try:
        magi_opschema.op_def(inner.op)
    except magi_opschema.OpSchemaError:
        return True
    return False


def _see_through_note(report: magi_tritonwrap.OpReport) -> str:
    if not report.see_through:
        return f"no: {report.reason}"
    count = len(report.kernels)
    opaque = [
        f"{inner.op} is opaque if called: {inner.opaque_because}" for inner in report.inner_ops if inner.opaque_because
    ]
    if count:
        opaque.insert(0, f"{count} Triton kernel{'' if count == 1 else 's'} in its body")
    return "; ".join(opaque) or "Triton kernels that are captured at compilation"


@dataclass
class _UndecidedOp:
    """The fake of an operator of which only a run can tell whether its body launches Triton kernels.

    It runs the body with every launch dropped when it is called. If the body launches a kernel, the operator is seen
    through from then on. If the body runs to its end, it is its own fake. A body that does I/O or communicates with
    other ranks is not run, and one that reads data is stopped. Then the operator stays opaque, and its outputs look
    like its tensor inputs in order.
    """

    name: str
    fn: Callable[..., Any]
    kernels: magi_tritonwrap.KernelReport
    infer: Callable[..., Any] | None
    """The fake that its author gave, if any."""
    on_launch: Callable[[], None]
    """Called once, when the body has launched something."""
    definition: Callable[[], magi_opschema.OpDef]
    """The operator's definition, once it has one."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    launches: bool = False
    opaque_because: str = ""

    def fake(self) -> Callable[..., Any]:
        """The fake at the signature of the body."""
        own = magi_tritonwrap.fake_from_body(self.fn)

        @functools.wraps(self.infer or self.fn)
        def fake(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                reason = self._decide(args, kwargs)
            if self.infer is not None:
                return self.infer(*args, **kwargs)
            return self._like_inputs(args, kwargs, reason) if reason else own(*args, **kwargs)

        fake.runs_body = True  # type: ignore[attr-defined]
        fake.__signature__ = inspect.signature(self.infer or self.fn)  # type: ignore[attr-defined]
        if self.infer is None:
            fake.adopt_fake = self._adopt  # type: ignore[attr-defined]
        return fake

    def _adopt(self, infer: Callable[..., Any]) -> Callable[..., Any]:
        """The fake after the author gave *infer* later. The body is still run to find its launches."""
        self.infer = infer
        return self.fake()

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the body cannot be run in this call; empty if it can."""
        if self.launches or self.opaque_because:
            return self.opaque_because
        if self.kernels.effects:
            return self._stay_opaque(f"it is not run to find out, because {self.kernels.effects[0]}")
        probe = magi_tritonwrap.probe_launches(self.fn, args, kwargs)
        if probe.launches:
            self.launches = True
            self.on_launch()
        elif probe.stopped_by:
            # A fake never gets the object behind a handle, so this is not an error of the body.
            is_handle = isinstance(probe.error, HandleError)
            reason = f"its body does not run on fake tensors: {probe.stopped_by}"
            if is_handle and self.definition().by_handle is not None:
                return reason  # the operator that gets the objects themselves has this fake too
            return self._stay_opaque(reason, warn=not is_handle)
        return ""

    def _stay_opaque(self, reason: str, *, warn: bool = True) -> str:
        self.opaque_because = reason
        magi_opschema.annotate(self.definition().exposed_op, "see-through", f"no: {reason}")
        if warn and self.infer is None:
            text = f"{self.name}: whether it launches Triton kernels is known only at run time, and {reason}."
            fix = "It stays opaque, and its outputs are taken to look like its tensor inputs."
            warnings.warn(OpaqueFallbackWarning(f"{text} {fix} State them with infer_output_meta_fn."), stacklevel=2)
        return reason

    def _like_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        """Return outputs that look like the tensor inputs, in order, for one output or a tuple of them."""
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((bound.args, bound.kwargs)) if isinstance(leaf, torch.Tensor)]
        lowering = self.definition().lowering
        if lowering.returns is None:
            return None
        kinds = [leaf.schema_type for leaf in lowering.return_leaves]
        if len(inputs) < len(kinds) or set(kinds) != {"Tensor"} or lowering.rebuilds_returns:
            text = f"{self.name}: its outputs are not known before it runs, because {reason}."
            raise NoFakeError(f"{text} Give infer_output_meta_fn, a function that returns tensors like the outputs.")
        outputs = tuple(torch.empty_like(inputs[at]) for at in range(len(kinds)))
        return outputs if len(kinds) > 1 else outputs[0]
