"""scripts/prepare_peers.py without the peers: which folders it keeps, makes and refuses."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


class Prepare:
    """The script in a folder that has the files T.gguf and D.gguf; `made` are the folders that it filled."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        monkeypatch.chdir(root)
        monkeypatch.syspath_prepend(str(SCRIPTS))
        self.module: ModuleType = importlib.import_module("prepare_peers")
        self.capfd = capfd
        self.made: list[str] = []
        for name in ("write_folder", "export_openvino", "join"):
            monkeypatch.setattr(self.module, name, self._fill)
        for name in ("T", "D"):
            Path(f"{name}.gguf").write_text(f"the weights of {name}")

    def _fill(self, *where: Path, block: int = 0) -> None:
        folder = where[-1]
        (folder / "config.json").write_text("{}")
        self.made.append(folder.name.removesuffix(".part"))

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Exit code and stderr, which is one line."""
        code: int = self.module.main([*arguments, "--out", "peers"])
        errors = self.capfd.readouterr().err
        assert len(errors.splitlines()) == (1 if code else 0), errors
        return code, errors

    def folders(self) -> tuple[int, str]:
        return self("folders", "--target", "T.gguf", "--draft", "D.gguf")


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Prepare:
    return Prepare(tmp_path, monkeypatch, capfd)


def test_folders_say_what_they_were_made_from(prepare: Prepare) -> None:
    assert prepare.folders() == (0, "")
    assert prepare("openvino", "--blocks", "32") == (0, "")
    assert prepare.made == ["hf-target", "hf-draft", "openvino-g32-target", "openvino-g32-draft"]
    for folder in prepare.made:
        role, name = ("target", "T.gguf") if folder.endswith("target") else ("draft", "D.gguf")
        source = json.loads(Path("peers", folder, "source.json").read_text())[role]
        assert source["path"] == str(Path(name).resolve())
        assert source["size"] == Path(name).stat().st_size
        assert len(source["sha256"]) == 64


def test_what_is_there_stays_also_where_its_file_has_moved(prepare: Prepare) -> None:
    prepare.folders()
    Path("T.gguf").rename("elsewhere.gguf")
    assert prepare("folders", "--target", "elsewhere.gguf", "--draft", "D.gguf") == (0, "")
    assert prepare.made == ["hf-target", "hf-draft"]


def test_a_folder_of_another_file_is_refused_before_anything_is_made(prepare: Prepare) -> None:
    prepare.folders()
    Path("peers/hf-target").rename("aside")
    Path("D.gguf").write_text("the weights of E")  # of the same size
    code, error = prepare.folders()
    assert code == 2
    assert error.startswith("prepare_peers: peers/hf-draft was made from ")
    assert error.endswith("D.gguf now: remove it, or give another --out\n")
    assert prepare.made == ["hf-target", "hf-draft"], "nothing more"


def test_a_systems_folder_of_other_floats_is_refused(prepare: Prepare) -> None:
    prepare.folders()
    prepare("openvino", "--blocks", "32")
    for role in ("target", "draft"):
        Path(f"peers/hf-{role}").rename(f"hf-{role}")
    Path("D.gguf").write_text("other weights")
    prepare.folders()
    code, error = prepare("openvino", "--blocks", "128", "32")
    assert code == 2
    assert "peers/openvino-g32-draft was made from " in error
    assert not list(Path("peers").glob("openvino-g128-*")), "nor what comes before it"


@pytest.mark.parametrize("text", [None, "{", "[]", '{"target": {"path": "T.gguf"}}'])
def test_a_folder_that_does_not_say_is_refused(prepare: Prepare, text: str | None) -> None:
    Path("peers/hf-target").mkdir(parents=True)
    if text is not None:
        Path("peers/hf-target/source.json").write_text(text)
    code, error = prepare.folders()
    assert (code, prepare.made) == (2, [])
    said = "peers/hf-target does not say in a source.json what it was made from: remove it, and run this again"
    assert error == f"prepare_peers: {said}\n"


def test_a_builder_that_fails_is_one_line_and_leaves_no_folder(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.folders()
    builder = tmp_path / "fake" / "onnxruntime_genai" / "models"
    builder.mkdir(parents=True)
    (builder / "builder.py").write_text("import sys, pathlib\npathlib.Path(sys.argv[-4]).mkdir()\nsys.exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    code, error = prepare("genai", "--blocks", "32")
    assert code == 2
    assert error == "prepare_peers: -m onnxruntime_genai.models.builder ended with 3: see above what it printed\n"
    assert {path.name for path in Path("peers").iterdir()} <= {"hf-target", "hf-draft", "genai-b32-target.part"}


def test_a_pair_is_of_both(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare.folders()
    monkeypatch.setattr(prepare.module, "build_genai", prepare._fill)
    assert prepare("genai", "--blocks", "32") == (0, "")
    assert prepare.made[2:] == ["genai-b32-target", "genai-b32-draft", "genai-b32-pair"]
    assert set(json.loads(Path("peers/genai-b32-pair/source.json").read_text())) == {"target", "draft"}


def test_a_missing_file_is_one_line(prepare: Prepare) -> None:
    code, error = prepare("folders", "--target", "T.gguf", "--draft", "no-such.gguf")
    assert code == 2
    assert error == "prepare_peers: no-such.gguf: cannot be read (No such file or directory): name a .gguf file\n"
    assert not Path("peers").exists()


def test_the_first_step_comes_first(prepare: Prepare) -> None:
    assert prepare("genai") == (2, "prepare_peers: peers/hf-target is missing: run the step folders first\n")


def test_a_missing_package_is_one_line(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(source: Path, folder: Path) -> None:
        importlib.import_module("no_such_package")

    monkeypatch.setattr(prepare.module, "write_folder", lacking)
    code, error = prepare.folders()
    assert code == 2
    assert "No module named 'no_such_package': run this step where its packages are" in error
