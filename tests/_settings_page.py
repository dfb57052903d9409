# SPDX-License-Identifier: Apache-2.0
"""Each setting, as `magi settings --json` has it. `python tests/_settings_page.py` draws docs/settings.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
START, END = "<!-- drawn by tests/_settings_page.py: begin -->\n", "<!-- drawn: end -->\n"


def drawing() -> str:
    """The section of each setting."""
    command = [sys.executable, "-m", "magi_backend", "settings", "--json"]
    known: dict[str, dict[str, str]] = json.loads(subprocess.check_output(command, text=True))
    return "\n".join(_section(name, about) for name, about in known.items())


def _section(name: str, about: dict[str, str]) -> str:
    does = about["does"].replace("``", "`")
    return f"""### {name}

{does}

- option `"{about["option"]}"`, variable `{about["variable"]}`
- takes {about["takes"]}; by default `{about["default"]}`
- holds for {about["holds for"]}; torch {about["torch"]}
"""


def drawn(page: str) -> str:
    """*page* with the settings in their place."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{drawing()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
