# SPDX-License-Identifier: Apache-2.0
"""Inductor and Dynamo: how a graph is compiled, with which settings, what is counted, and what the caches hold."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import operator
import os
import platform
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch._guards import TracingContext
from torch._logging._internal import trace_structured
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from .values import float_memo


T = TypeVar("T")


def torch_release() -> tuple[int, ...]:
    """The release of torch without its local or pre-release part, for example ``(2, 13, 0)``."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:3]))


def register_devices() -> None:
    """Have the code of all devices registered before a module of one of them is imported (every torch release).

    Inductor imports those modules when it asks for a device and none is registered. If one was imported by itself, the
    others never are: on torch 2.10 no graph compiles for a CPU then, and on later ones xpu gets the code of a CPU. If
    somebody else did that before, it is made good.
    """
    from torch._inductor.codegen import common

    known = common.device_op_overrides_dict
    if "cpu" not in known:
        by_themselves = dict(known)
        known.clear()
        common.get_device_op_overrides("cpu")
        known.update(by_themselves)


def owner_of(place: str) -> tuple[Any, str]:
    """The class or module that has the function *place*, None if torch does not have it, and the function's name."""
    module, _, path = place.partition(":")
    *classes, attribute = path.split(".")
    register_devices()
    owner: Any = importlib.import_module(module)
    for name in classes:
        owner = getattr(owner, name, None)
    return owner, attribute


def replace(owner: Any, attribute: str, is_active: Callable[[], bool] | None, repaired: Callable[..., Any]) -> bool:
    """Make *attribute* of a class or module call *repaired* where that *is_active*; None is everywhere.

    It gets torch's function, and then the arguments. Returns whether it was replaced: not twice, and not if there is no
    such attribute. The same function may be replaced several times; each calls the one before it.
    """
    found = inspect.getattr_static(owner, attribute, None)
    original = found.__func__ if isinstance(found, staticmethod) else found
    repair = (repaired.__module__, repaired.__qualname__)
    made = getattr(original, "_magi_repairs", ())
    if original is None or repair in made:
        return False

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_active is None or is_active():
            return repaired(original, *args, **kwargs)
        return original(*args, **kwargs)

    known: Any = function
    known._magi_repairs = (*made, repair)
    setattr(owner, attribute, staticmethod(function) if isinstance(found, staticmethod) else function)
    return True


@contextlib.contextmanager
def assigned(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """A context in which *variable* has *value*, which it gives."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def let_threads_register(backend: Callable[..., Any]) -> None:
    """Allow several threads to use the name *backend* for the first time at once (every torch release).

    ``lookup_backend`` checks whether a name is registered, loads its entry point, and registers it, without a lock. Of
    several threads that do this at once, all but one get ``AssertionError: duplicate name``, or a KeyError between the
    two tables. By then they are inside torch's function, so only its table can be replaced: in the new one, *backend*
    is never registered yet, and always found.
    """

    class Backends(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            return name != backend.__name__ and super().__contains__(name)

        def __missing__(self, name: str) -> Any:
            if name == backend.__name__:
                return backend
            raise KeyError(name)

    registry: Any = torch._dynamo.backends.registry
    registry._COMPILER_FNS = Backends(registry._COMPILER_FNS)


_BACKENDS = "magi_backend._backend"
# Where torch keeps the backend that it wraps for options, modes and recompilations.
_INNER = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn", "__wrapped__")


def is_our_backend(compiler_fn: Any) -> bool:
    """Whether *compiler_fn* is a function or an object of the module of our backends, or wraps one."""
    while compiler_fn is not None:
        if _BACKENDS in (getattr(compiler_fn, "__module__", ""), type(compiler_fn).__module__):
            return True
        known = getattr(compiler_fn, "__dict__", {})
        compiler_fn = next((known[name] for name in _INNER if name in known), None)
    return False


def compile_fx(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    config_patches: dict[str, Any],
) -> Callable[..., Any]:
    """Inductor's entry for backends: its caches, logs and CUDA graphs come with it. All supported releases."""
    from torch._inductor.compile_fx import compile_fx as inductor

    return inductor(gm, example_inputs, inner_compile=inner_compile, config_patches=config_patches)  # type: ignore[return-value]


def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile one forward or backward graph of ATen operators, as Inductor does by itself."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, example_inputs, **kwargs)


def package(program: Any, path: str, options: dict[str, Any]) -> str:
    """Compile an exported program by AOTInductor into the package *path*. All supported releases."""
    from torch._inductor import aoti_compile_and_package

    return str(aoti_compile_and_package(program, package_path=path, inductor_configs=options))


def backend_fakes(values: Sequence[Any]) -> list[Any]:
    """The fake tensors that Dynamo traced with, as AOTAutograd takes them.

    Dynamo makes another fake mode for the backend. From torch 2.11 on, AOTAutograd converts tensors of the first mode;
    2.10 refuses them (`detect_fake_mode` in `torch/_guards.py`). The symbol of a float, which is an input as a tensor,
    is lost on the way: reading the float would be an error, or another symbol, without a value, under fullgraph=True.
    """
    mode = TracingContext.get().fake_mode
    assert mode is not None, "Dynamo makes one before it calls a backend"
    is_converted = torch_release() >= (2, 11)

    def converted(value: torch.Tensor) -> torch.Tensor:
        memo = float_memo(value)
        if is_converted and memo is None:
            return value
        made: Any = mode.from_tensor(value)
        if memo is not None:
            made.item_memo = memo
        return made  # type: ignore[no-any-return]

    return tree_map_only(torch.Tensor, converted, list(values))  # type: ignore[no-any-return]


def as_itself(error: Exception, own: tuple[type[Exception], ...]) -> Exception:
    """*error*, changed so that a backend raises it unwrapped if it is of the classes *own*; any other one unchanged.

    Dynamo and Inductor wrap what a backend raises into a ``BackendCompilerFailed``, unless it is one already
    (``OutputGraph._call_user_compiler``; all supported releases). So the result is of a class with both bases, with the
    same name, message and attributes. Inductor's wrapper is removed.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    inner: Any = error
    while isinstance(inner, BackendCompilerFailed) and not isinstance(inner, own):
        inner = inner.inner_exception
    if not isinstance(inner, own) or isinstance(inner, BackendCompilerFailed):
        return error
    kind = type(inner)
    both = type(kind.__name__, (kind, BackendCompilerFailed), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    # Dynamo shortens the traceback to what is inside this frame, the one that caught the error.
    frame = error.__traceback__.tb_frame if error.__traceback__ is not None else None
    as_torch_would = BackendCompilerFailed(types.SimpleNamespace(__name__="magi"), inner, frame)
    result: Any = both.__new__(both, *inner.args)
    vars(result).update(vars(as_torch_would) | vars(inner))
    result.__cause__ = inner.__cause__
    return result.with_traceback(error.__traceback__)  # type: ignore[no-any-return]


def is_failure(error: BaseException) -> bool:
    """Whether *error* says that compiling failed, rather than what Dynamo will do next, or what a user did wrong."""
    exc = torch._dynamo.exc
    return not isinstance(error, exc.TorchDynamoException) or isinstance(error, exc.BackendCompilerFailed)


def configs() -> tuple[Any, Any]:
    """The configuration of Inductor, and that of AOTAutograd; from torch 2.12 on, threads have separate ones."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return inductor, functorch


def is_result_saved() -> bool:
    """Whether Dynamo will write what a backend returns to a file, as ``aot_compile`` does (2.10 to 2.15)."""
    return bool(configs()[1].bundled_autograd_cache or torch._dynamo.config.caching_precompile)


def restarts() -> type[Exception]:
    """The exceptions that make Dynamo capture a function again; they are not failures."""
    return torch._dynamo.exc.RestartAnalysis


def cache_counts() -> tuple[int, ...]:
    """How often this process hit, missed and bypassed Inductor's and AOTAutograd's caches so far."""
    counters = torch._dynamo.utils.counters
    return tuple(
        counters["aot_autograd"][f"autograd_cache_{event}"] + counters["inductor"][f"fxgraph_cache_{event}"]
        for event in ("hit", "miss", "bypass")
    )


def trace_artifact(name: str, payload: Callable[[], dict[str, Any]]) -> None:
    """Write *payload* into the structured trace of ``torch.compile`` (TORCH_TRACE, tlparse)."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=lambda: json.dumps(payload()),
    )


def inductor_keys() -> list[str]:
    """Every key of ``torch._inductor.config``; its own ``list_options()`` leaves out those that have an alias."""
    return sorted({*torch._inductor.list_options(), *configs()[0]._config})


def inductor_value(key: str, patches: Mapping[str, Any]) -> Any:
    """The value of the configuration key *key*, such as ``"triton.cudagraphs"``, with *patches*."""
    return patches[key] if key in patches else operator.attrgetter(key)(configs()[0])


def inductor_type(key: str) -> type | None:
    """The type of an Inductor key, as ``torch.compile(options=...)`` checks it; None for any type."""
    config = configs()[0]
    kind = config.get_type(key) if key in config._config else None
    return kind if isinstance(kind, type) and kind is not type(None) else None


def mode_options(mode: str) -> dict[str, Any]:
    """The Inductor configuration of *mode* of ``torch.compile``."""
    return dict(torch._inductor.list_mode_options(mode))


def cpp_compiler() -> str:
    """The command of the C++ compiler that Inductor calls (2.10 to 2.15); an error if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def inductor_cache() -> str:
    """The folder of Inductor's caches (2.10 to 2.15), which is not made here."""
    from torch._inductor.runtime import cache_dir_utils

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir_utils.default_cache_dir()


_EPILOGUES = "epilogue_fusion_user_defined_triton_kernel"


def epilogue_keys() -> tuple[str, ...]:
    """The key with which Inductor fuses pointwise operators into user kernels; empty before torch 2.12."""
    return (_EPILOGUES,) if hasattr(configs()[0], _EPILOGUES) else ()


def graph_kind(kwargs: dict[str, Any]) -> str:
    """What the graph is that Inductor compiled with the arguments *kwargs*: "inference", "forward" or "backward"."""
    return "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"


_seen_by: ContextVar[Callable[[Any, dict[str, Any]], None] | None] = ContextVar("magi_loaded", default=None)


def seeing_loaded(see: Callable[[Any, dict[str, Any]], None]) -> contextlib.AbstractContextManager[Any]:
    """A context in which *see* is called with each compiled graph that becomes callable.

    It gets the graph, which has its ``source_code``, a ``current_callable`` and the ``fx_kwargs`` that it was compiled
    with; and the names of the generated module, which are empty if that is not Python.
    ``CompiledFxGraph.post_compile`` runs for every graph: after Inductor, and after either cache (2.10 to 2.15).
    """
    replace(*owner_of("torch._inductor.output_code:CompiledFxGraph.post_compile"), None, _and_tell)
    return assigned(_seen_by, see)


def _and_tell(post_compile: Callable[..., None], graph: Any, *args: Any, **kwargs: Any) -> None:
    see = _seen_by.get()
    function = getattr(graph.current_callable, "__func__", graph.current_callable)
    post_compile(graph, *args, **kwargs)
    if see is not None:
        see(graph, getattr(function, "__globals__", {}))


def cache_entries() -> Iterator[tuple[str, str, bytes]]:
    """Kind, key and content of each entry that this process wrote into torch's caches, or found in them.

    ``torch.compiler.save_cache_artifacts`` has them in one piece. If it was called twice, what the second call returned
    loses entries when it is read: ``CacheArtifactManager.deserialize`` makes a dict by kind of a list for each call.
    Entries of ``caching_precompile`` are left out: torch drops the guards on the identity of functions and modules
    there, so a function that was replaced, or another backend, gets the earlier code.
    """
    from torch.compiler._cache import CacheArtifactManager

    for artifact in tuple(CacheArtifactManager._seen_artifacts):
        if artifact.type() != "precompile":
            yield artifact.type(), artifact.key, artifact.content


def put_cache_entry(kind: str, key: str, content: bytes) -> None:
    """Put an entry into the caches on the disk, where compilations find it under its key."""
    from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

    CacheArtifactManager._ensure_cache_artifacts_registered()
    CacheArtifactFactory.create(kind, key, content).populate_cache()


def changed_configs() -> dict[str, object]:
    """What of Inductor's and AOTAutograd's configuration is in torch's keys and not at its default, by name."""
    found = {}
    for module in configs():
        left_out = tuple(getattr(module, "_cache_config_ignore_prefix", ()))
        keys = set(module.get_config_copy()) - set(getattr(module, "_save_config_ignore", ()))
        for key in keys:
            value = getattr(module, key)
            # `_is_default` counts a value that was set and set back as another one.
            if repr(value) != repr(module._config[key].default) and not key.startswith(left_out):
                found[f"{module.__name__}.{key}"] = value
    return found


def vector_instructions() -> dict[str, dict[str, Any]]:
    """The sets of vector instructions that this process found to work; empty if it did not look for them.

    Inductor looks once in a process with C++ code: it compiles a program for each set and starts a Python that loads
    it, which takes more than a second of each start, with warm caches too. A set then remembers further instructions
    that work, such as those for bfloat16: the flags of the compiler depend on them, and on these the names of kernels.
    """
    from torch._inductor import cpu_vec_isa

    if not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        return {}
    return {
        str(each): {name: value for name, value in vars(each).items() if isinstance(value, bool | str)}
        for each in cpu_vec_isa.valid_vec_isa_list()
    }


def take_vector_instructions(sets: Mapping[str, Mapping[str, Any]]) -> None:
    """Use *sets*, which another process found to work on such a processor, unless this one has looked already.

    Only on x86, since two of the sets of ARM have the same name. A process has to ask the system for AMX.
    """
    from torch._inductor import config, cpu_vec_isa

    found = [each for each in cpu_vec_isa.supported_vec_isa_list if str(each) in sets]
    is_open = config.cpp.vec_isa_ok is None and not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
    is_whole = platform.machine() == "x86_64" and len(found) == len(sets)
    if is_open and is_whole and (not any("amx" in name for name in sets) or torch.cpu._init_amx()):
        for each in found:
            vars(each).update(sets[str(each)])
        cpu_vec_isa.valid_vec_isa_list = functools.cache(lambda: found)
