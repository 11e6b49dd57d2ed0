"""Who may reach a side channel: loopback or keys, an allow-list that can change, and names that cannot be taken."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from sidechannel_net import done, exchange, hello, meet, receive, stranger, until, write_peers
from transfer_pair import ManualClock

from pdkv.errors import ConfigError
from pdkv.transfer.messages import EngineRef, FailCode, Refuse, encode
from pdkv.transfer.sidechannel import (
    Address,
    KeyPair,
    Limits,
    PeerEntry,
    PeersFile,
    SideChannel,
    SideChannelSettings,
    StaticPeers,
    write_key_pair,
)
from pdkv.transfer.sidechannel.hello import Accepted, Declined, decode_hello
from pdkv.transfer.sidechannel.peers import read_peers

pytestmark = pytest.mark.cpu

FAST = Limits(refresh_every_s=0.01, introduce_every_s=0.05)
NOT_LOOPBACK = ["0.0.0.0:0", "10.0.0.5:5600", "[::]:0", "[2001:db8::1]:5600", "example.org:5600"]


@pytest.fixture
def keys() -> dict[str, KeyPair]:
    return {name: KeyPair.generate() for name in ("prefill", "decode", "other")}


def secured(keys: KeyPair, *peers: PeerEntry, bind: bool = True) -> SideChannelSettings:
    address = Address("127.0.0.1", 0) if bind else None
    return SideChannelSettings(bind=address, keys=keys, peers=StaticPeers(peers), limits=FAST)


def test_engines_with_each_others_keys_speak(keys: dict[str, KeyPair]) -> None:
    with SideChannel("P/1", secured(keys["prefill"], PeerEntry("d", keys["decode"].public))) as prefill:
        peer = PeerEntry("p", keys["prefill"].public, prefill.address)
        with SideChannel("D/1", secured(keys["decode"], peer, bind=False)) as decode:
            meet(prefill, decode)
            exchange(decode, prefill, 1)
            assert decode.describe_state()["secured"] is True


def test_a_key_that_is_not_on_the_list_is_refused_and_counted_and_others_go_on(keys: dict[str, KeyPair]) -> None:
    with SideChannel("P/1", secured(keys["prefill"], PeerEntry("d", keys["decode"].public))) as prefill:
        peer = PeerEntry("p", keys["prefill"].public, prefill.address)
        with (
            SideChannel("D/1", secured(keys["decode"], peer, bind=False)) as decode,
            SideChannel("X/1", secured(keys["other"], peer, bind=False)) as stranger,
        ):
            meet(prefill, decode)
            until(lambda: prefill.counters["refused_keys"] > 0 and stranger.counters["handshakes_failed"] > 0)
            assert not stranger.wait_for_peer("P/1", 0)
            assert "compare the keys" in str(stranger.describe_state()["hosts"])
            exchange(decode, prefill, 1)


def test_a_peer_without_keys_and_one_that_expects_another_key_do_not_get_in(keys: dict[str, KeyPair]) -> None:
    with SideChannel("P/1", secured(keys["prefill"], PeerEntry("d", keys["decode"].public))) as prefill:
        server = keys["prefill"].public
        entry = PeerEntry("p", server, prefill.address)
        with (
            stranger(prefill.address) as plain,
            stranger(prefill.address, keys["decode"], keys["other"].public) as lost,
            SideChannel("D/1", secured(keys["decode"], entry, bind=False)) as decode,
        ):
            for number, peer in enumerate((plain, lost)):
                with suppress(zmq.Again):  # there is no connection already
                    peer.send(hello(f"X/{number}"), zmq.NOBLOCK)
            meet(prefill, decode)
            exchange(decode, prefill, 1)
            assert prefill.describe_state()["guests"] == ["D/1"]


def test_a_key_that_is_added_or_removed_counts_without_a_restart(tmp_path: Path, keys: dict[str, KeyPair]) -> None:
    peers = write_peers(tmp_path / "peers")
    settings = SideChannelSettings(keys=keys["prefill"], peers=PeersFile(peers), limits=FAST)
    with SideChannel("P/1", settings) as prefill:
        peer = PeerEntry("p", keys["prefill"].public, prefill.address)
        with SideChannel("D/1", secured(keys["decode"], peer, bind=False)) as decode:
            until(lambda: prefill.counters["refused_keys"] > 0)
            write_peers(peers, PeerEntry("d", keys["decode"].public))
            meet(prefill, decode)
            exchange(decode, prefill, 1)
            write_peers(peers, PeerEntry("x", keys["other"].public))
            until(lambda: prefill.describe_state()["guests"] == [])
            decode.send(done("D/1", "P/1", 2))
            until(lambda: decode.counters["declined_by_peer"] > 0)
            assert prefill.receive() == ()


def test_an_address_that_is_added_is_connected_to_and_one_that_is_removed_is_not_any_more(tmp_path: Path) -> None:
    peers = write_peers(tmp_path / "peers")
    settings = SideChannelSettings(bind=None, peers=PeersFile(peers), limits=FAST)
    with SideChannel("D/1", settings) as decode, SideChannel("P/1") as prefill:
        write_peers(peers, PeerEntry("p", None, prefill.address))
        meet(prefill, decode)
        exchange(decode, prefill, 1)
        write_peers(peers)
        until(lambda: decode.describe_state()["hosts"] == {})
        decode.send(done("D/1", "P/1"))
        until(lambda: decode.counters["unroutable"] == 1)


def test_a_peers_file_that_became_unreadable_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = PeersFile(write_peers(tmp_path / "peers", PeerEntry("p", None, Address("127.0.0.1", 5))))
    before = book.entries()
    (tmp_path / "peers").write_text("what is this\n")
    assert book.entries() == before
    (tmp_path / "peers").unlink()
    assert book.entries() == before
    assert caplog.text.count("The peers stay as they were") == 2


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("abc name", ":1: a key is 64 hex digits, and 3 characters"),
        ("- name 127.0.0.1", "side channel address"),
        ("- one two three", ":1 has 4 words"),
        ("-", ":1 has 1 words"),
    ],
)
def test_a_bad_line_of_a_peers_file_is_named(tmp_path: Path, line: str, match: str) -> None:
    (tmp_path / "peers").write_text(line + "\n")
    with pytest.raises(ConfigError, match=match):
        PeersFile(tmp_path / "peers")


def test_comments_and_empty_lines_of_a_peers_file_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "peers").write_text("# peers\n\n  \n- p [::1]:7\n")
    assert read_peers(tmp_path / "peers") == (PeerEntry("p", None, Address("::1", 7)),)


@pytest.mark.parametrize("address", NOT_LOOPBACK)
def test_without_keys_an_address_that_others_reach_is_refused_in_one_sentence(address: str) -> None:
    with pytest.raises(ConfigError, match=r"python -m pdkv.keys make FILE.*--insecure-side-channel\.$") as refused:
        SideChannel("P/1", SideChannelSettings(bind=Address.parse(address)))
    assert str(refused.value).count(". ") == 0
    if not address.endswith(":0"):
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            SideChannel("D/1", SideChannelSettings(bind=None, peers=StaticPeers.at([address])))


def test_without_keys_an_address_of_a_registry_that_others_reach_is_not_connected_to(tmp_path: Path) -> None:
    peers = write_peers(tmp_path / "peers")
    with SideChannel("D/1", SideChannelSettings(bind=None, peers=PeersFile(peers), limits=FAST)) as decode:
        write_peers(peers, PeerEntry("far", None, Address("192.0.2.1", 5600)))
        until(lambda: decode.counters["unsafe_peers"] > 0)
        assert decode.describe_state()["hosts"] == {}


def test_with_keys_a_peer_without_one_is_not_connected_to(keys: dict[str, KeyPair]) -> None:
    with pytest.raises(ConfigError, match=r"peer p at 127\.0\.0\.1:5 has no public key"):
        SideChannel("D/1", secured(keys["decode"], PeerEntry("p", None, Address("127.0.0.1", 5))))


def test_an_insecure_channel_says_so_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    settings = SideChannelSettings(bind=Address("0.0.0.0", 0), insecure=True, limits=FAST)
    with caplog.at_level(logging.WARNING), SideChannel("P/1", settings, clock=clock) as channel:
        until(lambda: channel.counters["insecure_warnings"] == 1)
        for minute in range(2, 5):
            clock.now += 60
            channel.send(done("P/1", "D/1"))  # wakes the thread up
            until(lambda minute=minute: channel.counters["insecure_warnings"] == minute)  # type: ignore[misc]
        assert caplog.text.count("has no keys (--insecure-side-channel)") == 4


def test_a_message_in_the_name_of_another_engine_is_dropped() -> None:
    with SideChannel("P/1") as prefill, stranger(prefill.address) as peer:
        peer.send(hello("X/1"))
        assert isinstance(decode_hello(peer.recv()), Accepted)
        peer.send(encode(done("D/1", "P/1", 1)))
        peer.send(encode(done("X/1", "P/1", 2)))
        assert [message.sender.engine_id for message in receive(prefill)] == ["X/1"]
        assert prefill.counters["malformed"] == 1


def test_with_keys_an_engine_id_belongs_to_the_key_that_came_with_it_first(keys: dict[str, KeyPair]) -> None:
    allowed = [PeerEntry(name, keys[name].public) for name in ("decode", "other")]
    with SideChannel("P/1", secured(keys["prefill"], *allowed)) as prefill:
        server = keys["prefill"].public
        with (
            stranger(prefill.address, keys["decode"], server) as first,
            stranger(prefill.address, keys["other"], server) as second,
        ):
            first.send(hello("D/1"))
            assert isinstance(decode_hello(first.recv()), Accepted)
            second.send(hello("D/1"))
            answer = decode_hello(second.recv())
            assert isinstance(answer, Declined)
            assert "'D/1' belongs to another engine" in answer.reason


def test_nobody_takes_the_engine_id_of_the_channel_itself() -> None:
    with SideChannel("P/1") as prefill, stranger(prefill.address) as peer:
        peer.send(hello("P/1"))
        assert isinstance(decode_hello(peer.recv()), Declined)


@pytest.mark.parametrize(
    "text",
    ["", "localhost", ":5", "::1:5", "[::1]", "1.2.3.4:65536", "a b:1", "x:-1", "tcp://:1", "[x:1", "ä:1", "*:1"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="side channel address"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [("127.0.0.1:0", True), ("127.8.0.1:1", True), ("[::1]:65535", True), ("tcp://localhost:80", True)]
    + [(text, False) for text in NOT_LOOPBACK],
)
def test_addresses_are_read_and_written_alike(text: str, loopback: bool) -> None:
    address = Address.parse(text)
    assert str(address) == text.removeprefix("tcp://")
    assert address.is_loopback is loopback


def test_settings_come_from_text(tmp_path: Path) -> None:
    settings = SideChannelSettings.from_values(peers="127.0.0.1:5, [::1]:6")
    assert [str(entry.address) for entry in settings.peers.entries()] == ["127.0.0.1:5", "[::1]:6"]
    assert str(settings.bind) == "127.0.0.1:0"
    keys = write_key_pair(tmp_path / "p.key")
    assert SideChannelSettings.from_values(bind="", key_file=str(tmp_path / "p.key")).keys == keys
    with pytest.raises(ConfigError, match="give one of them"):
        SideChannelSettings.from_values(peers="127.0.0.1:5", peers_file=str(tmp_path / "p"))


def test_only_who_answers_at_an_engines_address_can_say_that_it_has_gone() -> None:
    def refuse(sender: str, meant: str) -> bytes:
        me, of = EngineRef(sender, 1), EngineRef(meant, 1)
        return encode(
            Refuse(sender=me, receiver=EngineRef("P/1", 1), meant=of, code=FailCode.WRONG_ENGINE, reason="gone")
        )

    with SideChannel("P/1") as prefill, stranger(prefill.address) as peer:
        peer.send(hello("X/1"))
        peer.recv()
        peer.send(refuse("X/1", "D/1"))
        peer.send(refuse("X/1", "X/1"))
        (message,) = receive(prefill)
        assert isinstance(message, Refuse)
        assert message.meant.engine_id == "X/1"
        assert prefill.counters["malformed"] == 1
