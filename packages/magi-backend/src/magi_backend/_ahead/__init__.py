# SPDX-License-Identifier: Apache-2.0
"""Models compiled ahead of time: a package that runs without Python, and without these packages.

program.py    the exported program, and the sizes that vary in it
bodies.py     the bodies of registered operators in the place of their calls
compile.py    `aot_compile`
"""
