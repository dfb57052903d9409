# SPDX-License-Identifier: Apache-2.0
"""Objects behind integers, and classes whose objects are taken apart: `ObjectHandle[T]`.

| module | what it holds |
|---|---|
| `registry` | the objects that have a handle, and the public functions |
| `annotation` | `ObjectHandle[T]`: its codec, and how Dynamo reads a handle and the parts of an object |
| `declared` | classes that declare their fields, so that ops take their objects apart |
"""
