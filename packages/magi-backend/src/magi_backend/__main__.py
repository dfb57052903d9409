# SPDX-License-Identifier: Apache-2.0
"""The command ``magi``, also ``python -m magi_backend``: what works here, the settings, and the report of a run."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import click


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def magi() -> None:
    """The torch.compile backend magi: what works here, its settings, and what a run compiled."""


@magi.command()
@click.option("--quick", is_flag=True, help="Compile nothing.")
@as_json
def doctor(quick: bool, as_json: bool) -> None:
    """Say what works here and what does not, each with the way out.

    Looks at the versions of Python, torch, Triton and these packages, the card and its driver, the C++ compiler, the
    caches and the settings in the environment, and compiles a small function on each device. The exit status is 1 if
    something fails.
    """
    from ._doctor import examine

    findings = []
    for one in examine(compiles=not quick):
        findings.append(one)
        if not as_json:
            colour = {"works": "green", "note": "yellow", "fails": "red"}[one.state]
            way_out = f" -> {one.way_out}" if one.way_out else ""
            click.echo(f"{click.style(f'{one.state:5}', fg=colour)}  {one.what:<16}  {one.found}{way_out}")
    works = all(one.state != "fails" for one in findings)
    if as_json:
        click.echo(json.dumps({"works": works, "findings": [asdict(one) for one in findings]}, indent=2))
    sys.exit(0 if works else 1)


@magi.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@as_json
def settings(names: tuple[str, ...], as_json: bool) -> None:
    """Print the settings with their values here and where each came from; all about each NAME."""
    from ._settings import CompileConfig, described, unread_variables
    from .errors import ConfigError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the last lines say it
            config = CompileConfig()
        values = dict(config.items())
        known = {name: described(name) for name in names or values}
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    found = {name: {"value": values[name], "from": config.origin(name), **about} for name, about in known.items()}
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif names:
        for name, about in found.items():
            click.echo(f"{name}\n" + "\n".join(f"  {what:<9}  {text}" for what, text in about.items()))
    else:
        click.echo(str(config))
    for key, near in unread_variables().items():
        click.echo(f"{key} is not read" + (f" (did you mean {near}?)" if near else ""), err=True)


@magi.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--html", is_flag=False, flag_value="", metavar="[FILE]", help="Write a page, to FOLDER/report.html.")
@click.option("--compare", type=click.Path(path_type=Path), metavar="OTHER", help="What changed from FOLDER to OTHER.")
@click.option("--width", type=int, default=120, show_default=True, help="Columns of the text.")
def report(folder: Path, html: str | None, compare: Path | None, width: int) -> None:
    """Print what a run compiled, from the FOLDER that MAGI_COMPILE_REPORT named."""
    from ._report.run import Comparison, RunReport, read_report
    from .errors import ReportError

    try:
        run = read_report(folder)
        shown: RunReport | Comparison = run.compared_with(read_report(compare)) if compare else run
    except ReportError as error:
        raise click.ClickException(str(error)) from error
    if html is None:
        click.echo(shown.to_text(width), nl=False)
        return
    file = Path(html) if html else folder / "report.html"
    file.write_text(shown.to_html())
    click.echo(file)


if __name__ == "__main__":
    magi(prog_name="magi")
