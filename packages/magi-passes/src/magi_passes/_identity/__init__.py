# SPDX-License-Identifier: Apache-2.0
"""A digest of what code does: of a pass for its uuid, of an op for its cache key.

This folder is one in the repository. magi-tritonwrap reaches it by a link, and each wheel carries it, so that neither
package needs the other. It imports nothing of either.

code.py     what a code object does, and the names that it reads
members.py  what of a value counts, as it is stored; what was read, to tell later whether it was replaced
library.py  whose code it is: where a walk stops
walk.py     the walk from code to all that it reaches, where each value is read, and its form
"""
