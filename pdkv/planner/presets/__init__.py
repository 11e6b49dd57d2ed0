"""Models and GPUs by name, from the data files beside this one. Each file says where its numbers come from."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError
from pdkv.planner.model_config import load_config

_HERE = Path(__file__).parent
_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's configuration and, where it is known, the bytes of its weights (all ranks together)."""

    name: str
    config: dict[str, Any]
    weights_bytes: int | None
    source: str


def model_names() -> tuple[str, ...]:
    """The models that there are presets of."""
    return tuple(sorted(file.stem for file in (_HERE / "models").glob("*.json")))


def gpu_names() -> tuple[str, ...]:
    """The GPUs that there are presets of."""
    return tuple(_gpus())


def find_model(name: str) -> ModelSource:
    """A preset by name, or a config.json by path (the file, or the folder of a model with its weights beside it).

    Raises:
        ConfigError: neither a preset nor a readable file. The message lists the presets.
    """
    if name.lower() in model_names():
        preset = json.loads((_HERE / "models" / f"{name.lower()}.json").read_text(encoding="utf-8"))
        return ModelSource(preset["name"], preset["config"], preset["weights_bytes"], preset["source"])
    path = Path(name)
    if not name or not _exists(path):
        raise ConfigError(f"{name!r} is neither a file nor a preset; presets are {', '.join(model_names())}")
    folder = path if path.is_dir() else path.parent
    label = folder.name if path.name == "config.json" or path.is_dir() else path.stem
    return ModelSource(label or str(path), load_config(path), _weights_in(folder), str(path))


def gpu_memory(name: str) -> int:
    """Bytes of a GPU given by preset or by size: ``h200``, ``141GiB``, ``80GB``.

    Raises:
        ConfigError: neither. The message lists the presets.
    """
    gpus = _gpus()
    if name.lower() in gpus:
        return int(gpus[name.lower()]["memory_bytes"])
    try:
        return parse_bytes(name)
    except ConfigError as error:
        raise ConfigError(f"{name!r} is neither a size nor a preset; presets are {', '.join(gpus)}") from error


def parse_bytes(text: str) -> int:
    """A size with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB; none means bytes) in bytes.

    Raises:
        ConfigError: it is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size in bytes; write 80GiB, 141GB, 512MiB or a number of bytes")
    nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if nbytes >= 2**63:
        raise ConfigError(f"{text!r} is more memory than any machine has")
    return nbytes


def _gpus() -> dict[str, dict[str, Any]]:
    gpus: dict[str, dict[str, Any]] = json.loads((_HERE / "gpus.json").read_text(encoding="utf-8"))
    return gpus


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file system takes
        return False


def _weights_in(folder: Path) -> int | None:
    """Bytes of the weights in a model's folder: what its index says, else the sum of its files; None without any."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            total = None  # the sum of the files says nearly the same
        if isinstance(total, int):
            return total
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


__all__ = ["ModelSource", "find_model", "gpu_memory", "gpu_names", "model_names", "parse_bytes"]
