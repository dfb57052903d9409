# SPDX-License-Identifier: Apache-2.0
"""What torch's caches hold, and what of a process and a machine their entries do not name (2.10 to 2.15)."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Iterator

from .compiling import configs


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


def vector_instructions() -> tuple[str, ...]:
    """The sets of vector instructions that this process found to work; empty if it did not look for them.

    Inductor looks once in a process with C++ code: it compiles a program for each set and starts a Python that loads
    it, which takes more than a second of each start, with warm caches too.
    """
    from torch._inductor import cpu_vec_isa

    looked = cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
    return tuple(map(str, cpu_vec_isa.valid_vec_isa_list())) if looked else ()


def take_vector_instructions(names: Iterable[str]) -> None:
    """Use *names*, which another process found to work on such a processor, unless this one has looked already.

    Only on x86, since two of the sets of ARM have the same name.
    """
    from torch._inductor import config, cpu_vec_isa

    wanted = set(names)
    found = [each for each in cpu_vec_isa.supported_vec_isa_list if str(each) in wanted]
    is_open = config.cpp.vec_isa_ok is None and not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
    if is_open and platform.machine() == "x86_64" and len(found) == len(wanted):
        cpu_vec_isa.valid_vec_isa_list = functools.cache(lambda: found)
