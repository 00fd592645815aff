"""A captured model's weights can be freed: two copies of them must never be in memory at once."""

import gc
import weakref
from pathlib import Path

from draftc.export.capture import capture
from tests.export.tiny_models import tiny_model


def test_nothing_holds_the_weights_after_the_capture(tmp_path: Path) -> None:
    model = tiny_model("llama")
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    capture(model, max_length=64, max_width=8, path=tmp_path / "model.onnx")
    del model
    gc.collect()
    assert sum(weight() is not None for weight in weights) == 0
