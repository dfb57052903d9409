# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that this package touches, one function per quirk, with the releases that it serves.

config.py     torch's release, folders and devices; Inductor's configuration, read, compared and put back
compiling.py  how Inductor is called, and the two functions of it that are wrapped; graphs and operators
kernels.py    how it writes kernels: what becomes one, and tilings, with repairs
memory.py     the order in which they run
grids.py      those with three tile dimensions: their blocks and their grid
attention.py  which kernel of attention a call has
narrow.py     the type of sizes, and of places that a kernel computes

Importing it loads neither Inductor nor Dynamo.
"""

from . import attention, compiling, config, grids, kernels, memory, narrow


__all__ = ["attention", "compiling", "config", "grids", "kernels", "memory", "narrow"]
