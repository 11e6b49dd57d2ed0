"""The ucx transport over real UCX: the contract between two processes, and what is UCX's own."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest
import torch
from transport_bench import between_processes

import pdkv
from pdkv.errors import ProtocolError, TransportError
from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_transport_check
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.geometry import ByteRange
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.metadata import Metadata
from pdkv.transfer.transport import TransferState

if importlib.util.find_spec("ucxx") is None:  # importing it here would change UCX's settings for all other tests
    pytest.skip("ucxx is not installed; make test installs it", allow_module_level=True)

from pdkv_connectors.ucx import api
from pdkv_connectors.ucx.memory import DIRECT_NBYTES, PACKED_NBYTES, Memory, parts_of
from pdkv_connectors.ucx.transport import UcxTransport, _Own
from pdkv_connectors.ucx.wire import Ask, arrays_of, body_nbytes

pytestmark = pytest.mark.cpu

FACTORY = "pdkv_connectors.ucx.transport:UcxTransport"
QUIET = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "fatal"}
OVER_TCP = ("moves_exactly_the_named_blocks", "unregister_is_a_fence", "close_ends_everything")
P, D = EngineRef("P", 1), EngineRef("D", 1)

bench = between_processes(FACTORY, QUIET)
tcp_bench = between_processes(FACTORY, {**QUIET, "UCX_TLS": "tcp"})


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_ucx_keeps_to_the_rule(bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, bench)


@pytest.mark.parametrize("rule", OVER_TCP)
def test_ucx_over_tcp_keeps_to_the_rule(tcp_bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, tcp_bench)


def cache_of(num_blocks: int, block_size: int = 16) -> pdkv.GrowableKVCache:
    """One layer whose blocks lie side by side; a block of 16 tokens takes 32 KiB."""
    spec = pdkv.AttentionSpec(num_kv_heads=2, block_size=block_size, head_size=128, dtype="float32")
    config = pdkv.KVCacheConfig.uniform(["layer"], spec, num_blocks=num_blocks, layout=pdkv.KVCacheLayout.LBNHC)
    cache = pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=4096))
    cache.commit(num_blocks, defragment=True)
    return cache


@pytest.fixture
def pair() -> Iterator[tuple[UcxTransport, UcxTransport]]:
    """P with known contents and D with zeros, 300 blocks each, both in this process; D is connected to P."""
    with cache_of(300) as source, cache_of(300) as destination:
        source.views()["layer"].copy_(torch.arange(300.0).view(-1, 1, 1, 1))
        transports = UcxTransport(), UcxTransport()
        try:
            transports[0].register(source, P)
            transports[1].register(destination, D)
            transports[1].connect(P, transports[0].describe())
            yield transports
        finally:
            for transport in transports:
                transport.close()


def blocks_of(transport: UcxTransport) -> list[float]:
    """What each block of the cache holds; all of its elements are equal."""
    assert transport.cache is not None
    view = transport.cache.views()["layer"]
    assert bool((view == view[:, :1, :1, :1]).all())
    return [float(value) for value in view[:, 0, 0, 0]]


@pytest.mark.parametrize("step", [1, 7], ids=["one long run", "scattered"])
def test_long_runs_and_many_short_ones_arrive_whole(pair: tuple[UcxTransport, UcxTransport], step: int) -> None:
    pairs = [BlockPair(0, block * step % 299, block) for block in range(1, 299)]
    assert pair[1].read(P, pairs).wait(30) is TransferState.DONE
    wanted = {destination: float(source) for _, source, destination in pairs}
    assert blocks_of(pair[1]) == [wanted.get(block, 0.0) for block in range(300)]


def test_a_write_is_done_when_every_byte_is_in_place(pair: tuple[UcxTransport, UcxTransport]) -> None:
    prefill, decode = pair
    prefill.connect(D, decode.describe())
    transfer = prefill.write(D, [BlockPair(0, block, 299 - block) for block in range(1, 200)])
    assert transfer.wait(30) is TransferState.DONE
    assert blocks_of(decode)[100:299] == [float(block) for block in range(199, 0, -1)]


def test_the_state_says_what_is_used_below(pair: tuple[UcxTransport, UcxTransport]) -> None:
    state = pair[1].describe_state()
    assert state["package"].startswith("ucxx ")
    assert int(state["ucx_version"].split(".")[0]) >= 1
    assert state["port"] > 0


def with_own(metadata: bytes, own: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(metadata, type=Metadata), own=own))


def test_who_does_not_know_the_token_is_not_served(pair: tuple[UcxTransport, UcxTransport]) -> None:
    prefill, decode = pair
    own = _Own("127.0.0.1", prefill.describe_state()["port"], bytes(32))
    decode.disconnect("P")
    with pytest.raises(TransportError):
        decode.connect(P, with_own(prefill.describe(), msgspec.msgpack.encode(own)), timeout_s=10)
    assert prefill.counts["strangers"] == 1
    decode.connect(P, prefill.describe())
    assert decode.read(P, [BlockPair(0, 5, 6)]).wait(30) is TransferState.DONE


def test_bytes_that_are_not_ucx_on_the_port_leave_the_others_alone(pair: tuple[UcxTransport, UcxTransport]) -> None:
    prefill, decode = pair
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 100_000):
        with (
            socket.create_connection(("127.0.0.1", prefill.describe_state()["port"]), timeout=20) as raw,
            suppress(ConnectionError),
        ):
            raw.sendall(noise)
    assert decode.read(P, [BlockPair(0, 5, 6)]).wait(30) is TransferState.DONE


def test_I5_a_peer_that_asks_for_bytes_outside_the_committed_prefix_is_refused(
    pair: tuple[UcxTransport, UcxTransport],
) -> None:
    prefill, decode = pair
    assert prefill.geometry is not None
    link = decode._connections.get(P).link
    beyond = max(extent.offset + extent.nbytes for extent in prefill.geometry.extents())
    offsets = np.array([beyond - 10], np.int64)
    nbytes = np.array([20], np.int64)
    for server, match in ((P, "not within one committed extent"), (EngineRef("P", 2), "this is")):
        ask = Ask(0, server, True, offsets.astype("<i8").tobytes(), nbytes.astype("<i8").tobytes())
        assert decode._memory is not None
        with pytest.raises(TransportError, match=match):
            decode._loop.run(link.transfer(ask, decode._memory, np.array([0], np.int64), nbytes), 20)
    assert prefill.counts["asks_refused"] == 2
    assert decode.read(P, [BlockPair(0, 5, 6)]).wait(30) is TransferState.DONE


def test_a_peer_that_is_killed_fails_its_transfers_and_not_the_engine(bench: TransportBench) -> None:
    script = (
        "import sys; sys.path[:0] = {path!r}\n"
        "from test_ucx_transport import cache_of, P\n"
        "from pdkv_connectors.ucx.transport import UcxTransport\n"
        "transport = UcxTransport(); cache = cache_of(300); transport.register(cache, P)\n"
        "print(transport.describe().hex(), flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script.format(path=sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        metadata = bytes.fromhex(process.stdout.readline())
        with cache_of(300) as cache:
            decode = UcxTransport()
            decode.register(cache, D)
            decode.connect(P, metadata, timeout_s=30)
            assert decode.read(P, [BlockPair(0, 1, 1)]).wait(30) is TransferState.DONE
            process.kill()
            process.wait(30)
            with suppress(TransportError):  # where it was noticed already
                transfer = decode.read(P, [BlockPair(0, block, block) for block in range(1, 300)])
                assert transfer.wait(30) is TransferState.FAILED
                assert transfer.reason
            decode.close()
    finally:
        process.kill()
        process.communicate()


def test_I9_an_interpreter_with_open_transports_exits_by_itself() -> None:
    script = (
        "import sys; sys.path[:0] = {path!r}\n"
        "from test_ucx_transport import cache_of, P, D\n"
        "from pdkv_connectors.ucx.transport import UcxTransport\n"
        "a, b, cache = UcxTransport(), UcxTransport(), cache_of(30)\n"
        "a.register(cache, P); b.register(cache, D); b.connect(P, a.describe()); print('up')\n"
    )
    command = [sys.executable, "-c", script.format(path=sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "up\n"), done.stderr


def test_messages_cover_each_copy_once_and_are_neither_too_small_nor_too_large() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        nbytes = generator.choice([1, 4096, 32_768, DIRECT_NBYTES - 1, DIRECT_NBYTES, 10 * 2**20], size=200)
        parts = list(parts_of(nbytes.astype(np.int64)))
        assert [index for part in parts for index in range(part.first, part.last)] == list(range(200))
        assert sum(part.nbytes for part in parts) == nbytes.sum()
        for part in parts:
            assert part.nbytes == nbytes[part.first : part.last].sum()
            assert part.nbytes <= PACKED_NBYTES if part.is_packed else part.last - part.first == 1


def test_what_a_peer_asks_for_is_checked_before_memory_is_touched() -> None:
    number = np.array([5], "<i8").tobytes()
    for offsets, nbytes in ((number, b""), (b"", b""), (number[:7], number[:7]), (number * 2, number)):
        with pytest.raises(ProtocolError):
            arrays_of(Ask(1, P, True, offsets, nbytes))
    for bad in (-1, 0, 2**62):
        with pytest.raises(ProtocolError, match="out of range"):
            arrays_of(Ask(1, P, True, number, np.array([bad], "<i8").tobytes()))
    with pytest.raises(ProtocolError):
        body_nbytes(b"PDKU\xff\xff\xff\xff", 4096)
    with pytest.raises(ProtocolError):
        body_nbytes(b"HTTP\x01\0\0\0", 4096)


def test_I6_ranges_that_cross_extents_are_refused() -> None:
    with cache_of(30) as cache:
        memory = Memory(cache, (ByteRange(0, 4096), ByteRange(4096, 4096)))
        memory.require_committed(np.array([0, 4096]), np.array([4096, 4096]))
        for offset, nbytes in ((4000, 200), (8000, 200), (8192, 1)):
            with pytest.raises(ProtocolError, match="1 range"):
                memory.require_committed(np.array([offset]), np.array([nbytes]))


def test_ucx_py_is_taken_where_only_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("ucp")
    monkeypatch.setitem(sys.modules, "ucp", old)
    assert api.find_ucx().__name__ == "ucxx"
    monkeypatch.setitem(sys.modules, "ucxx", None)
    assert api.find_ucx() is old
    monkeypatch.setitem(sys.modules, "ucp", None)
    with pytest.raises(TransportError, match=r"pip install pdkv\[ucx\]"):
        api.find_ucx()


def test_ucx_settings_of_ucxx_reach_neither_other_libraries_nor_child_processes() -> None:
    program = (
        "import os; before = dict(os.environ)\n"
        "from pdkv_connectors.ucx.transport import UcxTransport\n"
        "transport = UcxTransport()\n"
        "changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}\n"
        "print(sorted(changed)); transport.close()"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def at_exit(body: str) -> subprocess.CompletedProcess[str]:
    """A process whose last act, after UCX was stopped, is `body`; `a` reads from `b` in the moment it exits."""
    script = (
        "import atexit, os, sys, threading, time; sys.path[:0] = {path!r}\n"
        "def last():\n"
        "    begin = time.monotonic()\n"
        "{body}"
        "    print('took', round(time.monotonic() - begin, 2), flush=True)\n"
        "atexit.register(last)\n"  # before UCX's own, so that it is called after it
        "from test_ucx_transport import cache_of, BlockPair, P, D, TransferState, TransportError\n"
        "from pdkv_connectors.ucx.transport import UcxTransport\n"
        "a, b, cache = UcxTransport(), UcxTransport(), cache_of(3000)\n"
        "a.register(cache, P); b.register(cache, D); b.connect(P, a.describe())\n"
        "port = a.describe_state()['port']\n"
        "transfer = b.read(P, [BlockPair(0, 2 * n, 2 * n + 1) for n in range(1, 1400)])\n"
    ).format(path=sys.path, body="".join(f"    {line}\n" for line in body.splitlines()))
    return subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=120)


def test_I9_transports_that_are_closed_after_ucx_was_stopped_are_closed_at_once_and_leak_nothing() -> None:
    done = at_exit(
        "a.close(); b.close(); cache.close()\n"
        "print(transfer.poll().value, a.describe_state()['running'], b.describe_state()['registered'])\n"
        "listening = [line for line in open('/proc/net/tcp') if f':{port:04X} 00000000' in line]\n"
        "print(len(listening), [thread.name for thread in threading.enumerate()])\n"
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] in ("failed 0 False", "done 0 False"), done.stdout
    assert lines[1] == "0 ['MainThread']"
    assert float(lines[2].removeprefix("took ")) < 1.0
    assert "never awaited" not in done.stderr, done.stderr


def test_what_is_asked_of_ucx_after_it_was_stopped_is_refused_at_once() -> None:
    done = at_exit(
        "for ask in (UcxTransport, lambda: b.read(P, [BlockPair(0, 1, 2)]), lambda: b.connect(P, a.describe())):\n"
        "    try:\n"
        "        ask()\n"
        "    except TransportError as error:\n"
        "        print(error)\n"
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == 4, done.stdout
    assert all("UCX was stopped" in line or "is closed" in line for line in lines[:3]), lines
    assert float(lines[3].removeprefix("took ")) < 1.0
