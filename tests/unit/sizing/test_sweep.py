"""`python -m pdkv.sizing sweep`: the fit, the peaks it is made from, and the program on a tiny torch model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdkv.errors import HarnessError
from pdkv.kvcache.sizing import measure_kv_cache_bytes
from pdkv.kvcache.sizing_constants import GIB, MIB, SizingConstants
from pdkv.sizing.__main__ import EXIT_ERROR, EXIT_HOLDS, EXIT_TOO_SMALL, main
from pdkv.sizing.engine_sweep import Load, baseline_of, prompts_of
from pdkv.sizing.fit import Baseline, Point, fit, margin_bytes
from pdkv.sizing.torch_sweep import EQUAL_STEPS, smallest_that_holds, steps_of, telling_steps
from pdkv.sizing.watch import PrivatePeak

pytestmark = pytest.mark.cpu

BASELINE = Baseline(resident_bytes=1000 * MIB, transient_peak_bytes=200 * MIB)
TINY = ("sweep", "--torch-workload", "tiny", "--lengths", "16,40", "--concurrency", "1,3", "--output", "2")


def point(peak_mib: int, length: int = 64, concurrency: int = 1) -> Point:
    return Point(length, 16, concurrency, peak_mib * MIB, 1.0)


class TestFit:
    def test_the_margin_needed_is_what_exceeds_the_peak_of_warmup_in_the_worst_load(self) -> None:
        report = fit(BASELINE, [point(1150), point(1300), point(1290)], SizingConstants())
        assert report["needed_margin_bytes"] == 100 * MIB
        assert [p["needed_margin_bytes"] for p in report["points"]] == [0, 100 * MIB, 90 * MIB]

    def test_each_smallest_floor_and_fraction_holds_and_a_bit_less_does_not(self) -> None:
        report = fit(BASELINE, [point(1300)], SizingConstants())
        needed, peak = report["needed_margin_bytes"], BASELINE.transient_peak_bytes
        pairs = report["smallest_floor_bytes_for_fraction"] + report["smallest_fraction_for_floor_bytes"]
        for pair in pairs:
            assert margin_bytes(pair["floor_bytes"], pair["fraction"], peak) >= needed
        for pair in report["smallest_floor_bytes_for_fraction"]:
            if pair["floor_bytes"]:
                assert margin_bytes(pair["floor_bytes"] - 1, pair["fraction"], peak) < needed
        for pair in report["smallest_fraction_for_floor_bytes"]:
            if pair["fraction"]:
                assert margin_bytes(pair["floor_bytes"], pair["fraction"] * 0.99, peak) < needed

    def test_the_margin_is_the_one_that_sizing_leaves(self) -> None:
        nbytes = measure_kv_cache_bytes(
            init_free_memory=80 * GIB,
            free_memory=60 * GIB,
            committed_bytes=0,
            requested_memory=80 * GIB,
            transient_peak_bytes=4 * GIB,
            margin_floor_bytes=1 * GIB,
            margin_fraction=0.5,
        )
        assert 60 * GIB - 4 * GIB - nbytes == margin_bytes(1 * GIB, 0.5, 4 * GIB)

    def test_a_smaller_margin_that_was_proved_under_a_cap_is_taken(self) -> None:
        report = fit(BASELINE, [point(1300)], SizingConstants(), proved_margin_bytes=32 * MIB)
        assert (report["seen_margin_bytes"], report["needed_margin_bytes"]) == (100 * MIB, 32 * MIB)

    def test_without_a_transient_peak_no_fraction_is_enough(self) -> None:
        report = fit(Baseline(1000 * MIB, 0), [point(1100)], SizingConstants())
        assert report["smallest_fraction_for_floor_bytes"][0] == {"floor_bytes": 0, "fraction": None}


class TestSteps:
    def test_prompts_are_chunked_by_the_budget_and_then_each_request_decodes(self) -> None:
        steps = list(steps_of(Load(prompt_tokens=50, output_tokens=2, concurrency=3), 64))
        assert steps == [[50, 14], [36, 28], [22], [1, 1, 1], [1, 1, 1]]

    def test_of_equal_steps_in_a_row_only_the_first_few_are_run_and_each_other_step_is(self) -> None:
        load = Load(prompt_tokens=64, output_tokens=9, concurrency=7)
        assert list(telling_steps(load, 64)) == [[64]] * EQUAL_STEPS + [[1] * 7] * EQUAL_STEPS
        short = Load(prompt_tokens=50, output_tokens=2, concurrency=3)
        assert list(telling_steps(short, 64)) == list(steps_of(short, 64))

    def test_the_bisection_finds_the_least_margin_and_tries_few(self) -> None:
        tried: list[int] = []

        def holds(margin: int) -> bool:
            tried.append(margin)
            return margin >= 300 * MIB

        assert smallest_that_holds(2000 * MIB, holds, 10 * MIB) == 300 * MIB
        assert len(tried) <= 8

    def test_a_margin_of_nothing_can_hold(self) -> None:
        assert smallest_that_holds(2000 * MIB, lambda margin: True, 10 * MIB) == 0
        assert smallest_that_holds(0, lambda margin: True, 10 * MIB) == 0


class TestWatch:
    def test_the_peak_of_another_process_is_seen_though_it_lasts_a_moment(self) -> None:
        code = "import sys; sys.stdin.readline(); x = bytearray(256 << 20); del x; print(1, flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            with PrivatePeak(child.pid) as peak:
                print(file=child.stdin, flush=True)
                child.stdout.readline()
            print(file=child.stdin, flush=True)
        assert 256 * MIB < peak.nbytes < 400 * MIB

    def test_a_process_that_has_ended_is_said(self) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as child:
            child.wait(30)
        with pytest.raises(HarnessError, match="has ended"), PrivatePeak(child.pid):
            pass


def test_the_baseline_is_what_the_engine_read_less_its_committed_blocks() -> None:
    reading = {"init_free_memory": 900, "free_memory": 400, "requested_memory": 1000, "transient_peak_bytes": 50}
    assert baseline_of({"reading": reading, "warmup_bytes": 100}) == Baseline(400, 50)
    with pytest.raises(HarnessError, match="hybrid"):
        baseline_of({"reading": None, "fixed_because": "a hybrid"})


def test_no_two_rounds_or_loads_ask_the_same() -> None:
    asked = [
        tuple(prompt.body["prompt"])
        for seed in (0, 1)
        for load in (Load(20, 4, 2), Load(20, 4, 3))
        for prompt in prompts_of(load, 1000, seed)
    ]
    assert len(set(asked)) == len(asked)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other in busy loops, for seconds where others use the cores."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
class TestProgram:
    def test_a_dry_run_on_the_cpu_writes_a_report_and_a_plot(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        report, plot = tmp_path / "sweep.json", tmp_path / "sweep.png"
        assert main([*TINY, "--json", str(report), "--plot", str(plot)]) == EXIT_HOLDS
        written = json.loads(report.read_text())
        assert len(written["points"]) == 4
        assert written["default_margin_bytes"] == GIB
        assert plot.read_bytes().startswith(b"\x89PNG")

    def test_constants_that_do_not_hold_exit_1(self) -> None:
        constants = ("--sizing-margin-floor-bytes", "0", "--sizing-margin-fraction", "0")
        # Warmup samples for one request, this load for five hundred: their sorted logits are beyond its peak.
        larger = ("sweep", "--torch-workload", "tiny", "--lengths", "1", "--concurrency", "500", "--output", "1")
        assert main([*larger, "--batched-tokens", "500", "--warmup-seqs", "1", *constants]) == EXIT_TOO_SMALL

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("sweep",), "either --model"),
            (("sweep", "--torch-workload", "gpt"), "choose one of: llama-8b, tiny"),
            (("sweep", "--torch-workload", "tiny", "--lengths", "0"), "lengths"),
            (("sweep", "--model", "nowhere"), "vocab_size"),
        ],
    )
    def test_bad_input_exits_2_and_says_what_is_wrong(
        self, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(arguments) == EXIT_ERROR
        assert message in capsys.readouterr().err
