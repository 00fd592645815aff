"""What does not fit is refused before it is allocated."""

import pytest

from draftc.runtime.errors import ResourceError
from draftc.runtime.memory import require_memory

GIB = 1 << 30


def test_too_little_memory_names_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftc.runtime.memory.available_memory", lambda: 3 * GIB)
    require_memory(3 * GIB)
    with pytest.raises(ResourceError, match=r"need 3\.5 GiB of memory, 3\.0 GiB is available"):
        require_memory(3 * GIB + GIB // 2)


def test_unknown_memory_is_not_a_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftc.runtime.memory.available_memory", lambda: None)
    require_memory(1 << 80)
