"""Device memory: its limits."""

from pathlib import Path

import pytest

from folio.hardware import memory
from folio.hardware.memory import memory_bytes

# Limits


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_limit_of_a_container_is_the_memory_of_the_device(folder, name, monkeypatch):
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", str(folder))
    Path(name).parent.mkdir(exist_ok=True)
    for text, limited in (("max\n", False), ("5000\n", True)):
        Path(name).write_text(text)
        assert (memory_bytes("cpu") == 5000) == limited
