# SPDX-License-Identifier: Apache-2.0
"""What an op is, as plain data. Nothing here writes code or uses torch.

| module | what it holds |
|---|---|
| `tree` | the mapping tree: how one parameter, or the return value, maps to leaves |
| `schema` | the arguments of a flat schema, and its text |
| `layout` | tuples of flat arguments: by slot, and with lists spread out |
| `lowering` | `SignatureLowering`: a signature and its flat schema |
| `show` | a lowering as text |
"""
