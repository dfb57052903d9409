# SPDX-License-Identifier: Apache-2.0
"""The command `magi-opschema`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with *argv*, the process's own arguments without it.

    Returns:
        0 for success; 1 if a check found something, such as drift or a failed test; 2 for a wrong call or bad input.
    """
    parser = argparse.ArgumentParser(prog="magi-opschema", description="PyTorch custom ops with rich signatures.")
    topics = parser.add_subparsers(required=True, metavar="TOPIC")
    # Only argument parsing is imported here; each command imports what it needs, in particular torch.
    from .aten._commands import add_commands

    add_commands(
        topics.add_parser("aten", help="the generated ATen surface", description="The generated ATen surface.")
    )
    options = parser.parse_args(argv)
    from .aten.errors import AtenError

    try:
        code: int = options.run(options)
    except AtenError as error:
        print(f"magi-opschema: {error}", file=sys.stderr)  # noqa: T201  # a command's answer
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
