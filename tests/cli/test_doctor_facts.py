"""What the doctor reads of the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_worker.cli import doctor_facts

GIB = 1 << 30
CACHED = f"anon {GIB}\nfile {6 * GIB}\ninactive_file {4 * GIB}\nactive_file {GIB}\nshmem {GIB}\n"


@pytest.mark.parametrize(
    ("limit", "used", "stat", "available"),
    [
        ("max", str(7 * GIB), CACHED, 32 * GIB),  # the machine's
        (str(8 * GIB), str(GIB), "", 7 * GIB),
        (str(8 * GIB), str(7 * GIB), CACHED, 6 * GIB),  # a model that was read before takes none of it
        (str(8 * GIB), str(9 * GIB), "", 0),
        (str(64 * GIB), "0", "", 32 * GIB),
        (None, None, None, 32 * GIB),
    ],
)
def test_available_is_what_machine_and_container_have(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str | None,
    used: str | None,
    stat: str | None,
    available: int,
) -> None:
    for name, text in {"memory.max": limit, "memory.current": used, "memory.stat": stat}.items():
        if text is not None:
            (tmp_path / name).write_text(text)

    class Memory:
        available = 32 * GIB

    monkeypatch.setattr(doctor_facts, "CGROUP", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", Memory)
    assert doctor_facts.look_at_machine().available_bytes == available
