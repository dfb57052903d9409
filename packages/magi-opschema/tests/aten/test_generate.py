# SPDX-License-Identifier: Apache-2.0
"""The surface as it is generated from the schemas of the installed torch, and the commands that show it."""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _python import python
from magi_opschema.aten._commands import main
from magi_opschema.aten._generate.emit import merge
from magi_opschema.aten._generate.schema import METADATA_FILE as FILE_NAME
from magi_opschema.aten._generate.schema import (
    SHIPPED,
    base_name,
    canonical_name,
    installed_schemas,
    read_allowlist,
    select_bases,
    verify,
)
from magi_opschema.aten._generate.surface import drift, generate, surface_files, write_folder
from magi_opschema.aten.errors import OutputError, VerificationError
from torchgen.model import FunctionSchema  # type: ignore[import-untyped]


GOLDEN = Path(__file__).parent / "golden"
STUBS = SHIPPED.parent / "_stubs"
JSON_SCHEMA = SHIPPED.with_name("torch_ops_metadata.schema.json")
GOLDEN_BASES = ["adaptive_avg_pool3d_backward", "add", "linalg_norm", "max", "softmax", "split_copy", "std", "sum"]
GOLDEN_BASES += ["zeros"]

golden_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="golden files show the schemas of torch 2.13"
)


def shipped_bases() -> list[Any]:
    return select_bases(read_allowlist(SHIPPED), installed_schemas(), SHIPPED)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, dict[str, str]], None]:
    """Compare files with those in a folder; `pytest --accept` writes them, and the diff is the review."""

    def compare(folder: Path, files: dict[str, str]) -> None:
        for name, text in files.items() if request.config.getoption("--accept") else ():
            (folder / name).write_text(text)
        assert {path.name: path.read_text() for path in folder.iterdir()} == files

    return compare


@golden_torch
def test_generated_sources_are_the_golden_ones(golden: Callable[[Path, dict[str, str]], None]) -> None:
    schemas = installed_schemas()
    files = surface_files([schemas.base(name) for name in GOLDEN_BASES], schemas)
    shown = {f"{name}.txt": text.replace(torch.__version__, "2.13.0") for name, text in files.items() if text}
    golden(GOLDEN, shown)


@golden_torch
def test_shipped_stubs_are_those_of_the_allowlist(golden: Callable[[Path, dict[str, str]], None]) -> None:
    golden(STUBS, {name: text for name, text in generate(SHIPPED).items() if name.endswith(".pyi")})


def test_the_shipped_allowlist_is_large_and_serves_every_supported_torch() -> None:
    # The names are checked against whichever torch is installed; `nox -s compat` runs this on all of them.
    bases = shipped_bases()
    overloads = [overload for base in bases for overload in base.overloads]

    assert len(bases) >= 525
    if torch.__version__.startswith("2.13."):
        outs = sum(overload.kind == "out" for overload in overloads)
        assert (len(bases), len(overloads), outs) == (598, 1552, 765)


@pytest.mark.parametrize(
    ("running", "names"),
    [
        ("2.10.0", ["add", "old"]),
        ("2.12.1+cu130", ["add", "old", "between"]),
        ("2.13.0a0+git1234", ["add", "old", "new", "between"]),
        ("2.14.1", ["add", "new"]),
        ("3.0.0", ["add", "new"]),
    ],
)
def test_an_entry_may_say_which_releases_have_it(
    running: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowlist = tmp_path / "ops.yaml"
    allowlist.write_text('- add\n- old: "<2.14"\n- new: ">=2.13"\n- between: ">=2.12, <2.14"\n')
    monkeypatch.setattr("importlib.metadata.version", lambda _: running)

    assert read_allowlist(allowlist) == names


def test_every_schema_agrees_with_the_dispatcher() -> None:
    schemas = installed_schemas()

    assert verify([schemas.base(name) for name in schemas.out_counts]) == sum(
        len(schemas.base(name).overloads) for name in schemas.out_counts
    )


def test_verification_finds_a_schema_that_differs() -> None:
    base = installed_schemas().base("add")
    variant = base.variants[0]
    assert variant.functional is not None
    for old, new, sentence in (
        ("alpha=1", "alpha=2", r"torchgen reads aten::add\.T.*alpha=2"),
        ("add.Tensor", "add.Nothing", r"aten::add\.Nothing is not registered"),
    ):
        schema = FunctionSchema.parse(variant.functional.schema.replace(old, new))
        wrong = replace(variant.functional, function=replace(variant.functional.function, func=schema))
        with pytest.raises(VerificationError, match=sentence):
            verify([replace(base, variants=(replace(variant, functional=wrong),))])


def test_nothing_is_hidden() -> None:
    """Each overload's every parameter is in the generated signature or forwarded by **options, and in the stub."""
    for base in shipped_bases():
        merged = merge(base)
        if merged is None:
            continue
        explicit = {p.name for p in merged.params}
        for parameter in (p for variant in base.variants for p in variant.params if p.name not in explicit):
            assert merged.takes_options, (base.name, parameter)
            assert parameter.name == parameter.argument.name


def test_generated_code_uses_no_builtin_that_an_operator_shadows() -> None:
    for name, text in generate(SHIPPED).items():
        if not name.endswith(".py") or name == "__init__.py":
            continue
        tree = ast.parse(text)
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        bodies = [statement for node in tree.body if isinstance(node, ast.FunctionDef) for statement in node.body]
        local = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        used = {
            n.id for body in bodies for n in ast.walk(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        assert not (used - local) & defined & set(dir(builtins)), name


def test_a_second_run_writes_the_same_bytes_and_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from magi_opschema.aten._commands import main; "
        "assert main(['aten', 'gen', '--out', sys.argv[1]]) == 0; sys.exit('torch' in sys.modules)"
    )
    for seed in ("1", "2"):
        python("-c", code, tmp_path / seed, env={"PYTHONHASHSEED": seed})
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()} for seed in ("1", "2"))
    assert first == second


def test_importing_the_package_loads_no_torch_and_generates_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, magi_opschema.aten as aten; from magi_opschema.aten import errors; "
        "assert not hasattr(aten, '__wrapped__'); import magi_opschema.aten.linalg; sys.exit('torch' in sys.modules)"
    )
    python("-c", code, env={"MAGI_OPSCHEMA_CACHE_DIR": str(tmp_path / "cache")})

    assert not (tmp_path / "cache").exists()


def test_check_finds_drift_and_a_second_run_leaves_no_stale_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowlist = tmp_path / "ops.yaml"
    allowlist.write_text("- add\n- linalg_norm\n")
    out = tmp_path / "out"
    arguments = ["aten", "gen", "--allowlist", str(allowlist), "--out", str(out)]

    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    (out / "linalg.py").write_text((out / "linalg.py").read_text() + "\n")
    (out / "extra.py").write_text("")
    (out / "coverage.md").unlink()
    capsys.readouterr()
    assert main([*arguments, "--check"]) == 1
    shown = capsys.readouterr().out
    for line in ("linalg.py: differs", "extra.py: not generated", "coverage.md: missing"):
        assert line in shown
    (out / "extra.py").unlink()
    allowlist.write_text("- add\n")
    assert main(arguments) == 0
    assert not (out / "linalg.py").exists()


BAD_ALLOWLISTS = [
    ("- sofmax\n", "no operator 'sofmax'; did you mean 'softmax'?"),
    ("- add.Tensor\n", "'add.Tensor' is one overload; name the base 'add', which brings all of them"),
    ("- view\n", "'view' has no overload that writes into out="),
    ("- add\n- add\n", "names add more than once"),
    ("add: 1\n", "must be a YAML list of base names such as '- softmax', not dict"),
    ("- on\n", "entry 1 is True, not a name"),
    ("- [add\n", "is not YAML"),
    (b"\xff\xfe\x00", "is not YAML"),
    ('- add: "~2.13"\n', "entry 1, 'add', has the releases '~2.13'; write them as '<2.14', '>=2.12' or '>=2.12,<2.14'"),
    ("- add\n- {sub: '<2.14', mul: '<2.14'}\n", "entry 2 is {'sub': '<2.14', 'mul': '<2.14'}, not a name"),
    (None, "cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("text", "sentence"), BAD_ALLOWLISTS, ids=range(len(BAD_ALLOWLISTS)))
def test_a_bad_allowlist_is_named(
    text: str | bytes | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowlist, out = tmp_path / "ops.yaml", tmp_path / "out"
    if text is not None:
        allowlist.write_bytes(text.encode() if isinstance(text, str) else text)

    assert main(["aten", "gen", "--allowlist", str(allowlist), "--out", str(out)]) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert str(allowlist) in shown
    assert not out.exists()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("sys.modules['yaml'] = None", "needs pyyaml: pip install 'magi-opschema[aten]'"),
        ("sys.modules['torchgen'] = None", "torchgen, torch's code generator, is not installed"),
        ("sys.modules['torchgen.gen'] = None", "torchgen.gen cannot be imported"),
        (
            "import magi_opschema.aten._generate.schema as t; t._SCHEMA_FILE = 'gone.yaml'",
            "has no gone.yaml, from which the schemas are read",
        ),
    ],
)
def test_missing_parts_are_named(code: str, sentence: str, tmp_path: Path) -> None:
    run = "from magi_opschema.aten._commands import main; assert main(['aten', 'gen', '--out', 'out']) == 2"

    assert sentence in python("-c", f"import sys; sys.stderr = sys.stdout; {code}; {run}", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


OLD = {FILE_NAME: "{}", "a.py": "# Generated by `magi-opschema aten gen`"}


@pytest.mark.parametrize("written", [{}, OLD])
def test_files_of_a_user_are_kept(written: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_folder(written, out)
    (out / "mine.py").write_text("x = 1")

    with pytest.raises(OutputError, match=r"holds files that this command did not write \(mine\.py\)"):
        write_folder({FILE_NAME: "{}"}, out)
    assert {path.name for path in out.iterdir()} == {*written, "mine.py"}


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for below, sentence in ((".", "is a file"), ("below", "cannot write the output folder")):
        with pytest.raises(OutputError, match=sentence):
            write_folder({"a.py": ""}, tmp_path / "out" / below)


@pytest.mark.parametrize(
    ("step", "name", "failure", "told"),
    [
        ("write_text", "b.py", OSError(28, "No space left on device"), OutputError),
        ("rename", "fresh", OSError(18, "Invalid cross-device link"), OutputError),
        ("rename", "fresh", KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["a full disk", "a failed swap", "an interrupt"],
)
def test_a_failure_leaves_the_old_files(
    step: str,
    name: str,
    failure: BaseException,
    told: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    write_folder(OLD, out)
    real = getattr(Path, step)

    def fails(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == name:
            raise failure
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, step, fails)
    with pytest.raises(told, match=getattr(failure, "strerror", None)):
        write_folder({"a.py": "new", "b.py": "new", FILE_NAME: "{}"}, out)
    monkeypatch.undo()

    assert drift(OLD, out) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_folder({FILE_NAME: "{}"}, tmp_path / "link")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / FILE_NAME).read_text() == "{}"


def test_names_go_both_ways() -> None:
    schemas = installed_schemas()
    names = {name: canonical_name(name) for name in schemas.out_counts}

    assert len(set(names.values())) == len(names)
    for base, canonical in names.items():
        assert base_name(canonical) == base
        assert all(part.isidentifier() and part not in {"def", "lambda"} for part in canonical.split("."))
    assert canonical_name("linalg_norm") == "linalg.norm"
    assert canonical_name("_softmax") == "internal.softmax"
    assert canonical_name("slots") == "slots_"
    assert base_name("slots_") == "slots"


def test_metadata_follows_its_json_schema() -> None:
    schema = json.loads(JSON_SCHEMA.read_text())
    document = json.loads(generate(SHIPPED)[FILE_NAME])

    _validate(document, schema, schema)
    assert {(op["aten_name"], op["overload"]) for op in document["ops"]} == {
        (base.name, overload.name) for base in shipped_bases() for overload in base.overloads
    }
    add = next(op for op in document["ops"] if (op["aten_name"], op["overload"]) == ("add", "out"))
    params = {p["name"]: (p["type"], p["default"], p["kwarg_only"], p["alias"]) for p in add["params"]}
    assert params["alpha"] == ("Scalar", "1", True, None)
    assert (*params["out"][:2], params["out"][3]) == ("Tensor", None, "a!")
    assert (add["pair"], add["slots"]) == ("Tensor", [8])
    del document["ops"][0]["params"]
    with pytest.raises(AssertionError):
        _validate(document, schema, schema)


_JSON = {"string": str, "boolean": bool, "null": type(None)}


def _validate(value: Any, schema: Any, root: Any) -> None:
    """The part of JSON Schema that the shipped schema uses."""
    match schema:
        case {"$ref": str(name)}:
            _validate(value, root["$defs"][name.removeprefix("#/$defs/")], root)
        case {"const": expected}:
            assert value == expected
        case {"enum": known}:
            assert value in known
        case {"type": "integer", "minimum": lowest, "maximum": highest}:
            assert lowest <= value <= highest
        case {"type": "array", "items": inner}:
            for item in value:
                _validate(item, inner, root)
        case {"type": "object", "required": names, "properties": properties}:
            assert set(names) == set(properties) == set(value)
            for name in names:
                _validate(value[name], properties[name], root)
        case {"type": kinds}:
            assert isinstance(value, tuple(_JSON[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)))


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=cwd, check=False, env=env
    )


def test_new_writes_a_kernel_per_overload_and_a_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aten", "new", "add", "--slot", "3", "--out", str(tmp_path / "kernels")]) == 0

    text = (tmp_path / "kernels" / "add_slot3.py").read_text()
    assert '@aten.register_slot("add.Tensor", 3' in text
    assert '@aten.register_slot("add.Scalar", 3' in text
    assert (
        "def add_Tensor(input: Tensor, other: Tensor, *, alpha: Scalar = 1, out: Tensor | None = None) -> Tensor:"
        in text
    )
    assert "Generator" not in text
    compile((tmp_path / "kernels" / "test_add_slot3.py").read_text(), "test", "exec")
    assert main(["aten", "new", "add", "--slot", "3", "--out", str(tmp_path / "kernels")]) == 2
    assert "add_slot3.py exists" in capsys.readouterr().err


def test_new_takes_an_overload_of_a_submodule(tmp_path: Path) -> None:
    assert main(["aten", "new", "linalg.norm.ord_str", "--slot", "3", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "linalg_norm_slot3.py").read_text()
    assert text.count("@aten.register_slot") == text.count('@aten.register_slot("linalg_norm.ord_str", 3') == 1
    assert (tmp_path / "test_linalg_norm_slot3.py").read_text().count("aten.linalg.norm(*args, **kwargs)") == 2


def test_new_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for op, slot, folder, sentence in (
        ("sofmax", "1", "", "no operator 'sofmax' that writes into out=; did you mean 'softmax'?"),
        ("add.Tensr", "1", "", "has no overload 'Tensr'; did you mean 'Tensor'?"),
        ("add", "8", "", "kernels go into slots 0 to 7"),
        ("add", "3", "file", f"cannot write {tmp_path / 'file'}"),
    ):
        assert main(["aten", "new", op, "--slot", slot, "--out", str(tmp_path / folder)]) == 2
        assert sentence in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "mine")]


def test_coverage_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aten", "coverage"]) == 0
    assert "# Coverage of the ATen surface" in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_kernel_goes_from_stub_to_tested(tmp_path: Path) -> None:
    assert main(["aten", "new", "relu", "--slot", "2", "--out", str(tmp_path)]) == 0
    stub = tmp_path / "relu_slot2.py"
    unfinished = run("aten_harness", "relu", "--slot", "2", "--kernels", stub.name, cwd=tmp_path)
    assert unfinished.returncode == 1
    assert "NotImplementedError" in unfinished.stdout

    stub.write_text(
        stub.read_text().replace(
            "    raise NotImplementedError",
            "    if out is not None:\n"
            "        aten.prepare_out(out, input.shape, input.dtype, input.device)\n"
            "        return out.copy_(input.clamp(min=0))\n"
            "    return input.clamp(min=0)",
        )
    )
    finished = run("aten_harness", "relu", "--slot", "2", "--kernels", stub.name, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert " 0 fail" in finished.stdout
    test = tmp_path / "test_relu_slot2.py"
    command = ("pytest", "-q", "-p", "no:cacheprovider", str(test))
    assert run(*command, cwd=tmp_path).returncode == 1
    test.write_text(test.read_text().replace("= []  #", "= [((torch.randn(3, 4),), {})]  #"))
    assert run(*command, cwd=tmp_path).returncode == 0
    for extra, sentence in (
        ((), "slot 3 of aten::relu has no kernel; active are 8"),
        (("--kernels", "gone.py"), "--kernels gone.py: no such file"),
    ):
        none = run("aten_harness", "relu", "--slot", "3", *extra, cwd=tmp_path)
        assert none.returncode == 2
        assert sentence in none.stderr


@pytest.mark.slow
def test_gap_lists_what_only_aten_covers(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import torch\n")
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from beside import torch\n"
        "assert sys.argv[1:] == ['--steps', '2']\n"
        "x = torch.randn(3, 4, requires_grad=True)\n"
        "torch.relu(x @ x.T).sum().backward()\n"
        "sys.exit(0)\n"
    )
    (tmp_path / "kernels.py").write_text(
        "from magi_opschema import aten\n"
        "@aten.register_slot('relu', 1)\n"
        "def relu(input):\n"
        "    return input.clamp(min=0)\n"
    )
    gap = ("magi_opschema.aten._commands", "aten", "gap")
    done = run(*gap, "--kernels", "kernels.py", "program.py", "--", "--steps", "2", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    only, covered, outside = done.stdout.split("a lower slot")[0], *done.stdout.split("a lower slot")[1].split("not on")
    assert "mm " in only
    assert "threshold_backward" in only
    assert "relu " in covered
    assert "relu " not in only
    assert "t " in outside
    missing = run(*gap, "nothing.py", cwd=tmp_path)
    assert missing.returncode == 2
    assert "nothing.py is not a file" in missing.stderr
