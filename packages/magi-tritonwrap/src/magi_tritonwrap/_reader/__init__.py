# SPDX-License-Identifier: Apache-2.0
"""Finds the kernels that a function can launch by reading its source. Nothing of the user's is called.

source.py      from a code object to a syntax tree
bindings.py    which names a function binds, and to what
values.py      what an expression can stand for, and the scope that it stands in
scopes.py      the scope of a call: parameters, closure, imports
attributes.py  which attributes can be read without running code
containers.py  entries of tuples, lists and dicts
memory.py      answers that are remembered, and the time limit
entrance.py    from a callable to the scope of its call
effects.py     which calls do I/O or communicate with other ranks
notes.py       what is noted about a call
evaluate.py    from an expression to the values that it can stand for
find.py        from a function to its kernels: `find_kernels`
"""
