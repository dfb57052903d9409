# SPDX-License-Identifier: Apache-2.0
"""Source of the functions that are generated for an op, from the model to compiled code.

| module | what it holds |
|---|---|
| `source` | the lines of one function, what is called with a refused value, and the one place that compiles |
| `nodes` | a tree to lines that flatten a value and rebuild it |
| `functions` | whole functions: flat twins, refusals, flatten, and the function that the decorator returns |
"""
