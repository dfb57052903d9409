# SPDX-License-Identifier: Apache-2.0
"""Where the calls of a loaded surface go: to ATen, or to the kernel of a slot.

| module | what it holds |
|---|---|
| `cells` | one mutable cell for each base, which generated functions read |
| `kernels`, `registry` | a user's kernel; the kernels and preferences of each base |
| `serve`, `out` | serving one call; the contract of `out=` |
| `library`, `route` | operators that tracers see; which way a call takes |
| `slots` | the public functions |
| `load` | surfaces as modules |
| `gap` | which operators of a program have no kernel |
"""
