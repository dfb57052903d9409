# SPDX-License-Identifier: Apache-2.0
"""Each page of the documents, and each example of a docstring, runs and prints what it shows; links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import _pages
import pytest
from _pages import read_page
from _python import python


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RUNNER = Path(__file__).parent / "_pages.py"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "packages").glob("*/README.md")),
]
# Pages that have a C++ compiler compile more than a few graphs. What they show has fast tests of its own.
COMPILES_MUCH = {"backend-cookbook.md", "ahead-of-time.md", "nvfp4.md", "diffusers.md", "transformers-trainer.md"}
MODULES = [path for path in sorted(ROOT.glob("packages/*/src/**/*.py")) if ">>>" in path.read_text()]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="session")  # under xdist the tests of other files may come between
def runner() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch, and runs pages in copies of itself."""
    command = [sys.executable, str(RUNNER), "--many"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def programs(pages: list[Path], word: str | None = None) -> list[Path]:
    """The pages with blocks, of which one has that word above it."""
    return [page for page in pages if any(word in {None, block.word} for block in read_page(page))]


@pytest.mark.parametrize("page", [page for page in programs(PAGES) if page.name not in COMPILES_MUCH], ids=name)
def test_page(page: Path, runner: subprocess.Popen[str]) -> None:
    assert runner.stdin is not None
    assert runner.stdout is not None

    print(page, file=runner.stdin, flush=True)
    done = json.loads(runner.stdout.readline())

    assert done["status"] == 0, done["said"]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name in COMPILES_MUCH], ids=name)
def test_slow_page(page: Path) -> None:
    python(RUNNER, page, cwd=ROOT)


@pytest.mark.gpu
@pytest.mark.parametrize("page", programs(PAGES, word="gpu"), ids=name)
def test_page_on_a_gpu(page: Path) -> None:
    python(RUNNER, page, "--gpu", cwd=ROOT)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_the_examples_of_docstrings_run(path: Path) -> None:
    """With the public names of the package and what the module imports."""
    module = ".".join(path.with_suffix("").relative_to(ROOT).parts[3:])
    package = importlib.import_module(module.partition(".")[0])
    public = {name: getattr(package, name) for name in package.__all__}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(importlib.import_module(module), extraglobs=public):
        runner.run(example, clear_globs=False)  # what Dynamo compiled forgets its names of them later
    assert (runner.failures, runner.tries > 0) == (0, True)


PAGE = """
<!-- setup
hidden = 2
-->
```python
x = 2
print(x)  # {promise}
print(x + 1)
```
{between}
```text
{shown}
```
"""


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        (PAGE.format(promise="3", between="", shown="2\n3"), ":7: prints"),
        (PAGE.format(promise="2", between="", shown="2\n4"), ":12: the page shows"),
        (PAGE.format(promise="2", between="<!-- not run: -->", shown=""), "needs a reason"),
        ("```python\n1 / 0\n```\n", ":2: .*ZeroDivisionError"),
        ("<!-- setup\nimport torch\n-->\n```python\ntorch.ones(1)\n```\n", ":5: only code that is not shown"),
        ("<!-- raises -->\n```python\n1 / 1\n```\n", "raises nothing"),
        ("<!-- gpu -->\n```python\n1 /\n```\n", "SyntaxError"),
        ("<!-- output -->\n```python\nx\n```\n", "output of nothing"),
        ("```sh\nrm x\n```\n", "is not a command of ours"),
        ("```sh\nmagi-opschema nonsense\n```\n", "ended with 2"),
        ("```\nanything\n```\n", "plain block that nothing checks"),
        ("    indented\n", "put it between fences"),
        ("<!-- gpu -->\nprose\n", "belongs to no block"),
        ("<!-- raises -->\n\nprose\n", "right above one"),
    ],
)
def test_the_runner_believes_nothing(
    page: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "page", sys)  # put back afterwards
    file = tmp_path / "page.md"
    file.write_text(page)

    assert _pages.main([str(file)]) == 1
    said = capsys.readouterr().err
    assert re.search(sentence, said, re.DOTALL), said


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of *page*, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[ ]", "-", word) for word in words}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "`", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if "://" in target:
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            lost.append(target)
        elif DOCS in page.parents and DOCS not in file.parents and file != DOCS:
            lost.append(f"{target}: not on the site; link to a page of it")

    assert lost == []


@pytest.mark.parametrize("package", ["magi_opschema", "magi_tritonwrap", "magi_passes", "magi_backend"])
def test_the_reference_has_every_public_name_and_errors_last(package: str) -> None:
    page = (DOCS / "reference" / f"{package.replace('_', '-')}.md").read_text()
    module = importlib.import_module(package)
    members = re.search(r"^      members:\n((?: {8}- \w+\n)+)", page, re.MULTILINE)
    assert members is not None
    names = re.findall(r"- (\w+)", members[1])

    are_errors = [name.endswith(("Error", "Warning")) for name in names]

    assert sorted(names) == sorted(module.__all__)
    assert are_errors == sorted(are_errors)
    assert inspect.isroutine(getattr(module, names[0])) or names[0] == "MagiInductorPass"
