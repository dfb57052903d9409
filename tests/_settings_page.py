# SPDX-License-Identifier: Apache-2.0
"""Each setting and environment variable as the code has it. `python tests/_settings_page.py` draws docs/settings.md."""

from __future__ import annotations

from pathlib import Path

from magi_backend._settings import described, field_names
from magi_opschema import _environment
from magi_passes._framework.declared import DISABLE_VARIABLE


PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
START, END = "<!-- drawn by tests/_settings_page.py: begin -->\n", "<!-- drawn: end -->\n"
_OTHERS = {
    **{name: f"magi-opschema: {meaning}" for name, meaning in _environment._VARIABLES.items()},
    "MAGI_SLOT_<base>": "magi-opschema, for the ATen surface: the number of the slot that calls of the operator prefer",
    DISABLE_VARIABLE: "magi-passes: names of passes that never run, separated by commas, or `all`",
}


def drawing() -> str:
    """The section of each setting, and the table of the variables of the other packages."""
    sections = [_section(name, described(name)) for name in field_names()]
    rows = [f"| `{name}` | {meaning} |" for name, meaning in _OTHERS.items()]
    table = "\n".join(("| variable | what it is |", "|---|---|", *rows))
    return "\n".join((*sections, "## Variables of the other packages\n", table, ""))


def _section(name: str, known: dict[str, str]) -> str:
    does = known["does"].replace("``", "`")
    return f"""### {name}

{does}

- option `"{known["option"]}"`, variable `{known["variable"]}`
- takes {known["takes"]}; by default `{known["default"]}`
- holds for {known["holds for"]}; torch {known["torch"]}
"""


def drawn(page: str) -> str:
    """*page* with the settings in their place."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{drawing()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
