# SPDX-License-Identifier: Apache-2.0
"""From a function to its `SignatureLowering`, at decoration.

| module | what it holds |
|---|---|
| `annotations` | annotations as objects, and the scope of their names |
| `types` | the type table: an annotation to a tree, or its refusal; `codecs` is a part of it |
| `signature` | a whole signature, in 64 arguments; `lower_signature` is the public function for it |
"""
