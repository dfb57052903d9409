# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that this package touches, one function per quirk, with the releases that it serves.

releases.py    releases as numbers
config.py      Inductor's configuration, read, compared and put back
compiling.py   how Inductor is called, and the two functions of it that are wrapped
tilings.py     how it tiles kernels, with four repairs
size_arguments.py    the type in which sizes reach a kernel
graphs.py      graphs, symbolic sizes, operators
machine.py     folders and devices of this machine

Importing it loads neither Inductor nor Dynamo.
"""

from .compiling import (
    compilation_lock,
    compile_graph,
    config_patches_of,
    current_compile_id,
    install,
    is_inference_aware,
    nested_compilation,
    out_of_process_mode,
    trace_artifact,
    with_config_patches,
    with_inner_compile,
)
from .config import (
    EARLY_HOOKS,
    HOOKS,
    POST_GRAD_HOOKS,
    Overrides,
    config_changes,
    config_keys,
    config_values,
    default_of,
    get_config,
    patched,
    read_overrides,
    restore_overrides,
    set_config,
)
from .graphs import (
    channels_last_op,
    guard_on,
    is_body_of_higher_order_op,
    is_erased,
    operator_types,
    outputs_that_are_bases,
    paddings,
    size_hint,
    symbolic_dispatch,
)
from .machine import device_identity, device_name, inductor_cache_dir, shared_folder, unique_suffix
from .releases import numbers_of, release, torch_version
from .size_arguments import install_narrow_sizes
from .tilings import MAX_GRID_YZ, install_tilings, launchable_tiling


__all__ = [
    "EARLY_HOOKS",
    "HOOKS",
    "MAX_GRID_YZ",
    "POST_GRAD_HOOKS",
    "Overrides",
    "channels_last_op",
    "compilation_lock",
    "compile_graph",
    "config_changes",
    "config_keys",
    "config_patches_of",
    "config_values",
    "current_compile_id",
    "default_of",
    "device_identity",
    "device_name",
    "get_config",
    "guard_on",
    "inductor_cache_dir",
    "install",
    "install_narrow_sizes",
    "install_tilings",
    "is_body_of_higher_order_op",
    "is_erased",
    "is_inference_aware",
    "launchable_tiling",
    "nested_compilation",
    "numbers_of",
    "operator_types",
    "out_of_process_mode",
    "outputs_that_are_bases",
    "paddings",
    "patched",
    "read_overrides",
    "release",
    "restore_overrides",
    "set_config",
    "shared_folder",
    "size_hint",
    "symbolic_dispatch",
    "torch_version",
    "trace_artifact",
    "unique_suffix",
    "with_config_patches",
    "with_inner_compile",
]
