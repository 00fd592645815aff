"""`draftc verify` on a backend with a loop of its own: the draws of that loop are tested, and a fault in them shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import draftc.runtime as draftc
from draftc.runtime.check_numerics import Difference
from draftc.runtime.check_sampling import SamplingDetails, check_sampling
from draftc.runtime.sampler import Sampler
from draftc.runtime.session import Session
from draftc.runtime.text import Tokenizer
from tests.runtime.tiny_engines import LENGTH, fake_gpu, write_bundles
from tests.runtime.tiny_model import TinyModel

DRAWS = 200


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, byte_level_folder: Path) -> Iterator[Session]:
    fake_gpu(monkeypatch, tmp_path / "cache")
    rows = Tokenizer.from_folder(byte_level_folder).vocab_size + 3
    models = TinyModel(LENGTH, rows), TinyModel(LENGTH, rows, noise=0.2)
    engines, _ = write_bundles(tmp_path, byte_level_folder, *models)
    with draftc.open(engines) as session:
        yield session


def sampling_part(session: Session) -> SamplingDetails:
    prompts = {"a": session.encode("the quick brown fox jumps over"), "b": session.encode("a lazy dog")}
    limit = Difference(rms=1e-3, spread=1e-2)
    return check_sampling(session, prompts, limit, budget_s=60, seed=0, draws=DRAWS, on_progress=lambda share: None)


def test_the_devices_own_draws_are_tested(device: Session) -> None:
    details = sampling_part(device)
    assert details.passed, details.verdict
    on_device = [case for case in details.cases if case.setting.endswith("on the device")]
    assert {case.method for case in on_device} == {"draft_model", "ngram"}
    assert all(case.draws >= DRAWS and case.g.dof > 0 for case in on_device)
    assert any(0 < case.accepted < case.proposed for case in on_device)


def test_a_device_that_draws_from_another_distribution_is_found(
    device: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a kernel took the fourth power of each uniform: greedy output and the host loop are as they should be."""
    drawn = Sampler.uniforms
    monkeypatch.setattr(Sampler, "uniforms", lambda self, count: drawn(self, count) ** 4)
    details = sampling_part(device)
    assert not details.passed
    assert all(case.passed or case.setting.endswith("on the device") for case in details.cases)
    assert "on the device: G p" in details.verdict
