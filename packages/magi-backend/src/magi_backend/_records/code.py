# SPDX-License-Identifier: Apache-2.0
"""What is in the module that Inductor generates for a graph."""

from __future__ import annotations

import re


# "cpp_fused_add_0 = async_compile.cpp_pybinding(...)", "triton_poi_fused_1 = async_compile.triton('triton_...', ...)"
_KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\(", re.MULTILINE)
# "buf3 = extern_kernels.convolution(...)", "torch.ops.aten.convolution_backward.default(...)"
_EXTERN = re.compile(r"\b(?:extern_kernels\.(\w+)|torch\.ops\.(\w+\.\w+))[.\w]*\(")


def generated_kernels(source: str) -> tuple[str, ...]:
    """The names of the kernels that Inductor's generated module *source* defines."""
    return tuple(_KERNEL.findall(source))


def external_calls(source: str) -> tuple[str, ...]:
    """The names of the library functions that Inductor's generated module *source* calls, one for each call."""
    return tuple(name or op for name, op in _EXTERN.findall(source))


_SOURCE = re.compile(r"^(\w+) = async_compile\.\w+\((.*?)(\x27{3}|\x22{3})(.*?)\3.*?\)\n", re.MULTILINE | re.DOTALL)


def kernel_sources(code: str) -> dict[str, str]:
    r"""The source of each kernel that the generated module *code* defines, by name.

    Example:
        >>> kernel_sources("cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''\nvoid kernel();\n''')\n")
        {'cpp_fused_0': 'void kernel();'}
    """
    return {found[1]: found[4].strip("\n") for found in _SOURCE.finditer(code)}


def without_kernels(code: str) -> str:
    """The generated module *code* with the source of each kernel replaced by its name."""
    return _SOURCE.sub(lambda found: f"{found[1]} = …  # below, by itself\n", code)
