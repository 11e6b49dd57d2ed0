"""What needs a GPU, in one go: tests of `tests/gpu` and benchmarks; what takes long or two cards by `--only`.

    python benchmarks/gpu_all.py [--json PATH] [--only driver,commit] [--list] [--logs FOLDER] [--deadline SECONDS]

Each step runs in a process of its own with a deadline; a step that fails or hangs does not stop the others. Prints a
table; `--json` writes it with the date, the command and the versions of everything that had a part. Exits with 1 if a
step failed, or was skipped where it should have run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _report import output_file, write_json

from pdkv.arguments import SECONDS

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Step:
    """One process to run.

    Attributes:
        name: what `--only` selects by.
        command: arguments after the Python interpreter.
        deadline_s: the process and its children are killed after so many seconds.
    """

    name: str
    command: tuple[str, ...]
    deadline_s: float


@dataclass
class Outcome:
    """What became of a step. `status` is passed, failed, skipped or timeout."""

    name: str
    status: str
    seconds: float
    summary: str
    records: list[dict[str, Any]] = field(default_factory=list)


def tests(name: str, files: str, deadline_s: float, *options: str) -> Step:
    """A step that runs files of `tests/gpu`, separated by spaces."""
    # Without the project's addopts: --strict-config refuses settings of plugins that a GPU machine may not have.
    flags = ("-o", "addopts=", "-q", "-rfEs", "-p", "no:cacheprovider")
    command = ("-m", "pytest", *flags, *(f"tests/gpu/{file}" for file in files.split()), *options)
    return Step(name, command, deadline_s)


#: Under eight minutes together (421 s on one H200, 2026-11-30).
STEPS = (
    tests("driver", "test_gpu_driver.py", 60),
    tests("invariants", "test_gpu_invariants.py", 120),
    # In one process: each takes less time than pytest and torch to start.
    tests("caches", "test_gpu_graphs.py test_gpu_preserve.py test_gpu_grow_live.py test_gpu_torch_allocator.py", 200),
    tests("given-back", "test_gpu_given_back.py", 90),
    tests("registration", "test_gpu_registration.py", 200, "-k", "not stale"),
    tests("stale", "test_gpu_registration.py", 120, "-k", "stale"),
    Step("commit", ("benchmarks/gpu_commit.py",), 90),
    tests("vllm-seams", "../integration/test_vllm_seams.py", 90),
    # Six at a time: engines spend most of their start importing. The last needs the card for itself.
    tests("vllm-pd", "test_vllm_pd.py", 240, "-k", "not leaves_free", "-n", "6"),
    tests("vllm-left-free", "test_vllm_pd.py", 180, "-k", "leaves_free"),
)
#: Run only where `--only` names them: together with the others they would take more than eight minutes. `vllm-tp2` and
#: the steps of cards need two cards. NIXL's wheel moves this memory by software emulation. `vllm-sleep` counts the free
#: memory of the card, so that nothing else may run beside it.
ON_REQUEST = (
    tests("ipc", "test_ipc_cuda.py", 240),
    Step("transfer", ("benchmarks/transfer.py", "--only", "cuda"), 150),
    Step("transfer-engine", ("benchmarks/transfer.py", "--only", "cuda-engine"), 240),
    Step("sleep", ("benchmarks/gpu_sleep.py",), 90),
    tests("vllm-sizing", "test_vllm_sizing.py", 420),
    tests("nixl", "test_gpu_transport.py", 300),
    tests("vllm-pdkv", "test_vllm_pdkv.py", 420),
    Step("transfer-nixl", ("benchmarks/transfer.py", "--only", "nixl-cuda-malloc,nixl-cuda", "--quick"), 150),
    tests("vllm-sleep", "test_vllm_sleep.py", 480),
    tests("vllm-tp2", "test_vllm_tp2.py", 300),
    tests("ipc-cards", "test_ipc_two_cards.py", 150),
    Step("transfer-cards", ("benchmarks/transfer.py", "--only", "cuda-cards"), 120),
)


def run(step: Step, logs: Path, time_left_s: float) -> Outcome:
    """Run one step to its end or its deadline; its output goes to a log, its records come back."""
    log, records = logs / f"{step.name}.log", logs / f"{step.name}.jsonl"
    records.write_text("")
    deadline_s = min(step.deadline_s, time_left_s)
    if deadline_s <= 0:
        return Outcome(step.name, "timeout", 0.0, "no time was left to start it")
    python_path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "connectors"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PDKV_GPU_RECORDS": str(records), "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_session(process)
    seconds = round(time.monotonic() - start, 1)
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    return Outcome(step.name, status_of(step, code, log), seconds, last_line(log), rows)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """End whatever of the step is still running: its children too."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def status_of(step: Step, code: int | None, log: Path) -> str:
    """From the exit status; a test run in which nothing ran does not count as passed."""
    if code is None:
        return "timeout"
    if code != 0:
        # pytest's status 5: no test was collected, as where a whole file is skipped.
        return "skipped" if code == 5 and "pytest" in step.command else "failed"
    return "skipped" if "pytest" in step.command and " passed" not in last_line(log) else "passed"


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else "no output"


def print_table(outcomes: list[Outcome]) -> None:
    """Steps, then every record, then the ends of the logs of what failed."""
    for outcome in outcomes:
        for record in outcome.records:
            shown = ", ".join(f"{key}={value}" for key, value in record.items() if key not in ("table", "test"))
            print(f"  [{record.get('table', outcome.name)}] {shown}")
    print(f"\n{'step':<14}{'status':<10}{'seconds':>8}  summary")
    for outcome in outcomes:
        print(f"{outcome.name:<14}{outcome.status:<10}{outcome.seconds:>8}  {outcome.summary[:100]}")


def selected(only: str | None) -> list[Step]:
    """The steps named in `only`, in their order here; STEPS without it."""
    if only is None:
        return list(STEPS)
    wanted = only.split(",")
    unknown = set(wanted) - {step.name for step in STEPS + ON_REQUEST}
    if unknown:
        sys.exit(f"gpu_all: there is no step {', '.join(sorted(unknown))}; --list names them all")
    return [step for step in STEPS + ON_REQUEST if step.name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output_file, help="write all results to this file")
    parser.add_argument("--only", help="steps to run, separated by commas")
    parser.add_argument("--list", action="store_true", help="list the steps and their deadlines, and stop")
    parser.add_argument("--logs", type=Path, help="keep each step's output in this folder")
    parser.add_argument("--deadline", type=SECONDS, default=480.0, help="seconds for all steps together")
    arguments = parser.parse_args()
    if arguments.list:
        for step in STEPS + ON_REQUEST:
            print(f"{step.name:<14}{step.deadline_s:>6.0f} s  {shlex.join(step.command)}")
        return 0
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="pdkv-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.deadline
    outcomes = []
    for step in selected(arguments.only):
        print(f"{step.name} ...", flush=True)
        outcomes.append(run(step, logs, end - time.monotonic()))
        if outcomes[-1].status in ("failed", "timeout"):
            print((logs / f"{step.name}.log").read_text(errors="replace")[-3000:], flush=True)
        if arguments.json:  # after every step, so that a run cut short leaves what it had
            settings = {"only": arguments.only, "deadline_s": arguments.deadline}
            write_json(arguments.json, "gpu_all", settings, {"steps": outcomes})
    print_table(outcomes)
    print(f"logs: {logs}")
    return 0 if all(outcome.status == "passed" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
