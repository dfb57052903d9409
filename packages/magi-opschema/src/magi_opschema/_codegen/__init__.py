# SPDX-License-Identifier: Apache-2.0
"""Source of the functions that are generated for an op, from the model to compiled code.

| module | what it holds |
|---|---|
| `source` | the lines of one function, text as data, and the one place that compiles it |
| `refusals` | what is refused, and what generated code calls then |
| `nodes` | a tree to lines that flatten a value and rebuild it |
| `functions` | whole functions: flat twins, inputs, flatten |
| `exposed` | the function that the decorator returns |
"""
