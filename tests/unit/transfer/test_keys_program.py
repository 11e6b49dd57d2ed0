"""``python -m pdkv.keys``: pairs of keys in private files, and peers files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.keys.cli import main
from pdkv.transfer.sidechannel import KeyPair, read_key_pair, write_key_pair
from pdkv.transfer.sidechannel.peers import read_peers

pytestmark = pytest.mark.cpu


def test_a_pair_is_made_private_and_read_back(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        command = [sys.executable, "-m", "pdkv.keys", "make", str(tmp_path / "p.key")]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    finally:
        os.umask(old)
    keys = read_key_pair(tmp_path / "p.key")
    assert keys.public.hex() in output
    assert keys.secret.hex() not in output + repr(keys)
    assert stat.S_IMODE((tmp_path / "p.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "p.key.pub").stat().st_mode) == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.key", "p.key.pub"]


def test_show_prints_the_public_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = write_key_pair(tmp_path / "p.key")
    assert main(["show", str(tmp_path / "p.key")]) == 0
    assert capsys.readouterr().out.strip() == keys.public.hex()


@pytest.mark.parametrize("existing", ["p.key", "p.key.pub"])
def test_nothing_is_overwritten_and_nothing_is_left_half_done(
    tmp_path: Path, existing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / existing).write_text("mine")
    assert main(["make", str(tmp_path / "p.key")]) == 2
    assert f"{tmp_path / existing} exists; keys are never overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "mine"


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make", str(tmp_path / "no" / "p.key")]) == 2
    assert "cannot write a key" in capsys.readouterr().err


def test_a_secret_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    write_key_pair(tmp_path / "p.key")
    (tmp_path / "p.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640.*chmod 600"):
        read_key_pair(tmp_path / "p.key")


def test_damaged_and_mixed_up_pairs_are_refused_without_showing_them(tmp_path: Path) -> None:
    keys = write_key_pair(tmp_path / "p.key")
    (tmp_path / "p.key.pub").write_text(KeyPair.generate().public.hex())
    with pytest.raises(ConfigError, match="is not the public key of"):
        read_key_pair(tmp_path / "p.key")
    (tmp_path / "p.key").write_text(keys.secret.hex()[:-1])
    with pytest.raises(ConfigError, match="63 characters") as refused:
        read_key_pair(tmp_path / "p.key")
    assert keys.secret.hex()[:16] not in str(refused.value)
    (tmp_path / "p.key").unlink()
    with pytest.raises(ConfigError, match="cannot read the keys"):
        read_key_pair(tmp_path / "p.key")


def test_a_public_key_is_added_to_a_peers_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, peers = write_key_pair(tmp_path / "p.key"), tmp_path / "peers"
    other = KeyPair.generate()
    assert main(["allow", str(peers), str(tmp_path / "p.key.pub"), "--name", "p", "--address", "[::1]:5600"]) == 0
    assert main(["allow", str(peers), other.public.hex(), "--name", "d"]) == 0
    assert [(e.name, e.public_key, str(e.address)) for e in read_peers(peers)] == [
        ("p", keys.public, "[::1]:5600"),
        ("d", other.public, "None"),
    ]
    before = peers.read_text()
    assert main(["allow", str(peers), other.public.hex(), "--name", "again"]) == 2
    assert main(["allow", str(peers), KeyPair.generate().public.hex(), "--name", "p"]) == 2
    assert "already" in capsys.readouterr().err
    assert main(["allow", str(peers), "nonsense", "--name", "x"]) == 2
    assert main(["allow", str(peers), KeyPair.generate().public.hex(), "--name", "two words"]) == 2
    assert peers.read_text() == before


def test_a_wrong_command_line_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("pdkv.keys: error: ")


def test_a_peers_address_with_no_port_is_refused_when_it_is_written_and_not_when_it_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_key_pair(tmp_path / "p.key")
    allow = ["allow", str(tmp_path / "peers"), str(tmp_path / "p.key.pub"), "--name", "p", "--address"]
    assert main([*allow, "10.0.0.7:0"]) == 2
    assert "give the port that it published" in capsys.readouterr().err
    assert not (tmp_path / "peers").exists()
    assert main([*allow, "10.0.0.7:5600"]) == 0
    assert str(read_peers(tmp_path / "peers")[0].address) == "10.0.0.7:5600"


def test_peers_that_are_allowed_at_the_same_time_are_all_in_the_file(tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    script = (
        "import sys; from pdkv.keys.cli import main; print('ready', flush=True); sys.stdin.readline(); sys.exit("
        "max(main(['allow', sys.argv[1], bytes([int(sys.argv[2]), n] * 16).hex(), '--name', f'{sys.argv[2]}-{n}'])"
        " for n in range(50)))"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(peers), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    assert sorted(entry.name for entry in read_peers(peers)) == sorted(f"{w}-{n}" for w in (1, 2) for n in range(50))


def test_an_engine_of_another_user_can_still_read_its_peers_file_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "where").mkdir()
    real, link = tmp_path / "where" / "peers", tmp_path / "peers"
    real.write_text("# ours\n")
    real.chmod(0o604)
    link.symlink_to(real)
    assert main(["allow", str(link), KeyPair.generate().public.hex(), "--name", "p"]) == 0
    assert link.is_symlink()
    assert [entry.name for entry in read_peers(real)] == ["p"]
    assert stat.S_IMODE(real.stat().st_mode) == 0o604


def test_what_is_no_regular_file_is_not_replaced_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "peers")
    assert main(["allow", str(tmp_path / "peers"), KeyPair.generate().public.hex(), "--name", "p"]) == 2
    assert "is no regular file" in capsys.readouterr().err
    assert (tmp_path / "peers").is_fifo()
