# SPDX-License-Identifier: Apache-2.0
"""Where the calls of a loaded surface go: to ATen, or to the kernel of a slot.

| module | what it holds |
|---|---|
| `kernels` | one mutable cell for each base, with its kernels and preferences; the contract of `out=` |
| `route` | which way a call takes, and the operators that tracers see |
| `slots` | the public functions: surfaces as modules, and their slots |
"""
