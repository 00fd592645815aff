"""What holds for the tree as a whole: who may import whom, what is public, what the documents must mention."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"draftc.runtime": "runtime", "draftc.export": "export", "draftc.export.recipes": "models"}
MODULES = {
    package if path.stem == "__init__" else f"{package}.{path.stem}": path
    for package, folder in PACKAGES.items()
    for path in sorted((ROOT / folder).glob("*.py"))
}
RUNTIME_MODULES = [name for name in MODULES if name.startswith("draftc.runtime")]
STDLIB_ONLY = ["draftc.runtime.errors", "draftc.runtime.graphio", "draftc.runtime.manifest"]  # and what they import
FORBIDDEN = ["torch", "transformers", "onnx", "onnx_ir", "onnxscript", "optimum", "draftc.export"]
COMMANDS = ["bench", "chat", "compile", "fetch", "inspect", "run", "verify"]
LINTER = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def run_python(code: str, cwd: Path, *args: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run `code` in a new interpreter with this environment's packages, `path` before them, and no other PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(module: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
    """(line, module, names) of every import statement, those inside functions included."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or ""), [alias.name for alias in node.names]


def definitions(module: ast.Module) -> set[str]:
    """Names of the functions and classes at the top level of a module."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in module.body if isinstance(node, kinds)}


def bound_names(module: ast.Module) -> set[str]:
    """Every name that a module binds at its top level, also under `if` and `try`."""
    bound = definitions(module)
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).split(".")[0])
    return bound


def declared_public(module: ast.Module) -> list[str] | None:
    """The value of `__all__`, or None where a module has none."""
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def tracked_files() -> list[Path]:
    """Every file that is, or is about to be, in the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git clone: which files belong to the repository is unknown")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


# Who may import whom


def test_import_contract_holds() -> None:
    result = run_python(LINTER, ROOT)
    assert result.returncode == 0, result.stdout
    assert "1 kept, 0 broken" in result.stdout


@pytest.mark.parametrize("statement", ["import torch", "from draftc.export import planted_target"])
def test_import_contract_sees_a_planted_import(tmp_path: Path, statement: str) -> None:
    """A contract over packages that the linter cannot find would hold whatever they import."""
    for package, folder in PACKAGES.items():
        target = tmp_path / package.replace(".", "/")
        shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "draftc/export/planted_target.py").touch()
    (tmp_path / "draftc/runtime/planted.py").write_text(f"def later() -> None:\n    {statement}\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    result = run_python(LINTER, tmp_path, path=tmp_path)
    assert result.returncode == 1, result.stdout
    assert "draftc.runtime.planted" in result.stdout


def test_runtime_imports_where_the_compiler_is_missing(tmp_path: Path) -> None:
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({FORBIDDEN!r}))\n"
        "for name in sys.argv[1:]: importlib.import_module(name)"
    )
    result = run_python(code, tmp_path, *RUNTIME_MODULES)
    assert result.returncode == 0, result.stderr


def test_importing_the_runtime_loads_no_backend(tmp_path: Path) -> None:
    code = f"import sys, draftc.runtime; print(*sorted(set(sys.modules) & {{*{FORBIDDEN!r}, 'onnxruntime'}}))"
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_shared_contract_is_stdlib_only() -> None:
    """Compiler, runtime and other people's tools read the contract; it must cost them nothing."""
    pending, visited, offenders = list(STDLIB_ONLY), set(STDLIB_ONLY), []
    while pending:
        name = pending.pop()
        for line, module, names in imports(parse(MODULES[name])):
            ours = {m for m in (module, *(f"{module}.{n}" for n in names)) if m in MODULES} - {"draftc.runtime"}
            if not ours and module.split(".")[0] not in sys.stdlib_module_names:
                offenders.append(f"{name}:{line}: {module}")
            pending += ours - visited
            visited |= ours
    assert offenders == []


def test_no_import_of_the_folders_as_top_level_packages() -> None:
    """From the repository root `import runtime` works too, and gives a second copy of every class."""
    python_files = [
        path for folder in ("runtime", "export", "models", "tests", "scripts") for path in (ROOT / folder).rglob("*.py")
    ]
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in python_files
        for line, module, _ in imports(parse(path))
        if module.split(".")[0] in PACKAGES.values()
    ]
    assert len(python_files) > len(MODULES)
    assert offenders == []


# What is public, and how large a file may grow


@pytest.mark.parametrize("name", MODULES)
def test_all_matches_what_the_module_defines(name: str) -> None:
    module = parse(MODULES[name])
    declared = declared_public(module)
    defined = definitions(module)
    if declared is None:
        assert not defined, f"{name} defines {sorted(defined)} and has no __all__"
        return
    assert len(declared) == len(set(declared))
    missing = {n for n in defined if not n.startswith("_")} - set(declared)
    assert not missing, f"{name} defines {sorted(missing)} without a leading underscore; add to __all__ or rename"
    if "__getattr__" not in defined:
        assert set(declared) <= bound_names(module), f"{name}.__all__ names what the module does not have"


def test_all_of_the_runtime_can_be_had(tmp_path: Path) -> None:
    """`from draftc.runtime import *` must succeed, names loaded on first use included."""
    result = run_python("from draftc.runtime import *; import draftc.runtime as d; d.__all__", tmp_path)
    assert result.returncode == 0, result.stderr


def test_only_public_names_cross_modules() -> None:
    offenders = []
    for name, path in MODULES.items():
        for line, module, names in imports(parse(path)):
            if module not in MODULES or module == name:
                continue
            public = set(declared_public(parse(MODULES[module])) or [])
            submodules = {n.rpartition(".")[2] for n in MODULES if n.rpartition(".")[0] == module}
            offenders += [f"{name}:{line}: {module}.{n}" for n in names if n not in public | submodules]
    assert offenders == []


def test_no_file_over_400_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("runtime", "export")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > 400} == {}


# Documents and tracked files


def installed_commands() -> dict[str, Any]:
    app = typer.Typer()
    for entry_point in importlib.metadata.entry_points(group="draftc.commands"):
        entry_point.load()(app)
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    return commands


def test_every_command_is_in_the_readme_and_explains_itself() -> None:
    commands = installed_commands()
    assert set(COMMANDS) <= set(commands)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, command in commands.items():
        assert re.search(rf"\bdraftc {re.escape(name)}\b", readme), f"README.md does not mention `draftc {name}`"
        assert command.help, f"`draftc {name} --help` says nothing"
        unexplained = [p.name for p in command.params if p.param_type_name == "option" and not getattr(p, "help", None)]
        assert unexplained == [], f"options of `draftc {name}` without help"


def test_the_options_in_documents_and_scripts_exist() -> None:
    """In every command line of the form "draftc COMMAND …", continued lines included."""
    commands = installed_commands()
    unknown, seen = [], 0
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "scripts" / "demo"):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ").replace('"$draftc"', "draftc")
        for name, rest in re.findall(rf"^ *draftc ({'|'.join(commands)})\b(.*)$", text, re.MULTILINE):
            known = {option for param in commands[name].params for option in (*param.opts, *param.secondary_opts)}
            used = re.findall(r"(?<=\s)(--?[a-z][a-z-]*)", rest.split("#")[0].split('"')[0])
            seen += len(used)
            unknown += [f"{path.name}: draftc {name} {option}" for option in used if option not in known]
    assert unknown == []
    assert seen > 10


def test_links_between_documents_resolve() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert broken == []


def test_no_registry_hosts_and_no_paths_of_one_machine() -> None:
    # In two halves, so that this file does not hold what it looks for.
    halves = [
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("download.py", "torch.org"),
        ("py", "pi.nvidia.com"),
        ("npm", "js.org"),
        ("deb", "ian.org"),
        ("/wo", "rk/"),
        ("../sha", "red/"),
        ("/opt/", "wheels"),
    ]
    pattern = re.compile("|".join(re.escape(a + b) for a, b in halves))
    offenders = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked_files()
        for match in [pattern.search(path.read_bytes().decode("utf-8", "replace"))]
        if match
    ]
    assert offenders == []


@pytest.mark.parametrize("script", ["scripts/check", "scripts/demo", "scripts/test", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK), f"chmod +x {script}"
    assert subprocess.run(["bash", "-n", str(ROOT / script)], check=False).returncode == 0
