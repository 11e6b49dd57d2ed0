"""The admission middleware of decode, around an application that answers when a test lets it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from asgi_client import DEADLINE_S, Call, get, post
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from pdkv_connectors.vllm.http import DecodeAdmission, remote_prefill_params
from pdkv_connectors.vllm.waiting import key_of

pytestmark = pytest.mark.cpu


class EngineClient:
    """What the API server has of the engine: here it notes what it was told."""

    def __init__(self) -> None:
        self.rejected: list[dict[str, Any]] = []

    async def notify_kv_transfer_request_rejected(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        self.rejected.append(kv_transfer_params)


class Decode:
    """An application with the middleware, as vLLM adds it. Answers wait for `answer`, their ends for `finish`."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.engine = EngineClient()
        self.app.state.engine_client = self.engine
        self.answer, self.finish = asyncio.Event(), asyncio.Event()
        self.inside = 0
        self.arrived = asyncio.Event()

        @self.app.post("/v1/completions")
        async def completions(request: Request) -> Any:
            if (await request.json()).get("logprobs") == "wrong":
                return JSONResponse({"error": "wrong type"}, 400)
            self.inside += 1
            self.arrived.set()

            async def tokens() -> Any:
                await self.answer.wait()
                yield b"first"
                await self.finish.wait()
                yield b"last"

            return StreamingResponse(tokens())

        self.app.add_middleware(DecodeAdmission)

    async def send(self, number: int, **more: Any) -> Call:
        """A request that has been let in, or is answered already."""
        self.arrived.clear()
        call = Call(self.app, "/v1/completions", json.dumps(body(number, **more)).encode()).start()
        arrived = asyncio.ensure_future(self.arrived.wait())
        await asyncio.wait({call.task, arrived}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE_S)
        arrived.cancel()
        return call

    async def room(self) -> dict[str, Any]:
        found: dict[str, Any] = await get(self.app, "/pdkv/room")
        return found


def params(number: int, tokens: int = 20) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_request_id": f"r{number}",
        "remote_num_tokens": tokens,
    }


def body(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": "a", "kv_transfer_params": params(number, **more)}


def write(
    folder: Path,
    waiting: dict[int, int] | None = None,
    settled: tuple[int, ...] = (),
    refused: dict[int, str] | None = None,
) -> None:
    """The scheduler's file, written whole."""
    content = {
        "waiting": {key_of(params(number)): blocks for number, blocks in (waiting or {}).items()},
        "settled": [key_of(params(number)) for number in settled],
        "refused": {key_of(params(number)): [code, f"why {number}"] for number, code in (refused or {}).items()},
        "num_blocks": 101,
        "block_size": 10,
        "max_num_seqs": 3,
    }
    temporary = folder / "new"
    temporary.write_text(json.dumps(content))
    temporary.replace(folder / "waiting.json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDKV_STATUS_DIR", str(tmp_path))
    monkeypatch.setenv("PDKV_ADMISSION_REQUESTS", "2")
    monkeypatch.delenv("PDKV_ADMISSION_BLOCKS", raising=False)
    write(tmp_path)
    return tmp_path


async def test_one_request_too_many_is_503_with_the_limit_and_a_time_to_come_back(folder: Path) -> None:
    decode = Decode()
    waiting = [await decode.send(number) for number in range(2)]
    refused = await (await decode.send(2)).end()
    assert refused.status == 503
    assert int(refused.answer_headers["retry-after"]) >= 1
    error = refused.json["error"]
    assert (error["type"], error["limit"], error["most"], error["code"]) == ("no_room", "requests", 2, 503)
    assert "PDKV_ADMISSION_REQUESTS" in error["message"]
    assert decode.inside == 2
    decode.answer.set()
    decode.finish.set()
    assert [(await call.end()).answer for call in waiting] == [b"firstlast"] * 2


async def test_a_refused_request_frees_its_blocks_on_prefill(folder: Path) -> None:
    decode = Decode()
    calls = [await decode.send(number) for number in range(3)]
    await calls[2].end()
    assert decode.engine.rejected == [params(2)]


async def test_a_request_whose_answer_begins_makes_room_for_the_next(folder: Path) -> None:
    decode = Decode()
    calls = [await decode.send(number) for number in range(2)]
    decode.answer.set()
    for call in calls:
        await asyncio.wait_for(call.began.wait(), DEADLINE_S)
    assert (await decode.room())["free"] == 2
    await decode.send(2)
    assert decode.inside == 3


async def test_a_request_whose_kv_has_arrived_makes_room_before_its_answer_begins(folder: Path) -> None:
    decode = Decode()
    for number in range(2):
        await decode.send(number)
    write(folder, waiting={1: 2}, settled=(0,))
    assert (await decode.room())["waiting"] == 1
    await decode.send(2)
    assert decode.inside == 3


async def test_a_client_that_leaves_makes_room(folder: Path) -> None:
    decode = Decode()
    calls = [await decode.send(number) for number in range(2)]
    for call in calls:
        call.gone.set()
        await call.end()
    assert (await decode.room())["waiting"] == 0


async def test_blocks_of_prompts_are_bounded_and_the_limit_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDKV_ADMISSION_BLOCKS", "6")
    decode = Decode()
    await decode.send(0, tokens=40)
    assert (await decode.room())["free_blocks"] == 2
    refused = await (await decode.send(1, tokens=21)).end()
    assert (refused.status, refused.json["error"]["limit"]) == (503, "blocks")
    await decode.send(2, tokens=20)
    assert decode.inside == 2


async def test_the_engines_own_sizes_are_the_limits_where_none_are_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDKV_ADMISSION_REQUESTS")
    room = await Decode().room()
    assert (room["capacity"], room["capacity_blocks"], room["scheduler_seen"]) == (3, 100, True)


async def test_without_a_status_folder_a_request_waits_until_its_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDKV_STATUS_DIR", raising=False)
    monkeypatch.setenv("PDKV_ADMISSION_REQUESTS", "1")
    decode = Decode()
    first = await decode.send(0)
    assert (await (await decode.send(1)).end()).status == 503
    decode.answer.set()
    await asyncio.wait_for(first.began.wait(), DEADLINE_S)
    await decode.send(2)
    assert decode.inside == 2
    assert not (await decode.room())["scheduler_seen"]


async def test_requests_of_another_api_server_count_as_well(folder: Path) -> None:
    decode = Decode()
    write(folder, waiting={7: 2, 8: 2})
    assert (await decode.room())["free"] == 0
    assert (await (await decode.send(0)).end()).status == 503


async def test_a_request_that_both_sides_know_counts_once(folder: Path) -> None:
    decode = Decode()
    await decode.send(0)
    write(folder, waiting={0: 2})
    assert (await decode.room())["waiting"] == 1


async def test_a_reference_that_was_used_before_is_not_taken_for_settled(folder: Path) -> None:
    decode = Decode()
    write(folder, settled=(0, 1, 2))
    for number in range(2):
        await decode.send(number)
    assert (await (await decode.send(2)).end()).status == 503


async def test_requests_without_remote_prefill_are_not_bounded_and_hear_of_the_room(folder: Path) -> None:
    decode = Decode()
    decode.answer.set()
    decode.finish.set()
    await decode.send(0)
    for given in ({"prompt": "what is do_remote_prefill?"}, {"kv_transfer_params": {"do_remote_prefill": False}}):
        call = await post(decode.app, "/v1/completions", given)
        assert call.status == 200
        assert call.answer_headers["x-pdkv-room"].startswith("requests=")


async def test_release_tells_the_engine_and_refuses_what_prefill_did_not_answer(folder: Path) -> None:
    decode = Decode()
    done = await post(decode.app, "/v1/pdkv/release", {"kv_transfer_params": params(4)})
    assert (done.status, done.json) == (200, {"released": True})
    assert decode.engine.rejected == [params(4)]
    for given in ({}, {"kv_transfer_params": {"do_remote_prefill": False}}):
        assert (await post(decode.app, "/v1/pdkv/release", given)).status == 400


async def test_a_request_that_vllm_refuses_before_it_reads_the_parameters_frees_its_blocks(folder: Path) -> None:
    decode = Decode()
    answer = await post(decode.app, "/v1/completions", {**body(5), "logprobs": "wrong"})
    assert answer.status == 400
    assert decode.engine.rejected == [params(5)]
    assert (await decode.room())["waiting"] == 0


async def test_release_leaves_a_request_that_came_here_to_the_engine(folder: Path) -> None:
    decode = Decode()
    await decode.send(4)
    answer = await post(decode.app, "/v1/pdkv/release", {"kv_transfer_params": params(4)})
    assert (answer.status, answer.json["released"]) == (200, False)
    assert decode.engine.rejected == []


async def test_an_engine_that_cannot_be_told_is_counted_and_the_client_gets_its_answer(folder: Path) -> None:
    decode = Decode()
    decode.app.state.engine_client = None
    calls = [await decode.send(number) for number in range(3)]
    assert (await calls[2].end()).status == 503
    assert (await decode.room())["counts"]["unreleased"] == 1


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"{",
        b'{"kv_transfer_params": 3, "do_remote_prefill": 1}',
        b'["do_remote_prefill"]',
        b'{"kv_transfer_params": {"do_remote_prefill": false}}',
        b"\xff do_remote_prefill",
    ],
)
def test_what_is_no_remote_prefill_is_left_to_the_engine(given: bytes) -> None:
    assert remote_prefill_params(given) is None


@pytest.mark.parametrize(
    "more",
    [b', "valid_s": NaN', b', "remote_request_id": "\\ud800"'],
    ids=["no_number", "half_a_character"],
)
def test_parameters_that_only_pythons_parser_takes_are_seen_as_vllm_sees_them(more: bytes) -> None:
    found = remote_prefill_params(b'{"prompt": "p", "kv_transfer_params": {"do_remote_prefill": true%s}}' % more)
    assert found is not None
    assert key_of(found)


class Failing(Decode):
    """Answers as vLLM does where a request ended with an error."""

    ERROR = '{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}'

    def __init__(self) -> None:
        super().__init__()

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            if not (await request.json()).get("stream"):
                return JSONResponse(json.loads(self.ERROR), 500)

            async def events() -> Any:
                yield f"data: {self.ERROR}\n\n"
                yield "data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")

    async def ask(self, number: int, **more: Any) -> Call:
        return await post(self.app, "/v1/chat/completions", {**body(number), **more})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [("malformed", 400), ("forged", 400), ("replayed", 409), ("expired", 410), ("stale_generation", 410)],
)
async def test_a_request_that_was_refused_by_what_it_said_of_its_kv_gets_a_status_and_a_sentence(
    folder: Path, code: str, status: int, stream: bool
) -> None:
    decode = Failing()
    write(folder, refused={1: code, 2: "forged"})
    answer = await decode.ask(1, stream=stream)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"], error["failure"]) == (
        status, status, "kv_reference_refused", code,
    )  # fmt: skip
    assert f"({code}: why 1); have prefill compute the prompt again" in error["message"]
    assert "x-pdkv-room" in answer.answer_headers
    room = await decode.room()
    assert (room["waiting"], room["counts"]["refused_references"]) == (0, 1)
    assert decode.engine.rejected == []  # the engine has told prefill what there was to tell


@pytest.mark.parametrize("stream", [False, True])
async def test_every_other_failure_is_answered_as_vllm_does(folder: Path, stream: bool) -> None:
    decode = Failing()
    write(folder, refused={2: "forged"})
    answer = await decode.ask(1, stream=stream)
    expected = f"data: {Failing.ERROR}\n\ndata: [DONE]\n\n" if stream else json.dumps(json.loads(Failing.ERROR))
    assert answer.status == (200 if stream else 500)
    assert answer.answer.decode().replace(" ", "") == expected.replace(" ", "")


async def test_an_answer_of_tokens_is_passed_on_whatever_was_refused_before(folder: Path) -> None:
    decode = Decode()
    write(folder, refused={1: "replayed"})
    call = await decode.send(1)
    decode.answer.set()
    decode.finish.set()
    assert ((await call.end()).status, call.answer) == (200, b"firstlast")
