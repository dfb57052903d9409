# SPDX-License-Identifier: Apache-2.0
"""Where the calls of a loaded surface go: to ATen, or to the kernel of a slot.

| module | what it holds |
|---|---|
| `cells` | one mutable cell for each base, which generated functions read, with its kernels and preferences |
| `kernels`, `out` | a user's kernel and its calls; the contract of `out=` |
| `route` | which way a call takes, and the operators that tracers see |
| `slots` | the public functions |
| `load` | surfaces as modules |
"""
