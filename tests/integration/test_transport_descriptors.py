"""Where file descriptors run out a transport says so in a sentence; UCX itself would end the process.

Each test runs in a process of its own, whose limit it lowers to what is open and a few more.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.nixl

BEGINNING = """
import logging, os, resource, sys
import pdkv
from pdkv.errors import TransportError
from pdkv.registry import find_transport
from pdkv.transfer.messages import EngineRef
from pdkv_connectors import descriptors

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
spec = pdkv.AttentionSpec(num_kv_heads=2, block_size=4, head_size=8, dtype="float32")
config = pdkv.KVCacheConfig.uniform(["layer"], spec, num_blocks=8, layout=pdkv.KVCacheLayout.LBNHC)
caches = [pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=4096)) for _ in range(2)]
for cache in caches:
    cache.commit(8)
if sys.argv[1] == "ucx":
    from pdkv_connectors.ucx.api import find_ucx
    find_ucx()
else:
    import nixl._api

def leave(number, hard=None):
    opened = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(opened)]  # no gaps below the limit
    limit = max(fillers) + 1 + number
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit if hard is None else hard))
    assert descriptors.spare() == number, (descriptors.spare(), number)
    return fillers

def make(number):
    return [find_transport(sys.argv[1])() for _ in range(number)]
"""

REGISTER = """
try:
    (transport,) = make(1)
    transport.register(caches[0], EngineRef("P", 1))
    transport.close()
except TransportError as error:
    print(error)
print("alive")
"""

CONNECT = """
made = make(2)
for transport, cache, name in zip(made, caches, "PD"):
    transport.register(cache, EngineRef(name, 1))
fillers = leave(NUMBER)
try:
    made[1].connect(EngineRef("P", 1), made[0].describe())
except TransportError as error:
    print(error)
for number in fillers:
    os.close(number)
made[1].connect(EngineRef("P", 1), made[0].describe())
print("alive")
for transport in made:
    transport.close()
"""


def run(transport: str, program: str) -> str:
    """What the program printed; it must end in order."""
    if transport == "ucx":
        pytest.importorskip("ucxx", reason="ucxx is not installed; make test installs it")
    ended = subprocess.run(
        [sys.executable, "-c", BEGINNING + program, transport], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, (ended.returncode, ended.stdout[-2000:], ended.stderr[-2000:])
    assert "alive" in ended.stdout
    return ended.stdout


@pytest.mark.parametrize("transport", ["nixl", "ucx"])
@pytest.mark.parametrize("number", [1, 6, 12, 40])
def test_a_transport_is_not_started_with_too_few_descriptors_left(transport: str, number: int) -> None:
    said = run(transport, f"leave({number})" + REGISTER)
    assert f"may take 64 file descriptors and {number} of" in said
    assert "raise the limit (`ulimit -n`, or LimitNOFILE= of the service) and start again." in said


@pytest.mark.parametrize("transport", ["nixl", "ucx"])
def test_the_soft_limit_is_raised_to_start_a_transport_and_that_is_logged(transport: str) -> None:
    said = run(transport, "leave(6, resource.getrlimit(resource.RLIMIT_NOFILE)[1])" + REGISTER)
    assert "The limit of open files of this process was raised from " in said
    assert "may take" not in said


@pytest.mark.parametrize("transport", ["nixl", "ucx"])
@pytest.mark.parametrize("number", [0, 2, 15])
def test_a_peer_is_not_met_with_too_few_descriptors_left_and_is_once_there_are_more(
    transport: str, number: int
) -> None:
    said = run(transport, CONNECT.replace("NUMBER", str(number)))
    assert f"may take 16 file descriptors and {number} of" in said


GUARDED = """
from pdkv_connectors.nixl.agent import make_agent
from pdkv_connectors.vllm.guard import GuardedAgent

agent, peer = GuardedAgent(make_agent("D", {}), caches[0]), make_agent("P", {})
fillers = leave(3)
try:
    agent.add_remote_agent(peer.get_agent_metadata())
except TransportError as error:
    print(error)
for number in fillers:
    os.close(number)
assert agent.add_remote_agent(peer.get_agent_metadata())
print("alive")
"""


def test_the_agent_of_vllms_own_worker_meets_no_peer_with_too_few_descriptors_left() -> None:
    assert "may take 16 file descriptors and 3 of" in run("nixl", GUARDED)
