# SPDX-License-Identifier: Apache-2.0
"""What an operator adds to AOTAutograd's cache key: a digest of all code and values that its body can reach.

code.py         what a code object does, and which names it reads
members.py      what classes and functions consist of
value_forms.py  stable forms of values
fingerprint.py  one digest of code and values, followed from function to function
cache_key.py    the entry in torch's table that answers with it
"""
