# SPDX-License-Identifier: Apache-2.0
"""What is set: torch's release, its folders and devices, and Inductor's configuration, with how to put all of it back.

Tried on torch 2.10 to 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._config_module import _UNSET_SENTINEL


# The options that hold graph passes. The first three run outside of Inductor's inner compilation,
# when the configuration that code generation reads is not yet in place.
EARLY_HOOKS = ("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass")
POST_GRAD_HOOKS = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
HOOKS = EARLY_HOOKS + POST_GRAD_HOOKS


def _config() -> Any:
    from torch._inductor import config

    return config


def config_keys() -> frozenset[str]:
    """Every key of Inductor's configuration, nested ones with a dot."""
    return frozenset(_config()._config)


def config_values(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Every Inductor key with its value in the state that `read_overrides` returned."""
    config = _config()
    return {key: _effective(config, key, override) for key, override in overrides.items()}


def default_of(key: str) -> Any:
    """The default value of *key*, which environment variables may have set."""
    return _config()._config[key].default


def get_config(key: str) -> Any:
    """The value of Inductor's *key* in the current context."""
    return getattr(_config(), key)


def set_config(key: str, value: object) -> None:
    """Set Inductor's *key* in the current context."""
    setattr(_config(), key, value)


def patched(values: Mapping[str, Any]) -> AbstractContextManager[object]:
    """A context in which the configuration has *values*, by key."""
    patch: AbstractContextManager[object] = _config().patch(dict(values))
    return patch


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

    ``getattr`` is not used, because it copies mutable defaults into the override, and may warn.
    """
    entry = config._config[key]
    if entry.env_value_force is not _UNSET_SENTINEL:
        return entry.env_value_force
    for value in (override, entry.env_value_default):
        if value is not _UNSET_SENTINEL:
            return value
    return entry.default


def read_overrides() -> dict[str, Any]:
    """The state of Inductor's configuration in the current context, for `restore_overrides`.

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


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys whose effective value differs between two states, with both values.

    A mutable default that was only read becomes an override of equal value, which is not a change.
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
    # True == 1, but a user who reads the configuration sees the difference.
    return left is right or (type(left) is type(right) and bool(left == right))


def restore_overrides(saved: Mapping[str, Any], keys: Iterable[str] | None = None) -> None:
    """Restore the configuration, or only *keys* of it, to the state that `read_overrides` returned."""
    config = _config()
    for key in config._config if keys is None else keys:
        override = saved[key]
        if _same(_override_of(config, key), override):
            continue
        # Assigning marks torch's caches of the configuration as stale, under the name that each release gives them.
        setattr(config, key, config._config[key].default if override is _UNSET_SENTINEL else _copied(override))
        if override is _UNSET_SENTINEL:
            entry = config._config[key]
            if isinstance(entry.user_override, ContextVar):
                entry.user_override.set(override)
            else:
                entry.user_override = override


def torch_version() -> str:
    """The running torch release with its local version, such as ``2.13.0+cpu``."""
    return str(torch.__version__)


# 2.13.1, 2.13.0a0+git0fc8, 2.13.0.dev20260101+cu130, 2.13.1.post1, 2.13.0-vendor1
_VERSION = re.compile(
    r"v?(\d+)\.(\d+)(?:\.(\d+))?"
    r"(?:[-_.]?(?:a|b|rc)\d*)?(?:[-_.]?post(\d*))?(?:[-_.]?dev\d*)?(?:[+-][\w.-]+)?"
)


def numbers_of(version: str) -> tuple[int, int, int, int]:
    """Major, minor, patch and post-release number of *version*, for comparisons: ``2.13.1.post2`` is (2, 13, 1, 2).

    A build before a release counts as the release, ``2.11.0a0+git`` as (2, 11, 0, 0), because it has the same code.

    Raises:
        ValueError: *version* is not a torch release.
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise ValueError(f"{version!r} is not a torch release; write it as '2.11' or '2.13.1'")
    major, minor, patch, post = (int(part or 0) for part in match.groups())
    return major, minor, patch, post


def inductor_cache_dir() -> str:
    """The directory that Inductor's caches live in."""
    from torch._inductor.runtime import cache_dir_utils

    return str(cache_dir_utils.cache_dir())


def shared_folder() -> str:
    """A folder that all processes of the user on this machine share, independent of their cache directories."""
    from torch._inductor.runtime import cache_dir_utils

    return cache_dir_utils.default_cache_dir()


def device_identity(device: torch.device) -> str:
    """A name of this one device, the same in every process, however ``CUDA_VISIBLE_DEVICES`` numbers it."""
    if device.type == "cuda":
        return f"cuda-{torch.cuda.get_device_properties(device).uuid}"
    return device.type
