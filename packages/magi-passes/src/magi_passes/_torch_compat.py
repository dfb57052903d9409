# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that this package touches, one function per quirk.

Read and tried for torch 2.10 to 2.15. Importing this module loads neither Inductor nor Dynamo.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.fx import Graph, GraphModule, Node


Overrides: TypeAlias = "Mapping[str, Any]"

# The options that hold graph passes. The first three run outside of Inductor's inner compilation,
# when the configuration that code generation reads is not yet in place.
EARLY_HOOKS = ("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass")
POST_GRAD_HOOKS = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
HOOKS = EARLY_HOOKS + POST_GRAD_HOOKS

_install_lock = threading.Lock()


def torch_version() -> str:
    """The running torch release, local version and all, such as ``2.13.0+cpu``."""
    return str(torch.__version__)


# 2.13.1, 2.13.0a0+git0fc8, 2.13.0.dev20260101+cu130, 2.13.1.post1, 2.13.0-vendor1
_VERSION = re.compile(
    r"v?(\d+)\.(\d+)(?:\.(\d+))?"
    r"(?:[-_.]?(?:a|b|rc)\d*)?(?:[-_.]?post(\d*))?(?:[-_.]?dev\d*)?(?:[+-][\w.-]+)?"
)


def numbers_of(version: str) -> tuple[int, int, int, int]:
    """Major, minor, patch and post-release number of *version*, for comparisons: ``2.13.1.post2`` is (2, 13, 1, 2).

    What was built before a release counts as the release, ``2.11.0a0+git`` as (2, 11, 0, 0): it has the code.

    Raises:
        ValueError: *version* is not a torch release.
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        msg = f"{version!r} is not a torch release; write it as '2.11' or '2.13.1'"
        raise ValueError(msg)
    major, minor, patch, post = (int(part or 0) for part in match.groups())
    return major, minor, patch, post


def release(version: str) -> tuple[int, int]:
    """Major and minor number of *version*: ``2.11.0a0+git`` gives ``(2, 11)``.

    Raises:
        ValueError: *version* is not a torch release.
    """
    return numbers_of(version)[:2]


def _config() -> Any:
    from torch._inductor import config

    return config


def _unset() -> object:
    from torch.utils import _config_module

    return _config_module._UNSET_SENTINEL


def config_keys() -> frozenset[str]:
    """Every key of Inductor's configuration, nested ones with a dot."""
    return frozenset(_config()._config)


def config_values() -> dict[str, Any]:
    """Every Inductor key with the value that the current context sees; nothing is copied."""
    config = _config()
    return {key: _effective(config, key, _override_of(config, key)) for key in config._config}


def default_of(key: str) -> Any:
    """The value of *key* in an untouched torch, which environment variables may have chosen."""
    return _config()._config[key].default


def get_config(key: str) -> Any:
    """The value of Inductor's *key* in the current context."""
    return getattr(_config(), key)


def set_config(key: str, value: object) -> None:
    """Set Inductor's *key* in the current context."""
    setattr(_config(), key, value)


def _override_of(config: Any, key: str) -> Any:
    """What was assigned to *key*, or torch's sentinel.

    torch 2.12 made the override a ContextVar; before, it was a plain attribute, global to the process.
    An alias has no override of its own: it stands for a key of another module.
    """
    entry = config._config[key]
    if entry.alias is not None:
        return config._get_alias_val(entry)
    override = entry.user_override
    return override.get() if isinstance(override, ContextVar) else override


def _effective(config: Any, key: str, override: Any) -> Any:
    """What reading *key* would give with *override* in place.

    ``getattr`` is no way to find out: it copies mutable defaults into the override, and may warn.
    """
    entry = config._config[key]
    if entry.env_value_force is not _unset():
        return entry.env_value_force
    for value in (override, entry.env_value_default):
        if value is not _unset():
            return value
    return entry.default


def read_overrides() -> dict[str, Any]:
    """The state of Inductor's configuration in the current context, cheap to take and exact to put back.

    Builtin containers are copied, because configuration is also changed in place (``config.x.append``).
    """
    config = _config()
    return {key: _copied(_override_of(config, key)) for key in config._config}


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, set):
        return type(value)(_copied(item) for item in value)
    return value


def config_changes(before: Overrides, after: Overrides) -> dict[str, tuple[Any, Any]]:
    """The keys whose effective value differs between two states, with both values.

    A mutable default that was merely read becomes an override of equal value: no change.
    """
    config = _config()
    changes = {}
    for key, old in before.items():
        new = after[key]
        if old is new:
            continue
        values = _effective(config, key, old), _effective(config, key, new)
        if not _same(*values):
            changes[key] = values
    return changes


def _same(left: Any, right: Any) -> bool:
    # True == 1, but a user who looks at the configuration sees the difference.
    return left is right or (type(left) is type(right) and bool(left == right))


def restore_overrides(saved: Overrides, keys: Iterable[str] | None = None) -> None:
    """Put the configuration, or only *keys* of it, back into the state that `read_overrides` returned."""
    config = _config()
    for key in config._config if keys is None else keys:
        override = saved[key]
        if _same(_override_of(config, key), override):
            continue
        # Assigning marks torch's caches of the configuration as stale, under the name that each release gives them.
        setattr(config, key, config._config[key].default if override is _unset() else _copied(override))
        if override is _unset():
            entry = config._config[key]
            if isinstance(entry.user_override, ContextVar):
                entry.user_override.set(override)
            else:
                entry.user_override = override


def compilation_lock() -> AbstractContextManager[object]:
    """Keeps other threads out while a pass's configuration is in place, where configuration is shared.

    Needed before torch 2.12 only. It is Dynamo's own (reentrant) compile lock, so no second order of locks arises.
    """
    if release(torch_version()) >= (2, 12):
        return contextlib.nullcontext()
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


def out_of_process_mode() -> str | None:
    """The value of TORCHINDUCTOR_FX_COMPILE_MODE under which Inductor loses custom passes, or None.

    Those modes ship `config.save_config_portable()` to the compiling side, and that leaves the hooks out
    (`_save_config_ignore` in torch/_inductor/config.py).
    """
    from torch._inductor import compile_fx

    if compile_fx.fx_compile_mode is compile_fx.FxCompileMode.NORMAL:
        return None
    prefixes = ("progressive+" * compile_fx.fx_compile_progressive, "async+" * compile_fx.fx_compile_async)
    return "".join(prefixes) + compile_fx.fx_compile_mode.name


@contextlib.contextmanager
def nested_compilation() -> Iterator[None]:
    """Let a compilation run inside another one.

    TritonBundler keeps one bundle per process and asserts that none is open
    (`begin_compile` in torch/_inductor/triton_bundler.py), so the outer one is put aside.
    So is the outer tracing context, whose fake tensors AOTAutograd would mix with the inner ones.
    """
    from torch._guards import tracing
    from torch._inductor.triton_bundler import TritonBundler

    names = [name for name in ("_entries", "_static_autotuners", "_winners") if hasattr(TritonBundler, name)]
    saved = {name: getattr(TritonBundler, name) for name in names}
    for name in names:
        setattr(TritonBundler, name, None)
    try:
        with tracing(None):
            yield
    finally:
        for name, value in saved.items():
            setattr(TritonBundler, name, value)


def compile_graph(
    module: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any], is_backward: bool
) -> Callable[[list[Any]], Any]:
    """Compile a graph that AOTAutograd has already lowered, with *options*, from inside a pass of its compilation.

    Returns a function of one list with the inputs, which it may empty.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    with _config().patch(dict(options)):
        compiled: Any = compile_fx_inner(
            module,
            list(example_inputs),
            cudagraphs=BoxedBool(False),
            is_inference=not is_backward,
            is_backward=is_backward,
        )
    return compiled  # type: ignore[no-any-return]


def inductor_cache_dir() -> str:
    """The directory that Inductor's caches live in."""
    from torch._inductor.runtime import cache_dir_utils

    return str(cache_dir_utils.cache_dir())


def device_name(device: torch.device) -> str:
    """A name that is the same for devices of equal speed."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_identity(device: torch.device) -> str:
    """A name of this one device, the same in every process, however ``CUDA_VISIBLE_DEVICES`` numbers it."""
    if device.type == "cuda":
        return f"cuda-{torch.cuda.get_device_properties(device).uuid}"
    return device.type


def shared_folder() -> str:
    """A folder that all of the user's processes on this machine share, whatever their cache directories are."""
    from torch._inductor.runtime import cache_dir_utils

    return cache_dir_utils.default_cache_dir()


def unique_suffix() -> str:
    """A file name suffix that no other process or thread uses."""
    return f"{os.getpid()}-{threading.get_ident()}.tmp"


def size_hint(size: torch.SymInt) -> int:
    """The value of *size* for the example inputs; 1 when it depends on data."""
    return int(size.node.hint) if size.node.has_hint() else 1


def guard_on(condition: bool | torch.SymBool) -> bool:
    """The truth of *condition* for the example inputs; from now on the compiled code holds only where it is the same.

    Reading the truth of a symbolic comparison adds the guard to the shape environment. All releases.
    """
    return bool(condition)


def is_body_of_higher_order_op(graph: Graph) -> bool:
    """Whether Inductor is at work on *graph* as the body of `cond`, `while_loop` or their like.

    Inductor notes the strides of outputs where it restores them: for a whole graph and for the body of
    `invoke_subgraph` (`_recursive_record_original_output_strides` in torch/_inductor/compile_fx.py). All releases.
    """
    from torch._inductor.virtualized import NullHandler, V

    is_at_work = not isinstance(V.fake_mode, NullHandler)
    return is_at_work and "original_output_strides" not in graph.output_node().meta


def outputs_that_are_bases() -> range:
    """The places of the outputs that AOTAutograd added to the graph under way because several outputs are their views.

    `num_forward_returns` in torch/_functorch/_aot_autograd/schemas.py has the order of outputs. All releases.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return range(0)
    first = metadata.num_mutated_inp_runtime_indices + metadata.num_outputs
    return range(first, first + metadata.num_intermediate_bases)


def operator_types() -> tuple[type, ...]:
    """The classes of torch's operators, which their name identifies. All releases."""
    return (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)


def paddings() -> frozenset[Callable[..., Any]]:
    """What `torch.nn.functional.pad` and the padding modules are in a captured graph, before and after decomposition.

    All releases; Dynamo captures the first or the second.
    """
    aten = torch.ops.aten
    functions = (torch.nn.functional.pad, torch._C._nn.pad, torch.constant_pad_nd)
    return frozenset({*functions, aten.pad.default, aten.constant_pad_nd.default})


def symbolic_dispatch() -> AbstractContextManager[object]:
    """Within it operators decompose in Python, where C++ would ask a symbolic size for its number. All releases."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def current_compile_id() -> str | None:
    """Dynamo's id of the compilation under way, such as ``0/1``."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else str(compile_id)


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact into torch.compile's structured trace, where tlparse shows it."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)


def is_inference_aware(hook: object) -> bool:
    """Whether *hook* wants `is_inference` as a second argument (torch 2.12 and newer)."""
    from torch._inductor import custom_graph_pass

    kind = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    return kind is not None and isinstance(hook, kind)


# What CUDA allows for the y and z dimensions of a grid; x goes to 2**31 - 1.
MAX_GRID_YZ = 65535


def install_tilings(memo_of_current: Callable[[], dict[Any, Any] | None]) -> None:
    """Mend two things in how Inductor tiles kernels, for compilations for which *memo_of_current* gives a dict.

    `match_mod_div_block_expr` (torch/_inductor/codegen/block_analysis.py) is asked the same question for every pair of
    nodes that might fuse, and answers it by a search whose time grows exponentially with the rank: with ND tiling,
    most of the compile time. Its answers are kept in the dict; an index without division or modulus matches nothing.

    A grid of three dimensions has no way out when y or z exceeds what CUDA allows, and one with a reduction has
    produced kernels that address a dimension the grid does not have (torch 2.11 to 2.13). `launchable_tiling` takes
    two dimensions there: the grid of two has an overflow path.
    """
    from torch._inductor.codegen.block_analysis import BlockPatternMatcher
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    with _install_lock:
        if hasattr(BlockPatternMatcher, "_magi_passes_original"):
            return
        match = BlockPatternMatcher.__dict__["match_mod_div_block_expr"].__func__
        choose = SIMDScheduling.__dict__["get_first_compatible_tiling"].__func__

        def remembered_match(cls: Any, index: Any, index_var: Any, numel: Any, num_dims: int) -> Any:
            memo = memo_of_current()
            if memo is None:
                return match(cls, index, index_var, numel, num_dims)
            if index.has(index_var) and not index.has(FloorDiv, ModularIndexing):
                return None
            key = (index, index_var, numel, num_dims)
            if key not in memo:
                memo[key] = match(cls, index, index_var, numel, num_dims)
            found = memo[key]
            return found if found is None else tuple(list(part) for part in found)

        def choose_launchable(cls: Any, node_schedule: Any, numel: Any, reduction_numel: Any, ranked: Any) -> Any:
            if memo_of_current() is not None:
                ranked = [launchable_tiling(tiling, is_reduction=reduction_numel != 1) for tiling in ranked]
            return choose(cls, node_schedule, numel, reduction_numel, ranked)

        setattr(BlockPatternMatcher, "match_mod_div_block_expr", classmethod(remembered_match))  # noqa: B010
        setattr(SIMDScheduling, "get_first_compatible_tiling", classmethod(choose_launchable))  # noqa: B010
        setattr(BlockPatternMatcher, "_magi_passes_original", match)  # noqa: B010


def launchable_tiling(tiling: Mapping[str, Any], *, is_reduction: bool) -> Mapping[str, Any]:
    """*tiling*, with z folded into y unless both are within the limits of a grid and nothing is reduced.

    A size that is small enough now is guarded: a larger one compiles anew, and gets two dimensions.
    """
    if "z" not in tiling:
        return tiling
    if not is_reduction and _within_grid(tiling["z"]) and _within_grid(tiling["y"]):
        return tiling
    folded = {"y": tiling["z"] * tiling["y"], **{key: size for key, size in tiling.items() if key not in "zy"}}
    kind: Any = type(tiling)
    return kind(folded)  # type: ignore[no-any-return]


def _within_grid(size: Any) -> bool:
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    sizevars = V.graph.sizevars
    if sizevars.statically_known_leq(size, MAX_GRID_YZ):
        return True
    # torch 2.12 has the first name; the second warns there from 2.13 on.
    shape_env = sizevars.shape_env
    hint = getattr(shape_env, "guarding_hint_or_throw", None) or shape_env.size_hint
    if free_unbacked_symbols(size) or hint(size) > MAX_GRID_YZ:
        return False
    sizevars.check_leq(size, MAX_GRID_YZ)
    return True


@functools.cache
def _library() -> torch.library.Library:
    """Our operators live as long as this object."""
    return torch.library.Library("magi_passes", "FRAGMENT")


@functools.cache
def channels_last_op() -> torch._ops.OpOverload:
    """``magi_passes::channels_last(x)``: a copy of *x* with the channels innermost in memory.

    Inductor lowers it to a constraint on the kernel that computes *x*, which then writes that layout itself. Its own
    `prims.inductor_force_stride_order` wants strides, and cannot sort symbolic ones.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    library = _library()
    library.define("channels_last(Tensor x) -> Tensor")

    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)

    library.impl("channels_last", copy, "CompositeExplicitAutograd")
    library.impl("channels_last", copy, "Meta")
    op: torch._ops.OpOverload = torch.ops.magi_passes.channels_last.default

    @register_lowering(op, type_promotion_kind=None)
    def lower(x: Any) -> Any:
        # From the innermost dimension: position of each dimension in the order of strides.
        order = [3, 0, 2, 1] if len(x.get_size()) == 4 else [4, 0, 3, 2, 1]
        return ir.ExternKernel.require_stride_order(x, order)

    return op


def config_patches_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The options among the arguments of `compile_fx(model_, example_inputs_, inner_compile, config_patches, ...)`."""
    return dict((args[3] if len(args) > 3 else kwargs.get("config_patches")) or {})


def with_config_patches(
    args: tuple[Any, ...], kwargs: dict[str, Any], patches: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `compile_fx` with other options."""
    if len(args) > 3:
        return (*args[:3], patches, *args[4:]), kwargs
    return args, {**kwargs, "config_patches": patches}


def with_inner_compile(
    args: tuple[Any, ...], kwargs: dict[str, Any], around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `compile_fx` with *around* of the function that compiles one graph."""
    if len(args) > 2:
        return (*args[:2], around(args[2]), *args[3:]), kwargs
    from torch._inductor.compile_fx import compile_fx_inner

    return args, {**kwargs, "inner_compile": around(kwargs.get("inner_compile", compile_fx_inner))}


def is_erased(node: Node) -> bool:
    """Whether *node* was taken out of its graph. All releases."""
    return bool(node._erased)


def install(
    around_compile_fx: Callable[..., Any],
    around_inner_compile: Callable[[Callable[..., Any], GraphModule, Any, dict[str, Any]], Any],
) -> None:
    """Route `compile_fx` and `_compile_fx_inner` of torch/_inductor/compile_fx.py through two functions, once.

    Two, because each knows what the other does not. `compile_fx` sees the caller's options and the hooks that
    they are about to hide, and computes AOTAutograd's cache key. `_compile_fx_inner` is one compilation of one
    graph, cache lookup included, and the only place through which a backward pass comes, compiled long after
    `compile_fx` returned. Both are looked up in the module on each use, in every release from 2.10 to 2.15.
    """
    module: Any = importlib.import_module("torch._inductor.compile_fx")
    with _install_lock:
        if hasattr(module.compile_fx, "_magi_passes_original"):
            return
        compile_fx, inner = module.compile_fx, module._compile_fx_inner

        @functools.wraps(compile_fx)
        def scoped_compile_fx(*args: Any, **kwargs: Any) -> Any:
            return around_compile_fx(compile_fx, args, kwargs)

        @functools.wraps(inner)
        def scoped_inner(gm: GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
            return around_inner_compile(inner, gm, example_inputs, kwargs)

        scoped_compile_fx._magi_passes_original = compile_fx  # type: ignore[attr-defined]
        scoped_inner._magi_passes_original = inner  # type: ignore[attr-defined]
        module.compile_fx = scoped_compile_fx
        module._compile_fx_inner = scoped_inner
