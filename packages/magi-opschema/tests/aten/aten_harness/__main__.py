# SPDX-License-Identifier: Apache-2.0
"""The command `python -m aten_harness`: test one operator in one slot against ATen, or all of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magi_opschema.aten import slots
from magi_opschema.aten._commands import run_kernels
from magi_opschema.aten._generate.schema import SHIPPED, read_allowlist
from magi_opschema.aten.errors import AtenError

from .run import check


def main() -> int:
    """Run the command. Returns 0 for success, 1 if a check failed, 2 for a bad input."""
    parser = argparse.ArgumentParser(prog="python -m aten_harness", description=__doc__)
    parser.add_argument("op", nargs="?", metavar="OP", help="softmax, linalg.norm (default: every active slot of all)")
    parser.add_argument("--slot", type=int, default=8, metavar="N", help="0 to 7 for a kernel, 8 for ATen (default)")
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="a Python file that registers kernels; run first")
    parser.add_argument("--device", metavar="DEVICE", help="where the inputs are (default: where the kernel serves)")
    parser.add_argument("--verbose", action="store_true", help="print every row")
    options = parser.parse_args()
    try:
        run_kernels(options.kernels)
        tasks = [(options.op, options.slot)]
        if options.op is None:
            tasks = [(base, slot) for base in read_allowlist(SHIPPED) for slot in slots(base)]
        reports = sorted(check(tasks, device=options.device).items())
    except AtenError as error:
        print(f"aten_harness: {error}", file=sys.stderr)  # noqa: T201  # a command's answer
        return 2
    for (base, slot), report in reports:
        lines = [str(row) for row in (report.rows if options.verbose else report.failures)]
        lines += [f"{base:45} slot {slot}  {report.summary()}"]
        lines += [f"  skipped {count}: {reason}" for reason, count in report.skips.items()]
        print("\n".join(lines), flush=True)  # noqa: T201
    return 1 if any(report.failures for _, report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
