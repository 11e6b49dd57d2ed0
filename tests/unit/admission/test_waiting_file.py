"""What the decode scheduler tells of waiting requests, and how the API server reads it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdkv_connectors.vllm import waiting
from pdkv_connectors.vllm.refusals import MALFORMED, Refusal
from pdkv_connectors.vllm.waiting import (
    MAX_KEYS,
    MAX_REFUSED,
    MAX_SETTLED,
    PublishingScheduler,
    WaitingFile,
    blocks_of,
    key_of,
)

pytestmark = pytest.mark.cpu


class StockScheduler:
    """Takes what a stock connector scheduler takes, and does nothing."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None: ...
    def on_new_request(self, request: Any) -> None: ...
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...
    def build_connector_meta(self, scheduler_output: Any) -> None: ...
    def update_connector_output(self, connector_output: Any) -> None: ...
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


class Scheduler(PublishingScheduler, StockScheduler):
    pass


def params(number: int, tokens: int = 40) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_request_id": f"r{number}",
        "remote_num_tokens": tokens,
    }


def request(number: int, **more: Any) -> Any:
    return SimpleNamespace(request_id=f"id-{number}", kv_transfer_params={**params(number), **more})


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setenv("PDKV_STATUS_DIR", str(tmp_path))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16), scheduler_config=SimpleNamespace(max_num_seqs=8)
    )
    return Scheduler(config, "d", SimpleNamespace(num_blocks=100))


def step(scheduler: Scheduler, **output: Any) -> None:
    scheduler.build_connector_meta(None)
    given = {"finished_recving": None, "failed_recving": set(), **output}
    scheduler.update_connector_output(SimpleNamespace(**given))


def test_the_engines_sizes_are_known_before_the_first_request(scheduler: Scheduler, tmp_path: Path) -> None:
    snapshot = WaitingFile(tmp_path).read()
    assert snapshot is not None
    assert (snapshot.num_blocks, snapshot.block_size, snapshot.max_num_seqs) == (100, 16, 8)
    assert snapshot.waiting == {}


@pytest.mark.parametrize("how", ["arrives", "fails", "is cached whole", "ends"])
def test_a_request_waits_until_its_kv(scheduler: Scheduler, tmp_path: Path, how: str) -> None:
    file = WaitingFile(tmp_path)
    scheduler.on_new_request(request(1))
    step(scheduler)
    assert file.read().waiting == {key_of(params(1)): 3}
    if how == "arrives":
        step(scheduler, finished_recving={"id-1"})
    elif how == "fails":
        step(scheduler, failed_recving={"id-1"})
    elif how == "is cached whole":
        scheduler.update_state_after_alloc(request(1), None, 0)
        step(scheduler)
    else:
        scheduler.request_finished(request(1), ())
    assert file.read().waiting == {}
    assert key_of(params(1)) in file.read().settled


def test_requests_that_bring_no_remote_prefill_do_not_wait(scheduler: Scheduler, tmp_path: Path) -> None:
    scheduler.on_new_request(SimpleNamespace(request_id="plain", kv_transfer_params=None))
    scheduler.on_new_request(request(2, do_remote_prefill=False))
    step(scheduler)
    assert WaitingFile(tmp_path).read().waiting == {}


def test_the_file_is_replaced_only_where_something_changed(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(waiting, "replace_file", lambda *arguments: written.append(arguments))
    for _ in range(5):
        step(scheduler)
    scheduler.on_new_request(request(1))
    scheduler.on_new_request(request(2))
    for _ in range(5):
        step(scheduler)
    assert len(written) == 1


def test_a_disk_that_is_full_ends_nothing_and_is_tried_again(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    scheduler.on_new_request(request(1))
    with monkeypatch.context() as patch:
        patch.setattr(waiting, "replace_file", full)
        step(scheduler)
    step(scheduler)
    assert len(WaitingFile(tmp_path).read().waiting) == 1


def test_the_file_stays_small_however_many_requests_have_come(scheduler: Scheduler, tmp_path: Path) -> None:
    for number in range(10 * MAX_SETTLED):
        scheduler.on_new_request(request(number))
        scheduler.request_finished(request(number), ())
    snapshot = WaitingFile(tmp_path).read()
    assert len(snapshot.settled) == MAX_SETTLED
    assert key_of(params(10 * MAX_SETTLED - 1)) in snapshot.settled


def test_a_file_that_is_damaged_is_counted_and_the_last_good_one_stays(scheduler: Scheduler, tmp_path: Path) -> None:
    file = WaitingFile(tmp_path)
    scheduler.on_new_request(request(1))
    step(scheduler)
    assert len(file.read().waiting) == 1
    for damaged in ("{", "[]", '{"waiting": 3}'):
        (tmp_path / "waiting.json").write_text(damaged)
        assert len(file.read().waiting) == 1
    assert file.unreadable == 3


def test_requests_of_each_connector_have_keys_of_their_own() -> None:
    def reference(number: int) -> dict[str, Any]:
        named = {"engine": {"engine_id": "p", "generation": 1}, "request_id": f"r{number}", "serial": number}
        return {"do_remote_prefill": True, "pdkv": {**named, "num_tokens": 40}}

    kinds = [params(1), params(2), reference(1), reference(2), {"other": 1}, {"other": 2}, {}]
    assert len({key_of(given) for given in kinds}) == len(kinds)
    assert key_of(reference(1)) == key_of(reference(1))
    assert blocks_of(reference(1), 16) == 3


def test_without_a_folder_nothing_is_known() -> None:
    assert WaitingFile(None).read() is None


@pytest.mark.parametrize(
    ("given", "blocks"),
    [
        ({"remote_num_tokens": 33}, 3),
        ({"remote_num_tokens": 32}, 2),
        ({"remote_block_ids": [[1, 2, 3]]}, 3),
        ({"remote_block_ids": [[1], [2, 3]]}, 2),
        ({"remote_block_ids": [1, 2, 3, 4]}, 4),
        ({"remote_num_tokens": "33", "remote_block_ids": "x"}, 0),
        ({}, 0),
    ],
)
def test_blocks_are_counted_in_decodes_own_size_where_prefill_names_tokens(given: dict[str, Any], blocks: int) -> None:
    assert blocks_of(given, 16) == blocks


def refused(folder: Path, number: int) -> Refusal | None:
    snapshot = WaitingFile(folder).read()
    assert snapshot is not None
    return snapshot.refused.get(key_of(params(number)))


@pytest.mark.parametrize("when", ["as it arrives", "within a step", "after vLLM has ended it"])
def test_a_reference_that_was_refused_is_in_the_file_before_the_client_can_be_answered(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    scheduler.on_new_request(request(1))
    if when == "after vLLM has ended it":
        scheduler.request_finished(request(1), [])
    if when == "within a step":

        def learns(*_: Any) -> None:
            scheduler.will_not_come("id-1", "replayed", "it was used before")

        monkeypatch.setattr(StockScheduler, "build_connector_meta", learns)
        scheduler.build_connector_meta(None)
    else:
        scheduler.will_not_come("id-1", "replayed", "it was used before")
        step(scheduler)
    found = refused(tmp_path, 1)
    assert found == Refusal("replayed", "it was used before")
    assert found.status == 409


def test_a_failure_that_is_not_the_clients_is_no_refusal_and_takes_an_earlier_one_back(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    for code in ("peer_lost", "transfer_failed", "incompatible", "asleep"):
        scheduler.on_new_request(request(1))
        scheduler.will_not_come("id-1", "forged", "P did not issue it")
        step(scheduler)
        assert refused(tmp_path, 1) is not None
        scheduler.will_not_come("id-1", code, "the first use of the same reference")
        step(scheduler)
        assert refused(tmp_path, 1) is None


def test_refusals_and_the_keys_for_them_are_bounded(scheduler: Scheduler, tmp_path: Path) -> None:
    for number in range(MAX_KEYS + 1):
        scheduler.on_new_request(request(number))
    for number in range(MAX_KEYS + 1):
        scheduler.will_not_come(f"id-{number}", MALFORMED, "it is none")
    step(scheduler)
    snapshot = WaitingFile(tmp_path).read()
    assert snapshot is not None
    assert list(snapshot.refused) == [
        key_of(params(number)) for number in range(MAX_KEYS + 1 - MAX_REFUSED, MAX_KEYS + 1)
    ]
    scheduler.will_not_come("id-0", MALFORMED, "not known any more")
    assert len(scheduler.book._keys) == MAX_KEYS
