# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that this package touches, one function per quirk, with the releases that it serves.

config.py      Inductor's configuration, read, compared and put back
compiling.py   how Inductor is called, and the two functions of it that are wrapped
kernels.py     how it writes kernels: the type of sizes and tilings, with six repairs
graphs.py      graphs, symbolic sizes, operators
machine.py     the release of torch, folders and devices of this machine

Importing it loads neither Inductor nor Dynamo.
"""

from . import compiling, config, graphs, kernels, machine


__all__ = ["compiling", "config", "graphs", "kernels", "machine"]
