"""Transports by name."""

from __future__ import annotations

import pytest

from pdkv.errors import ConfigError, TransportError
from pdkv.registry import find_transport
from pdkv.transfer.inproc import InprocTransport

pytestmark = pytest.mark.cpu


def test_a_transport_is_found_by_module_and_name() -> None:
    assert find_transport("pdkv.transfer.inproc:InprocTransport") is InprocTransport


def test_every_announced_transport_is_found_and_makes_one_of_its_name() -> None:
    assert find_transport("inproc") is InprocTransport
    assert find_transport("nixl")().name == "nixl"


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no transport is called 'pigeon'; installed are: .*inproc.*nixl"):
        find_transport("pigeon")


def test_a_module_that_cannot_be_imported_is_an_error_that_names_it() -> None:
    with pytest.raises(TransportError, match="needs something that is not installed: No module named 'no_such_module'"):
        find_transport("no_such_module:Transport")


@pytest.mark.parametrize("name", ["auto", "ipc", "nixl"])
def test_transports_that_can_verify_are_told_whether_to(name: str) -> None:
    assert find_transport(name, verify=True)().verifies
    assert not find_transport(name, verify=False)().verifies


def test_a_transport_that_cannot_verify_is_refused_where_it_is_to() -> None:
    with pytest.raises(ConfigError, match="'inproc' cannot be told whether to verify"):
        find_transport("inproc", verify=True)
