"""The distribution as a user gets it: what is in it, and that the runtime lives without the compiler's packages.

sdist and wheel are built offline from a copy of the sources, then the wheel is installed into an environment that has
nothing but the packages that `draftc[cpu]` declares (linked from this environment), so an undeclared import fails.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageMetadata
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "runtime": "draftc/runtime",
    "export": "draftc/export",
    "export/optimum_register": "optimum/commands/register",
    "models": "draftc/export/recipes",
}


def run(command: list[str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run `command` without the caller's PYTHONPATH and without colours."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FORCE_COLOR")}
    environment |= {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def applies(requirement: Requirement, extra: str, python: str | None = None) -> bool:
    """Whether a requirement counts when its owner is installed with `extra`, on another Python if one is given."""
    other = {"python_version": python, "python_full_version": f"{python}.0"} if python else {}
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra, **other})


def closure(requirements: Iterable[str], python: str | None = None) -> set[str]:
    """Canonical names of all that `requirements` bring, by the metadata of what is installed here."""
    found: set[str] = set()
    visited: set[tuple[str, str]] = set()
    pending = [(Requirement(text), "") for text in requirements]
    while pending:
        requirement, parent_extra = pending.pop()
        if not applies(requirement, parent_extra, python):
            continue
        name = canonicalize_name(requirement.name)
        found.add(name)
        for extra in ["", *requirement.extras]:
            if (name, extra) not in visited:
                visited.add((name, extra))
                try:
                    requires = importlib.metadata.requires(name)
                except importlib.metadata.PackageNotFoundError:
                    requires = []  # belongs to another Python or an extra that is not installed here
                pending += [(Requirement(text), extra) for text in requires or []]
    return found


def link_distribution(name: str, site_packages: Path) -> None:
    """Make an installed distribution importable from `site_packages` as well."""
    distribution = importlib.metadata.distribution(name)
    tops = {PurePosixPath(file).parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
    for top in tops:
        link = site_packages / top
        if not link.exists():
            link.symlink_to(Path(str(distribution.locate_file(top))))


@dataclass(frozen=True)
class Built:
    """The two archives and the wheel's metadata."""

    sdist: Path
    wheel: Path
    metadata: PackageMetadata

    def wheel_files(self) -> set[str]:
        """Paths in the wheel, without its own metadata folder."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name for name in archive.namelist() if ".dist-info/" not in name}


@dataclass(frozen=True)
class Lean:
    """An environment in which the wheel and the packages of `draftc[cpu]` are installed, and nothing else."""

    bin: Path
    home: Path

    def python(self, code: str) -> "subprocess.CompletedProcess[str]":
        """Run `code` in the environment."""
        return run([str(self.bin / "python"), "-c", code], self.home)

    def draftc(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """Run the installed command."""
        return run([str(self.bin / "draftc"), *args], self.home)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build in a copy: a build leaves folders behind, and would pick up those of an earlier one."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in {folder.split("/")[0] for folder in FOLDERS}:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("dist")
    # build makes the wheel out of the sdist, so that a file which only the sdist lacks shows as well.
    result = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)], source)
    assert result.returncode == 0, result.stdout + result.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = importlib.metadata.PathDistribution(zipfile.Path(archive, name.removesuffix("METADATA"))).metadata
    return Built(sdist, wheel, metadata)


@pytest.fixture(scope="module")
def lean(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    """The wheel in a new environment. It has no pip; this environment's pip installs into it."""
    home = tmp_path_factory.mktemp("lean")
    made = run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], home)
    assert made.returncode == 0, made.stderr
    python = str(home / "venv/bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(built.wheel)]
    installed = run(pip, home)
    assert installed.returncode == 0, installed.stderr
    (site_packages,) = (home / "venv/lib").glob("python*/site-packages")
    for name in closure(declared(built, "cpu")) - {"draftc"}:
        link_distribution(name, site_packages)
    return Lean(home / "venv/bin", home)


def installed_as(path: Path) -> str:
    """Where the wheel has a file of the tree."""
    folder = max((folder for folder in FOLDERS if path.is_relative_to(ROOT / folder)), key=len)
    return f"{FOLDERS[folder]}/{path.relative_to(ROOT / folder).as_posix()}"


def declared(built: Built, extra: str) -> list[str]:
    """The wheel's requirements with one extra (or "" for none), without their `extra` markers."""
    requirements = [Requirement(text) for text in built.metadata.get_all("Requires-Dist") or []]
    wanted = [requirement for requirement in requirements if applies(requirement, extra)]
    return [f"{r.name}[{','.join(sorted(r.extras))}]{r.specifier}" for r in wanted]


# What is in the archives


def test_wheel_has_every_file_of_the_tree_and_nothing_else(built: Built) -> None:
    """A package or data file that pyproject.toml forgets works in an editable install and is missing here."""
    expected = {
        installed_as(path)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if folder != "models" or path.suffix in (".py", ".toml")  # weights and notes beside the recipes stay here
    }
    assert built.wheel_files() == expected


def test_wheel_has_the_files_that_are_not_python(built: Built) -> None:
    files = built.wheel_files()
    assert {"draftc/runtime/py.typed", "draftc/export/py.typed", "draftc/runtime/bundle.schema.json"} <= files
    assert "draftc/export/recipes/smollm2-135m.toml" in files
    assert "draftc/__init__.py" not in files, (
        "draftc is a namespace: an __init__.py of one distribution hides the others"
    )


def test_archives_carry_the_licence(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    with zipfile.ZipFile(built.wheel) as archive:
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    assert built.metadata["License-Expression"] == "Apache-2.0"


# What an install brings


def test_no_extra_brings_two_onnx_runtimes(built: Built) -> None:
    """`onnxruntime` and `onnxruntime-gpu` overwrite each other's files."""
    runtimes = {"onnxruntime", "onnxruntime-gpu"}
    brought = {
        extra: {Requirement(text).name for text in declared(built, extra)} | closure(declared(built, extra))
        for extra in ["", *(built.metadata.get_all("Provides-Extra") or [])]
    }
    assert {extra: names & runtimes for extra, names in brought.items() if names & runtimes} == {
        "cpu": {"onnxruntime"},
        "gpu": {"onnxruntime-gpu"},
    }


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_constraints_pin_everything(built: Built, python: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") and "+" not in str(pin.specifier) for pin in pins)
    wanted = [text for extra in ("cpu", "export", "dev") for text in declared(built, extra)]
    linux_cuda = {name for name in closure(["torch"], python) if name.startswith(("nvidia-", "cuda-", "triton"))}
    unpinned = closure(wanted, python) - {canonicalize_name(pin.name) for pin in pins}
    assert unpinned - linux_cuda == set(), "torch pins its CUDA packages itself; these are pinned by nobody"


# The runtime without the compiler's packages


def test_runtime_imports_without_torch_and_loads_no_backend(lean: Lean) -> None:
    code = (
        "import importlib.util as u, sys, draftc.runtime as r\n"
        "print(u.find_spec('torch'), u.find_spec('onnxruntime') is not None, 'onnxruntime' in sys.modules)\n"
        "print(r.__file__)"
    )
    result = lean.python(code)
    assert result.returncode == 0, result.stderr
    found, file = result.stdout.splitlines()
    assert found == "None True False"
    assert Path(file).is_relative_to(lean.home)


def test_every_runtime_module_imports(lean: Lean) -> None:
    modules = [f"draftc.runtime.{path.stem}" for path in sorted((ROOT / "runtime").glob("[!_]*.py"))]
    result = lean.python(f"import importlib\nfor name in {modules!r}: importlib.import_module(name)")
    assert result.returncode == 0, result.stderr


def test_help_lists_the_commands(lean: Lean) -> None:
    result = lean.draftc("--help")
    assert result.returncode == 0, result.stderr
    for command in ("run", "chat", "verify", "bench", "inspect", "compile"):
        assert command in result.stdout.split()


def test_optimum_finds_the_plugin_of_the_wheel(built: Built, lean: Lean, tmp_path: Path) -> None:
    """Optimum lies elsewhere on the path, as one namespace with the wheel's module; torch is not there."""
    optimum = importlib.metadata.distribution("optimum").locate_file("optimum")
    (tmp_path / "optimum").symlink_to(Path(str(optimum)))
    result = lean.python(
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "sys.argv[1:] = ['export', 'draftc', '-m', 'model', '--draft', 'ngram', 'out']\n"
        "from optimum.commands.optimum_cli import main; main()"
    )
    assert result.returncode == 2, result.stdout + result.stderr
    (line,) = result.stderr.splitlines()
    assert re.search(r"^draftc: .* pip install ['\"]?draftc\[[\w,]*export\]", line)


@pytest.mark.parametrize(
    "command",
    [["compile", "--target", "model", "--draft", "ngram", "-o", "out"], ["compile", "--recipe", "smollm2-135m"]],
)
def test_compile_says_which_install_brings_it(built: Built, lean: Lean, command: list[str]) -> None:
    result = lean.draftc(*command)
    assert result.returncode == 2, result.stdout + result.stderr
    (extras,) = re.findall(r"pip install ['\"]?draftc\[([\w,-]+)\]", result.stderr)
    assert "export" in extras.split(",")
    assert set(extras.split(",")) <= set(built.metadata.get_all("Provides-Extra") or [])
    assert "Traceback" not in result.stderr
    assert not (lean.home / "out").exists()


def test_runtime_command_fails_by_the_bundle_not_by_an_import(lean: Lean) -> None:
    result = lean.draftc("inspect", "no-such-bundle")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "no-such-bundle" in result.stderr
    assert "Traceback" not in result.stderr
