"""The auto transport, which chooses one of the others for each peer.

``transport``    the contract, by whichever transport was chosen
``makers``       how each one is made, in which order they are tried, and which can be used here
``choosing``     connects to a peer by the best one that both have
``description``  what an engine tells its peers
"""

from __future__ import annotations

from pdkv_connectors.auto.transport import AutoTransport

__all__ = ["AutoTransport"]
