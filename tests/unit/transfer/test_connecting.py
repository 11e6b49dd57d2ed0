"""A peer that is being connected to, as who drives a transport sees it."""

from __future__ import annotations

import pytest

from pdkv.errors import TransferTimeoutError
from pdkv.transfer.connecting import SteppedConnecting, Steps

pytestmark = pytest.mark.cpu


def test_what_could_not_be_connected_does_not_look_connected_when_it_is_polled_once_more() -> None:
    def steps() -> Steps[None]:
        yield
        raise TransferTimeoutError("the peer does not answer")

    connecting = SteppedConnecting(steps())
    assert not connecting.poll()
    for _ in range(3):
        with pytest.raises(TransferTimeoutError, match="does not answer"):
            connecting.poll()
