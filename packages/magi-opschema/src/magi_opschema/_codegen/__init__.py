# SPDX-License-Identifier: Apache-2.0
"""Source of the functions that are generated for an op, from the model to compiled code.

| module | what it holds |
|---|---|
| `source` | text as data, and the one place that compiles it |
| `writer` | the lines of one function, and the objects that its reserved names stand for |
| `nodes` | a tree to lines that flatten a value and rebuild it |
| `by_handle` | calls that pass the handle of an object |
| `rebuilt` | the class of the objects that a body gets |
| `refusals` | conditions under which flat values are refused |
| `functions` | whole functions: flat twins, inputs, flatten |
| `exposed` | the function that the decorator returns |
| `reject` | what generated code calls with a value that the signature refuses |
| `twins` | flat twins of the user's functions, compiled |
"""
