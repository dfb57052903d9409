# SPDX-License-Identifier: Apache-2.0
"""From a decorator to a registered op, and what can be done with one.

| module | what it holds |
|---|---|
| `decorator` | `magi_register_custom_op` |
| `define` | check, compute, register, remember; `callables` and `fake` are steps of it |
| `by_handle` | the opaque form of an op that takes objects apart |
| `functional` | the form of a mutating op that writes into nothing |
| `registration` | the only module that registers anything with torch |
| `catalogue` | what is known of each op: `op_def`, `annotate` |
| `rules` | bodies, vmap, autocast and sharding, given afterwards |
| `opcheck` | torch.library.opcheck at the user's signature |
| `translate_error` | what generated code calls when the dispatcher refuses a call |
"""
