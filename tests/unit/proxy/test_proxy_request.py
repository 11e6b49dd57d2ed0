"""How a client's request becomes the prefill and the decode leg, and what is refused."""

from __future__ import annotations

import pytest

from pdkv.proxy import request as legs
from pdkv.proxy.errors import ApiError

pytestmark = pytest.mark.cpu


def refused(request: dict[str, object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        legs.check(request)
    return caught.value


def test_prefill_leg_asks_for_one_token_and_for_the_handover():
    leg = legs.prefill_request({"prompt": "a", "max_tokens": 50, "temperature": 0}, chat=False)
    assert leg == {
        "prompt": "a",
        "temperature": 0,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_prefill_leg_leaves_out_what_concerns_the_answer_only():
    request = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 4, "logprobs": 2}
    assert set(legs.prefill_request(request, chat=False)) == {"prompt", "max_tokens", "stream", "kv_transfer_params"}


def test_prefill_leg_keeps_what_shapes_the_prompt():
    request = {"messages": [], "tools": [{"type": "function"}], "chat_template_kwargs": {"x": 1}, "seed": 3}
    leg = legs.prefill_request(request, chat=True)
    assert {name: leg[name] for name in request} == request


@pytest.mark.parametrize(("chat", "given"), [(True, {}), (True, {"max_completion_tokens": 9}),
                                             (False, {"max_completion_tokens": 9})])  # fmt: skip
def test_prefill_leg_limits_max_completion_tokens_too(chat, given):
    assert legs.prefill_request({**given}, chat=chat)["max_completion_tokens"] == 1


def test_decode_leg_is_the_clients_request_with_the_parameters_added():
    params = {"do_remote_prefill": True, "any": ["thing"]}
    assert legs.decode_request({"prompt": "a", "stream": True}, params) == {
        "prompt": "a",
        "stream": True,
        "kv_transfer_params": params,
    }


def test_the_clients_request_is_not_changed_by_making_legs():
    request = {"prompt": "a", "max_tokens": 5, "stream": True}
    legs.decode_request(request, {"x": 1})
    legs.prefill_request(request, chat=False)
    assert request == {"prompt": "a", "max_tokens": 5, "stream": True}


@pytest.mark.parametrize(
    "request_",
    [
        {"kv_transfer_params": {"remote_host": "evil"}},
        {"kv_transfer_params": None},
        {"extra_body": {"kv_transfer_params": {}}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"a": [{"b": {"kv_transfer_params": 1}}]},
        {"ec_transfer_params": {}},
    ],
)
def test_transfer_parameters_from_clients_are_refused_wherever_they_stand(request_):
    error = refused({"prompt": "a", **request_})
    assert error.status == 400
    assert error.body["error"]["type"] == "invalid_request_error"


def test_the_word_kv_transfer_params_in_a_users_text_is_no_parameter():
    legs.check({"messages": [{"role": "user", "content": "what is kv_transfer_params?", "kv_transfer_params": 1}]})


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["text"], [[1, 2]], [], None])
def test_one_prompt_is_accepted_in_every_form(prompt):
    legs.check({"prompt": prompt})


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": "a", "prompt_embeds": "b"}, "prompt"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ],
)
def test_what_one_handover_cannot_serve_is_refused_by_name(request_, param):
    error = refused(request_)
    assert (error.status, error.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("request_", [{"n": 1}, {"n": None}, {"echo": True}, {"logprobs": 3}, {"max_tokens": 1}])
def test_what_the_decode_engine_can_do_alone_is_accepted(request_):
    legs.check({"prompt": "a", **request_})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff", b"[" * 100_000]
)
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(ApiError) as caught:
        legs.parse(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": []},
        {"kv_transfer_params": {"do_remote_prefill": False, "remote_block_ids": [[1]]}},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": []}},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[], []]}},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": None}},
        "text",
    ],
)
def test_I13_an_answer_that_hands_over_nothing_is_an_error(answer):
    with pytest.raises(ApiError) as caught:
        legs.transfer_params(answer)
    assert caught.value.status == 502


def test_transfer_parameters_of_the_prefill_engine_are_passed_on_unchanged():
    params = {"do_remote_prefill": True, "remote_block_ids": [[7]], "something_new": {"x": 1}}
    assert legs.transfer_params({"kv_transfer_params": params}) == params


@pytest.mark.parametrize("value", [-1, -1.0, "-1", "5"])
def test_a_truncation_that_the_engines_would_read_as_negative_is_refused(value):
    assert refused({"prompt": "a", "truncate_prompt_tokens": value}).body["error"]["param"] == "truncate_prompt_tokens"


def test_a_truncation_to_a_number_of_tokens_is_passed_on():
    legs.check({"prompt": "a", "truncate_prompt_tokens": 5})
    legs.check({"prompt": "a", "truncate_prompt_tokens": None})
