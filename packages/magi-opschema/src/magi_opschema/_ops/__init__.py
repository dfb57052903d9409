# SPDX-License-Identifier: Apache-2.0
"""From a decorator to a registered op, and what can be done with one.

| module | what it holds |
|---|---|
| `decorator` | `magi_register_custom_op` |
| `define` | check, compute, register, remember |
| `fake` | the fake and the gradient functions that a user gives, checked |
| `functional` | the form of a mutating op that writes into nothing |
| `registration` | the only module that registers anything with torch |
| `catalogue` | what is known of each op: `op_def`, `annotate` |
| `rules` | fake, gradient, bodies, vmap, autocast and sharding, given afterwards |
| `pytrees` | records as nodes of torch's pytrees |
| `opcheck` | torch.library.opcheck at the user's signature |
"""
