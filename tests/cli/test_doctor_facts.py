"""What the doctor reads of the system."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_worker.cli import doctor_facts

GIB = 1 << 30
CACHED = f"anon {GIB}\nfile {6 * GIB}\ninactive_file {4 * GIB}\nactive_file {GIB}\nshmem {GIB}\n"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (("max", str(7 * GIB), CACHED), 32 * GIB),  # the machine's
        ((str(8 * GIB), str(GIB), ""), 7 * GIB),
        ((str(8 * GIB), str(7 * GIB), CACHED), 6 * GIB),  # a model that was read before takes none of it
        ((str(8 * GIB), str(9 * GIB), ""), 0),
        ((str(64 * GIB), "0", ""), 32 * GIB),
        ((), 32 * GIB),
    ],
)
def test_available_is_what_machine_and_container_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], available: int
) -> None:
    for name, text in zip(("memory.max", "memory.current", "memory.stat"), files, strict=False):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(doctor_facts, "CGROUP", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=32 * GIB))
    assert doctor_facts.look_at_machine().available_bytes == available


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        (
            "NVIDIA H200, 143771 MiB, 143156 MiB, 580.159.04\nA, B, 8 MiB, 1 MiB, 5",
            ("NVIDIA H200 (143771 MiB, 143156 MiB free, driver 580.159.04)", "A, B (8 MiB, 1 MiB free, driver 5)"),
        ),
        ("NVIDIA GB10, [N/A], [N/A], 580.95", ("NVIDIA GB10 ([N/A], [N/A] free, driver 580.95)",)),
        ("[GPU is lost]", ("[GPU is lost]",)),
        ("Failed to initialize NVML: Driver/library version mismatch", None),
    ],
)
def test_gpus_are_named_with_memory_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, gpus: tuple[str, ...] | None
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {18 * (gpus is None)}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor_facts.look_at_machine().gpus == gpus
