"""The proxy in front of prefill and decode engines: ``python -m pdkv.proxy``.

Folder::

    settings.py    what the proxy is told
    request.py     a client's request becomes the two that the engines get; what prefill/decode cannot do is refused
    upstream.py    the engines: deadlines, failures that name the engine
    rooms.py       how much room each decode engine has
    queue.py       who may go on, who waits, who is sent away
    handover.py    the prefill leg, and how its blocks are freed when nobody comes for them
    answers.py     the engines' answers and errors, passed on
    errors.py      errors in OpenAI's format
    app.py         the HTTP interface
    server.py      the HTTP server, with a deadline for headers
    __main__.py    the program
"""

from __future__ import annotations

from pdkv.proxy.settings import ProxySettings

__all__ = ["ProxySettings"]
