# SPDX-License-Identifier: Apache-2.0
"""Known defects of torch's compiler: a module for each theme, found by listing this folder.

A defect says what a user sees, which releases have it, and which functions of torch are replaced, for compilations of
this backend only.

    _defect.py     what is known of a defect, and where its repair is active
    graphs.py      what Dynamo refuses and captures, and what Inductor's patterns match
    aliases.py     which values of a graph share memory after a pass, which removes copies or writes into arguments
    sizes.py       expressions of symbolic sizes and strides
    scheduling.py  the order in which kernels run, their fusion, and which memory is used again
    kernels.py     the user's Triton kernels: their sources, constants and arguments
    launches.py    what a launch of a kernel asks each time, and how kernels are measured
"""
