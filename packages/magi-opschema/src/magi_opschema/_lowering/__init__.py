# SPDX-License-Identifier: Apache-2.0
"""From a function to its `SignatureLowering`, at decoration.

| module | what it holds |
|---|---|
| `candidates` | which objects can become an op |
| `annotations` | annotations as objects, and the scope of their names |
| `place` | where an annotation is in a signature, and how it is refused |
| `types` | the type table: an annotation to a tree; `records`, `codecs`, `returns` are parts of it |
| `mutates` | names of `mutates_args` to leaves |
| `pack` | more than 64 leaves in 64 arguments |
| `signature` | a whole signature; `lower_signature` is the public function for it |
"""
