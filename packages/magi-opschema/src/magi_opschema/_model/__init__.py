# SPDX-License-Identifier: Apache-2.0
"""What an op is, as plain data. Nothing here writes code or uses torch.

| module | what it holds |
|---|---|
| `tree` | the mapping tree: how one parameter, or the return value, maps to leaves |
| `schema` | the arguments of a flat schema, its text, and tuples of flat arguments |
| `lowering` | `SignatureLowering`: a signature and its flat schema, and both as text |
"""
