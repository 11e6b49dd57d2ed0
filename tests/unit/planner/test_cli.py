"""The program: table, JSON, plot, exit codes and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdkv.planner.cli import main
from pdkv.planner.plan import PlanRequest, make_plan
from pdkv.planner.plot import context_curve

pytestmark = pytest.mark.cpu


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    plan = as_json(capsys, "--model", "llama-3.1-70b", "--gpu", "h200", "--tp", "4", "--context", "131072")
    assert plan["bytes_per_token"] == 327_680
    assert plan["bytes_per_token_per_rank"] == 81_920
    assert plan["tokens"] == (plan["blocks"] - 1) * 16
    assert plan["max_requests"] == (plan["blocks"] - 1 - plan["watermark_blocks"]) // 8192
    assert plan["assumed"] == ["activation_bytes", "non_torch_bytes", "graph_bytes"]


def test_given_sizes_are_used_and_no_longer_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--weights", "140GB", "--activation", "1GiB", "--non-torch", "1GiB", "--graphs", "0")
    plan = as_json(capsys, "--model", "llama-3.1-70b", "--gpu", "80GiB", "--tp", "4", "--fixed", *given)
    assert plan["assumed"] == []
    assert plan["cache_bytes_per_rank"] == int(80 * 2**30 * 0.92) - 35 * 10**9 - 2 * 2**30
    assert plan["other_kind"]["blocks"] > plan["blocks"]


def test_the_bytes_of_the_cache_stand_in_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--dtype", "float32", "--block-size", "32", "--context", "1024", "--kv-bytes", "256MiB", "--fixed")
    plan = as_json(capsys, "--model", "smollm2-135m", *settings)
    assert (plan["blocks"], plan["memory"]) == (268_435_456 // (46_080 * 32), None)


def test_the_demos_engine_gets_the_blocks_that_it_reported(capsys: pytest.CaptureFixture[str]) -> None:
    # vLLM 0.32 on the CPU with these settings: 182 blocks stock; 170 on a growable cache, 251658240 bytes committed.
    settings = ("--dtype", "float32", "--block-size", "32", "--context", "1024", "--kv-bytes", "268435456")
    assert as_json(capsys, "--model", "smollm2-135m", *settings, "--fixed")["blocks"] == 182
    assert as_json(capsys, "--model", "smollm2-135m", *settings)["blocks"] == 170


def test_traffic_is_planned_where_its_rates_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = ("--arrivals", "2", "--prompt", "8000", "--ttft-ms", "1000", "--prefill-rate", "20000")
    rest = ("--decode-rate", "3000", "--link-gbps", "50", "--queue-ms", "100", "--tpot-ms", "30")
    plan = as_json(capsys, "--model", "llama-3.1-70b", "--gpu", "h200", "--tp", "4", *traffic, *rest)
    assert plan["link"]["bytes_per_request"] == 8000 * 327_680
    assert plan["link"]["bytes_per_s"] == pytest.approx(8000 * 327_680 / 0.5)
    assert plan["leases"]["leases"] == pytest.approx(2 * (0.1 + 8000 * 327_680 / 50e9))
    assert plan["waiting_for_remote_kv"]["expected_blocks"] == 52
    assert plan["engines"]["prefill_engines"] == pytest.approx(0.8)


def test_the_table_shows_sections_and_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--model", "gemma-3-27b", "--gpu", "h200", "--concurrency", "4", "--context", "32768"])
    text = capsys.readouterr().out
    assert code == 0
    for line in ("bytes per token", "cache groups", "4 at once", "fixed, sized before warmup", "Assumed"):
        assert line in text


def test_a_context_that_does_not_fit_exits_3_and_says_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--model", "llama-3.1-70b", "--gpu", "h100-80g", "--tp", "2", "--context", "1000000"])
    text = capsys.readouterr().out
    assert code == 3
    for change in ("--kv-cache-dtype fp8", "--tp 8", "--pp 4", "a model with MLA", "a host tier"):
        assert change in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-9", "--gpu", "h200"], "presets are"),
        (["--model", "llama-3.1-8b"], "Give --gpu"),
        (["--model", "llama-3.1-8b", "--gpu", "h900"], "presets are h100-80g"),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--tp", "3"], "neither divide"),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--tp", "0"], "--tp: '0' is not a whole number of at least 1"),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--sizing-margin-fraction", "-1"], "margin_fraction"),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--weights", "many"], "--weights"),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--link-gbps", "inf"], "'inf' is not a number above 0"),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--arrivals", "nan"], "'nan' is not a number above 0"),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--queue-ms=-1"], "'-1' is not a number of at least 0"),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--util", "2"], "is not a number above 0 and at most 1"),
        (
            ["--model", "llama-3.1-8b", "--gpu", "h200", "--watermark", "nan"],
            "is not a number of at least 0 and at most 1",
        ),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--context", "9" * 19], "is not a whole number of at least 1"),
        (["--model", "llama-3.1-8b", "--gpu", "h200", "--sizing-margin-fraction", "1e300"], "margin_fraction"),
        (["--model", "llama-3.1-8b", "--gpus", "h200"], "see python -m pdkv.plan --help"),
    ],
)
def test_a_wrong_question_exits_2_with_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert (said[:7], said.count("\n")) == ("error: ", 1)


def test_an_unknown_architecture_exits_2_and_lists_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "novel"}')
    assert main(["--model", str(tmp_path), "--gpu", "h200"]) == 2
    assert "it lacks num_hidden_layers" in capsys.readouterr().err


def test_constants_of_sizing_change_the_growable_cache(capsys: pytest.CaptureFixture[str]) -> None:
    question = ("--model", "llama-3.1-8b", "--gpu", "h200")
    wide = as_json(capsys, *question, "--sizing-margin-floor-bytes", str(8 << 30))
    narrow = as_json(capsys, *question, "--sizing-margin-floor-bytes", "0", "--sizing-margin-fraction", "0")
    assert narrow["cache_bytes_per_rank"] - wide["cache_bytes_per_rank"] == 8 << 30


def test_the_curve_flattens_at_the_window() -> None:
    plan = make_plan(PlanRequest(model="mistral-7b-v0.1", gpu="h200", context=32_768))
    curve = context_curve(plan)
    assert curve[-1] == (32_768, curve[-2][1])
    assert curve[0][1] < curve[10][1]


def test_the_plot_is_written_as_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    assert main(["--model", "mistral-7b-v0.1", "--gpu", "h200", "--plot", str(file)]) == 0
    assert "<svg" in file.read_text()


def test_a_plot_in_an_unknown_format_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["--model", "llama-3.1-8b", "--gpu", "h200", "--plot", str(tmp_path / "plan.xyz")]) == 2
    assert "Cannot write the plot" in capsys.readouterr().err


def test_the_program_runs_and_imports_neither_torch_nor_matplotlib() -> None:
    code = "import sys; sys.argv = ['p', '--model', 'llama-3.1-8b', '--gpu', 'h200']\n"
    code += "from pdkv.plan import main; main(); sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--arrivals", "nan"), ("--arrivals", "inf"), ("--arrivals", "-1"), ("--queue-ms", "nan"), ("--queue-ms", "-1"),
        ("--link-gbps", "0"), ("--link-gbps", "nan"), ("--prefill-rate", "1e-300"), ("--tpot-ms", "-1"),
        ("--prompt", "0"), ("--output", "-1"), ("--context", "9" * 400), ("--block-size", "9" * 400),
        ("--activation", "9" * 500), ("--weights", "9" * 500),
    ],
)  # fmt: skip
def test_a_value_that_nothing_has_exits_2_without_a_traceback(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "llama-3.1-8b", "--gpu", "h200", "--arrivals", "5", f"{option}={value}"]
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert capsys.readouterr().out == ""
