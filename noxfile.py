"""Each package's tests alone, then all of them together.

Plain `nox` runs lint, types, every package's unit tests, the end-to-end tests, and the smoke tests on built wheels.
`nox -l` lists the rest.
"""

from __future__ import annotations

import contextlib
import graphlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import nox


nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "unit", "e2e", "wheels"]

ROOT = Path(__file__).parent
# pyenv puts a shim for every interpreter on the path, and those that are not selected fail: select all of them.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
if PYENV.is_dir():
    os.environ.setdefault("PYENV_VERSION", ":".join(sorted(path.name for path in PYENV.glob("3.*"))[::-1]))
# By default, pip compiles every module of torch to bytecode in every environment. Without that, Python compiles those
# that are imported, and keeps the bytecode for the next process unless the second variable is set.
os.environ["PIP_COMPILE"] = "0"
# A graph that needs another attempt without our passes is an error in whatever a session runs.
os.environ["MAGI_COMPILE_STRICT"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

GROUPS = nox.project.load_toml("pyproject.toml")
PYTHON = "3.11"

# The unit tests compile kernels without vector instructions, whose headers take most of the time of g++ for a small
# kernel; Inductor's caches tell them from others. The end-to-end tests, `full` and `compat` compile what users run.
SCALAR = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
# One test process a processor, so one thread in each: two that share a core for OpenMP slow each other down.
PARALLEL = ("-n", "auto", "--dist", "worksteal")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# On a GPU every process has a context there, so their number does not follow the processors.
PARALLEL_ON_GPU = ("-n", "8", "--dist", "worksteal")

# torch release, with a suffix where it stands twice -> the interpreter its suites run under.
# torch 2.10 to 2.12 crash in torch.compile under Python 3.11.7 (create_cache_entry), and work under 3.12.
COMPAT = {
    "2.10.0": "3.12",
    "2.11.0": "3.12",
    "2.12.1": "3.12",
    "2.13.0": "3.11",
    "2.13.0-py3.13": "3.13",
    "2.15.0": "3.11",
}
# The interpreter of Triton 3.6, which torch 2.10 and 2.11 name, takes an array of one element for a number.
OLD_NUMPY = {"2.10.0": "numpy<2.4", "2.11.0": "numpy<2.4"}


def _project(package: str) -> dict[str, Any]:
    return nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]


def _requirement_names(package: str) -> set[str]:
    requirements = _project(package)["dependencies"]
    return {re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in requirements}


def _local_dependencies(package: str) -> list[str]:
    # In one order in each process: `_environment` compares what it installs with what it installed before.
    return sorted(name for name in _requirement_names(package) if (ROOT / "packages" / name).is_dir())


GRAPH = {path.name: _local_dependencies(path.name) for path in sorted((ROOT / "packages").iterdir()) if path.is_dir()}
PACKAGES = list(graphlib.TopologicalSorter(GRAPH).static_order())


def _extras(package: str) -> list[str]:
    """The optional dependencies of *package*; the tests of each are in the folder of its name."""
    return sorted(_project(package).get("optional-dependencies", {}))


def _closure(*packages: str) -> list[str]:
    """*packages* and every local package that they declare, dependencies first."""
    todo, seen = list(packages), set[str]()
    while todo:
        package = todo.pop()
        if package not in seen:
            seen.add(package)
            todo += GRAPH[package]
    return [package for package in PACKAGES if package in seen]


def _undeclared(package: str) -> list[str]:
    """The modules that are installed for other packages and other tests, which *package* must do without."""
    others = {name for each in PACKAGES for name in (each, *_requirement_names(each))}
    others |= {re.split(r"[=>\[]", name)[0] for name in _group("models", "frameworks", "timm")}
    declared = {name for each in _closure(package) for name in (each, *_requirement_names(each))}
    return sorted(name.replace("-", "_") for name in others - declared)


def _editables() -> list[str]:
    """All packages with their extras."""
    places = [f"packages/{package}[{','.join(_extras(package))}]" for package in PACKAGES]
    return [argument for place in places for argument in ("-e", place.removesuffix("[]"))]


def _group(*names: str) -> list[str]:
    return list(nox.project.dependency_groups(GROUPS, *names))


def _pins() -> list[str]:
    """The pinned torch, and the pinned Triton beside it, which a CPU build of torch does not name."""
    return _group("torch", "triton")


def _install_editable(session: nox.Session, *groups: str, torch: str | None = None) -> None:
    # Build isolation would install the build backend once for each package.
    session.install(*_group("editable"))
    pins = _pins() if torch is None else [f"torch=={torch}"]
    session.install("--no-build-isolation", *pins, *_editables(), *_group(*groups))


def _install_release(session: nox.Session, release: str) -> str:
    """Everything for the end-to-end tests with one of the releases of COMPAT; the version of torch."""
    torch = release.partition("-")[0]
    pinned = session.python == PYTHON and torch in _group("torch")[0]
    _install_editable(session, "test", "models", "frameworks", torch=None if pinned else torch)
    session.install("--no-deps", *_group("timm"))
    if torch in OLD_NUMPY:
        session.install(OLD_NUMPY[torch])
    return torch


def _inductor_cache(session: nox.Session) -> dict[str, str]:
    """A cache directory for each session: compiled kernels of two torch releases must not meet in one."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(Path(session.create_tmp()).absolute() / "inductor")}


def _run_tests(
    session: nox.Session,
    *arguments: str,
    marker: str = "not slow and not gpu",
    env: Mapping[str, str] = ONE_THREAD,
    success_codes: Sequence[int] = (0,),
    python: str = "python",
) -> None:
    command = ("-m", "pytest", *arguments, "-m", marker, *PARALLEL, *session.posargs)
    session.run(python, *command, env=env, success_codes=success_codes, external=python != "python")


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*_group("lint"))
    session.run("ruff", "check", ".")
    licences = ("check", "--preview", "--select", "CPY001", "--exclude", "*.pyi")
    session.run("ruff", *licences, "packages", "tests", "examples", "benchmarks")
    session.run("ruff", "format", "--check", ".")


def _everything(session: nox.Session) -> str:
    """The Python of one environment for several sessions: all packages, and what their tests and types need.

    `unit` hides what a package does not declare, and `wheels` installs each with nothing else.
    """
    declared = [requirement for package in PACKAGES for requirement in _foreign_requirements(package)]
    packages = [*_pins(), *declared, *_editables()]
    groups = _group("types", "bench", "models", "frameworks")
    # Build isolation would install the build backend once for each package.
    parts = (_group("editable"), ["--no-build-isolation", *packages, *groups], ["--no-deps", *_group("timm")])
    return _environment(session, ROOT / ".nox" / "everything", *parts)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the types of each package and its tests, then of everything outside the packages."""
    mypy = (_everything(session), "-m", "mypy")
    for package in PACKAGES:
        # What the suites share stands in tests/, as for pytest.
        places = (f"packages/{package}/src", f"packages/{package}/tests")
        session.run(*mypy, *places, env={"MYPYPATH": "tests"}, external=True)
    session.run(*mypy, "tests", "examples", "benchmarks", external=True)


@nox.session(venv_backend="none")
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def unit(session: nox.Session, package: str) -> None:
    """Run one package's tests with only what it declares; then those of its extras, which change torch's operators."""
    alone = {"MAGI_TESTS_ALONE": ",".join(_undeclared(package))}
    folders = [f"packages/{package}/tests/{extra}" for extra in _extras(package)]
    ignored = [f"--ignore={folder}" for folder in folders]
    for places in ([f"packages/{package}", *ignored], folders):
        if places:
            _run_tests(session, *places, env=ONE_THREAD | SCALAR | alone, python=_everything(session))


@nox.session(venv_backend="none")
def e2e(session: nox.Session) -> None:
    """Run the end-to-end tests with all four packages installed, but for those that `wheels` runs."""
    _run_tests(session, "tests", marker="not slow and not gpu and not smoke", python=_everything(session))


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Run every test that needs no GPU, the slow ones too."""
    compiled = ONE_THREAD | {"MAGI_TESTS_COMPILE_KERNELS": "1"}
    for place in (*(f"packages/{package}" for package in PACKAGES), "tests"):
        _run_tests(session, place, marker="not gpu", env=compiled, python=_everything(session))


@nox.session(python=PYTHON)
def wheels(session: nox.Session) -> None:
    """Build wheels and sdists, check them, and use them from an index: each alone, then all together."""
    work = Path(session.create_tmp()).resolve()
    dist, rebuilt, tools = work / "dist", work / "rebuilt", work / "tools"
    for folder in (dist, rebuilt):
        shutil.rmtree(folder, ignore_errors=True)
    session.install(*_group("build"))
    for package in PACKAGES:
        with session.chdir(ROOT / "packages" / package):
            session.run("hatchling", "build", "--directory", str(dist), silent=True)
    session.run("twine", "check", "--strict", *(str(file) for file in sorted(dist.iterdir())))
    sdists = [str(file) for file in sorted(dist.glob("*.tar.gz"))]
    pip_wheel = ("python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    session.run(*pip_wheel, "--wheel-dir", str(rebuilt), *sdists)
    for wheel in sorted(dist.glob("*.whl")):
        if _contents(wheel) != _contents(rebuilt / wheel.name):
            session.error(f"the sdist of {wheel.name} builds another wheel than the checkout")

    # What the packages declare and what runs a page, no more: a package that needs anything else fails here.
    foreign = [requirement for package in PACKAGES for requirement in _foreign_requirements(package)]
    python = _environment(session, work / "foreign", [*_pins(), *foreign, "markdown-it-py>=3"])
    install = (python, "-m", "pip", "install", "-q")
    session.run(python, "-m", "pip", "uninstall", "-q", "-y", *PACKAGES, external=True)  # of a run that failed
    with _index(work / "index", dist) as index:
        # This index alone, whatever pip's files and variables say: nothing else can satisfy a requirement on ours.
        ours = (*install, "--isolated", "--index-url", index)
        env = {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        for package in PACKAGES:
            session.run(*ours, package, env=env, external=True)
            session.run(python, "-c", _ARE_INSTALLED, *_closure(package), external=True)
            session.run(python, "tests/_pages.py", f"packages/{package}/README.md", external=True)
            if package != PACKAGES[-1]:
                session.run(python, "-m", "pip", "uninstall", "-q", "-y", *_closure(package), external=True)
    session.run(python, "tests/_pages.py", "README.md", external=True)
    # In a folder of its own, because the environment is used again.
    session.run(*install, "--upgrade", "--target", str(tools), *_group("test"), external=True)
    smoke = ("tests/test_smoke.py", "-m", "not gpu", *PARALLEL, *session.posargs)
    session.run(python, "-m", "pytest", *smoke, env=ONE_THREAD | {"PYTHONPATH": str(tools)}, external=True)


@contextlib.contextmanager
def _index(folder: Path, dist: Path) -> Iterator[str]:
    """The address of a package index on this machine with the files in *dist*; a list of a folder is a page of one."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in dist.iterdir():
        project = folder / file.name.partition("-")[0].replace("_", "-")
        project.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, project)
    command = (sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout
            yield server.stdout.readline().partition("(")[2].partition(")")[0]
        finally:
            server.terminate()


def _environment(session: nox.Session, folder: Path, *installs: list[str]) -> str:
    """The Python of an environment in *folder* that holds *installs* alone; made again when they change."""
    python, record = str(folder / "bin" / "python"), folder / "requirements"
    if not record.is_file() or record.read_text() != repr(installs):
        session.run(f"python{PYTHON}", "-m", "venv", "--clear", str(folder), external=True)
        for arguments in installs:
            session.run(python, "-m", "pip", "install", "-q", *arguments, external=True)
        record.write_text(repr(installs))
    return python


_ARE_INSTALLED = """
import sys
from importlib.metadata import distributions
installed = {d.name for d in distributions() if d.name.startswith("magi-")}
assert installed == set(sys.argv[1:]), installed
"""


def _foreign_requirements(package: str) -> list[str]:
    return [text for text in _project(package)["dependencies"] if not text.startswith(tuple(GRAPH))]


def _contents(wheel: Path) -> dict[str, bytes]:
    """The files of *wheel*; without RECORD, which only counts them."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Build the documents as a site in out/site; a warning is an error. `-- serve` shows them while they change."""
    session.install(*_group("docs"))
    command = session.posargs or ["build", "--strict"]
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(python=PYTHON)
def demo(session: nox.Session) -> None:
    """Train a small VAE, decode with it at two sizes, and print what the compiler did."""
    # A first use shows what pip does, in two parts, since the first is a large download.
    session.install(*_pins(), silent=False)
    session.install(*_pins(), *_editables(), *_group("demo"), silent=False)
    session.run("python", "examples/vae_decode.py", *session.posargs)


@nox.session(venv_backend="none")
def aten(session: nox.Session) -> None:
    """Run every operator of the generated ATen surface in every active slot."""
    # One thread a process: the harness forks one per processor.
    # The operators that prefer a slot differ from the others by a number; `nox -s full` checks them as well.
    tests = ["packages/magi-opschema/tests/aten/test_harness.py", "-k", "not preferred"]
    pytest = (_everything(session), "-m", "pytest")
    session.run(*pytest, *(session.posargs or tests), env={"OMP_NUM_THREADS": "1"}, external=True)


@nox.session(python=PYTHON)
def libraries(session: nox.Session) -> None:
    """Search six libraries of Triton kernels for their launches, run ops of theirs, and note the counts."""
    _install_editable(session, "test", "models")
    # Their own requirements name other releases of torch and Triton.
    session.install("--no-deps", *_group("libraries"))
    tests = ("libraries", "benchmarks")
    session.run("pytest", *(session.posargs or [f"tests/test_{name}.py" for name in tests]), env=ONE_THREAD)
    if not session.posargs:
        session.run("python", "docs/_libraries.py", env=ONE_THREAD)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Compare programs that hypothesis writes with eager, without a GPU; MAGI_FUZZ_PROGRAMS=50 runs 50 of each kind."""
    python = _everything(session)
    report = Path(session.create_tmp()).absolute() / "fuzz.xml"
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_fuzz_*.py"))
    _run_tests(session, *tests, f"--junitxml={report}", marker="slow", success_codes=(0, 1), python=python)
    suite = ET.parse(report).getroot()[0]
    counts: Counter[str] = Counter()
    for each in suite.iter("property"):
        counts[each.get("name", "")] += int(each.get("value", "0"))
    release = session.run(python, "-c", "import torch; print(torch.__version__)", silent=True, external=True)
    seconds = float(suite.get("time", "0"))
    session.log(f"torch {str(release).strip()}, {seconds:.0f} s")
    for name, count in counts.items():
        session.log(f"{count} {name}")
    if int(suite.get("failures", "0")) + int(suite.get("errors", "0")):
        session.error("some programs differ")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run benchmarks by name, for example `nox -s bench -- call_overhead`; all of them without a name."""
    scripts = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
    name, *arguments = session.posargs or [""]
    if name and name not in scripts:
        session.error(f"no benchmark {name!r}; there are: {', '.join(scripts)}")
    for script in [name] if name else scripts:
        session.run(_everything(session), f"benchmarks/{script}.py", *arguments, external=True)


@nox.session
@nox.parametrize(("python", "release"), [nox.param(python, name, id=name) for name, python in COMPAT.items()])
def compat(session: nox.Session, release: str) -> None:
    """Run every fast test on one torch release, `nox -s "compat(2.15.0)"`, and note the counts in the documents.

    Only the pinned release has a CPU build here; the others bring their CUDA packages, several GB each.
    """
    _install_release(session, release)
    places = {package: f"packages/{package}" for package in PACKAGES} | {"end-to-end": "tests"}
    reports = [Path(session.create_tmp()).absolute() / f"{suite}.xml" for suite in places]
    # A red suite stops neither the next one nor the count, unless something was asked for by posargs.
    success = [0, 5] if session.posargs else [0, 1]
    # The record is written after the suites: a row that is red or not there yet must not keep the next run red.
    not_yet = "--deselect=tests/test_published_results.py::test_every_session_has_a_complete_result_without_failures"
    for place, report in zip(places.values(), reports, strict=True):
        environment = ONE_THREAD | _inductor_cache(session)
        _run_tests(session, place, not_yet, f"--junitxml={report}", env=environment, success_codes=success)
    if not session.posargs:
        session.run("python", "docs/_compatibility.py", release, *map(str, reports))


@nox.session
@nox.parametrize(("python", "release"), [nox.param(python, name, id=name) for name, python in COMPAT.items()])
def card(session: nox.Session, release: str) -> None:
    """Compile all real classes for a GPU that is not there, `nox -s "card(2.11.0)"`, and print the counts."""
    torch = _install_release(session, release)
    report = Path(session.create_tmp()).absolute() / "card.xml"
    place = ("tests/test_card_classes.py", f"--junitxml={report}")
    _run_tests(session, *place, marker="not gpu", env=ONE_THREAD | _inductor_cache(session), success_codes=[0, 1])
    cases = list(ET.parse(report).iter("testcase"))
    notes = [each for case in cases for each in case if each.tag in {"failure", "error", "skipped"}]
    said = [each.get("message", "") for each in notes]
    # Each of these is how the test begins what it says.
    kinds = [f"{sum(kind in text for text in said)} {kind}" for kind in ("stock fails", "magi fails", "differs")]
    seconds = sum(float(case.get("time", 0)) for case in cases)
    session.log(f"torch {torch}: {len(cases)} classes, {', '.join(kinds)}, {seconds:.0f} s of processor time")
    if any(each.tag != "skipped" for each in notes):
        session.error("see above")


@nox.session(python=PYTHON)
def gpu_e2e(session: nox.Session) -> None:
    """Run the GPU tests; with --no-venv, in the environment that is already there."""
    if session.virtualenv.is_sandboxed:
        if shutil.which("nvidia-smi") is None:
            session.error(
                "gpu_e2e needs a machine with an NVIDIA GPU and its driver (nvidia-smi was not found), "
                "and a CUDA build of torch >= 2.10 with its Triton. "
                "Where nothing can be installed, run `nox --no-venv -s gpu_e2e` in an environment that has them."
            )
        torch = os.environ.get("MAGI_GPU_TORCH", "torch>=2.10")
        session.install(torch, *_editables(), *_group("test", "models"))
    # Some tests run again behind the suite, and each has to notice that every kernel stores zeros.
    _run_on_gpu(session, "packages", "tests", "-m", "gpu", *session.posargs)
    _run_on_gpu(session, "packages", "tests", "-m", "gpu and notices_broken_kernels", "--zero-kernels")


def _run_on_gpu(session: nox.Session, *arguments: str) -> None:
    python = "python" if session.virtualenv.is_sandboxed else sys.executable
    record = ("-p", "_gpu_record", "--gpu-record", "benchmarks/results/gpu_e2e.json")
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    session.run(
        *(python, "-m", "pytest", *record, *PARALLEL_ON_GPU, *arguments),
        external=not session.virtualenv.is_sandboxed,
        env={"PYTHONPATH": path},
    )
