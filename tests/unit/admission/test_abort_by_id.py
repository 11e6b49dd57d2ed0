"""Giving up a request by its id, around an application that cancels its work when its client leaves, as vLLM does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi_client import DEADLINE_S, Call, post
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from pdkv_connectors.vllm.http_abort import AbortById

pytestmark = pytest.mark.cpu


class Prefill:
    def __init__(self) -> None:
        self.app = FastAPI()
        self.arrived, self.finish = asyncio.Event(), asyncio.Event()
        self.cancelled: list[str] = []

        @self.app.post("/v1/completions")
        async def completions(request: Request) -> Any:
            await request.body()
            self.arrived.set()
            work = asyncio.ensure_future(self.finish.wait())
            leaving = asyncio.ensure_future(request.receive())
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (work, leaving):
                task.cancel()
            if not self.finish.is_set():
                self.cancelled.append(request.headers["x-request-id"])
                return None
            return JSONResponse({"kv_transfer_params": {"do_remote_prefill": True}})

        self.app.add_middleware(AbortById)

    async def send(self, request_id: str) -> Call:
        self.arrived.clear()
        call = Call(self.app, "/v1/completions", b"{}", {"X-Request-Id": request_id}).start()
        await asyncio.wait_for(self.arrived.wait(), DEADLINE_S)
        return call


async def test_a_request_is_given_up_by_its_id_and_others_go_on() -> None:
    prefill = Prefill()
    first, second = await prefill.send("a"), await prefill.send("b")
    assert (await post(prefill.app, "/v1/pdkv/abort", {"request_id": "a"})).json == {"aborted": 1}
    assert (await first.end()).json is None
    assert prefill.cancelled == ["a"]
    prefill.finish.set()
    assert (await second.end()).json["kv_transfer_params"] == {"do_remote_prefill": True}


async def test_a_request_that_has_finished_is_answered_although_it_is_given_up() -> None:
    prefill = Prefill()
    call = await prefill.send("a")
    prefill.finish.set()
    aborted = await post(prefill.app, "/v1/pdkv/abort", {"request_id": "a"})
    assert aborted.status == 200
    assert (await call.end()).json["kv_transfer_params"] == {"do_remote_prefill": True}


async def test_an_id_that_is_not_known_or_over_gives_up_nothing() -> None:
    prefill = Prefill()
    assert (await post(prefill.app, "/v1/pdkv/abort", {"request_id": "x"})).json == {"aborted": 0}
    call = await prefill.send("a")
    prefill.finish.set()
    await call.end()
    assert (await post(prefill.app, "/v1/pdkv/abort", {"request_id": "a"})).json == {"aborted": 0}


@pytest.mark.parametrize("given", [{}, [], {"request_id": 3}, "x"])
async def test_what_names_no_request_is_400(given: Any) -> None:
    assert (await post(Prefill().app, "/v1/pdkv/abort", given)).status == 400


async def test_a_client_that_leaves_is_noticed_as_without_the_middleware() -> None:
    prefill = Prefill()
    call = await prefill.send("a")
    call.gone.set()
    await call.end()
    assert prefill.cancelled == ["a"]
