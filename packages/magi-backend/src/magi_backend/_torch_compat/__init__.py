# SPDX-License-Identifier: Apache-2.0
"""The private torch names that this package touches: one function per quirk, with the releases that it serves.

compiling.py    Inductor and Dynamo: how a graph is compiled, with which settings, and what is counted
frames.py       Dynamo: the captured function, recompilations, graph breaks and times
loaded.py       compiled graphs as they become callable, from a cache too
nodes.py        nodes and graphs: what they call, what they write to, how they are cut
values.py       tensors, modules and compiled callables: what torch keeps on them

The repairs of torch's defects are in `_repairs`.
"""

from . import compiling, frames, loaded, nodes, values


__all__ = ["compiling", "frames", "loaded", "nodes", "values"]
