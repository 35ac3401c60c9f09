"""`tokenmill bench serve` as a user runs it, against a real server of the fake model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Child, request
from tokenmill.bench.serve import main, parse

SMALL = ["--random-input-len", "24", "--random-output-len", "6", "--seed", "1"]


def bench(capsys: pytest.CaptureFixture[str], server: Child, *arguments: str) -> Any:
    """The result, as JSON."""
    assert main(["--port", str(server.port), "--json", *SMALL, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_and_the_result_file(server: Child, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    more = ["--num-prompts", "6", "--max-concurrency", "2", "--request-rate", "200", "--num-warmups", "1"]
    more += ["--goodput", "ttft:60000", "tpot:60000", "--save-result", "--result-filename", str(path)]
    assert main(["--base-url", f"http://127.0.0.1:{server.port}/v1", *SMALL, *more]) == 0
    said = capsys.readouterr()
    lines = {line.partition(":")[0]: line.partition(":")[2].strip() for line in said.out.splitlines() if ":" in line}
    assert lines["Successful requests"] == "6"
    assert lines["Failed requests"] == "0"
    assert lines["Total input tokens"] == str(6 * 24)
    assert lines["Total generated tokens"] == str(6 * 6)
    assert {"Mean TTFT (ms)", "Median TPOT (ms)", "P99 ITL (ms)", "P90 E2EL (ms)"} <= lines.keys()
    result = json.loads(path.read_text())
    assert result["model_id"] == "fake"
    assert (result["completed"], result["failed"], result["num_prompts"]) == (6, 0, 6)
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert result["max_concurrent_requests"] <= 2
    assert result["p99_ttft_ms"] >= result["median_ttft_ms"] > 0
    assert result["error_kinds"] == {}


def test_chats_are_texts_about_as_long_as_asked(server: Child, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, server, "--backend", "openai-chat", "--num-prompts", "3", "--save-detailed")
    assert result["completed"] == 3
    assert result["output_lens"] == [6] * 3
    alone = bench(capsys, server, "--backend", "openai-chat", "--num-prompts", "1", "--random-input-len", "8")
    grown = sum(result["input_lens"]) / 3 - alone["total_input_tokens"]  # without what the template adds
    assert grown == pytest.approx(24 - 8, abs=2)


def test_several_client_processes_share_the_load(server: Child, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--num-prompts", "7", "--max-concurrency", "4", "--processes", "2", "--save-detailed"]
    result = bench(capsys, server, *more)
    assert (result["completed"], result["failed"], result["num_prompts"]) == (7, 0, 7)
    assert result["output_lens"] == [6] * 7
    assert result["max_concurrent_requests"] <= 4
    assert result["start_times"] == sorted(result["start_times"])
    assert result["duration"] < sum(result["latencies"]) + 60
    assert main(["--port", str(server.port), "--model", "none", *SMALL, *more]) == 1


def test_shared_prefixes(server: Child, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prefix-repetition-prefix-len", "40", "--prefix-repetition-suffix-len", "8"]
    more = ["--prefix-repetition-output-len", "4", "--prefix-repetition-num-prefixes", "2", "--ignore-eos"]
    result = bench(capsys, server, "--dataset-name", "prefix_repetition", "--num-prompts", "4", *lengths, *more)
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (4, 4 * 48, 4 * 4)


def test_conversations_carry_their_history(server: Child, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--dataset-name", "multi-turn", "--num-prompts", "2", "--num-turns", "3", "--max-concurrency", "1"]
    result = bench(capsys, server, *more, "--save-detailed")
    assert result["completed"] == 6
    by_length = sorted(result["input_lens"])
    first, second, third = by_length[:2], by_length[2:4], by_length[4:]
    assert max(first) + 24 < min(second)
    assert max(second) + 24 < min(third)


def test_sessions_are_sent_what_is_new_and_ended(server: Child, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--dataset-name", "multi-turn", "--num-prompts", "2", "--num-turns", "3", "--sessions"]
    result = bench(capsys, server, *more)
    assert result["completed"] == 6
    assert result["error_kinds"] == {}
    assert server.said().count("POST /v1/sessions 201 ") == 2
    assert request(server.port, "GET", "/v1/sessions", key=None).json()["data"] == []


def test_prompts_from_a_file(server: Child, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "four", "output_tokens": 3}\n{"prompt": "prompts"}\n')
    more = ["--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "5", "--ignore-eos"]
    result = bench(capsys, server, *more, "--num-prompts", "4", "--temperature", "0", "--save-detailed")
    assert sorted(result["output_lens"]) == [3, 3, 5, 5]


def test_requests_that_fail_are_counted_by_kind(server: Child, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--random-input-len", "3000", "--random-range-ratio", "0.9"]  # some do not fit into the context
    result = bench(capsys, server, "--num-prompts", "12", *lengths, "--random-output-len", "60")
    assert result["error_kinds"] == {"HTTP 400": result["failed"]}
    assert result["failed"] > 0
    assert result["completed"] == 12 - result["failed"] > 0


def test_if_all_fail_so_does_the_command(server: Child, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--port", str(server.port), *SMALL, "--num-prompts", "2"]
    assert main([*arguments, "--model", "nobody"]) == 1
    said = capsys.readouterr()
    assert "2 x HTTP 404: " in said.out
    assert "nobody" in said.out
    assert main([*arguments, "--endpoint", "/nowhere"]) == 1


def test_without_a_server_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "1"]) == 1
    assert "bench serve: ConnectionRefusedError: GET http://127.0.0.1:1/v1/models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--dataset-name", "sonnet"], "invalid choice"),
        (["--dataset-name", "custom"], "go together"),
        (["--dataset-path", "a.jsonl"], "go together"),
        (["--sessions"], "goes with"),
        (["--dataset-name", "multi-turn", "--backend", "openai"], "needs --backend openai-chat"),
        (["--goodput", "itl:5"], "of ttft, tpot, e2el"),
        (["--goodput", "ttft"], "of ttft, tpot, e2el"),
        (["--percentile-metrics", "ttft,speed"], "no metric speed"),
        (["--metric-percentiles", "101"], "0 to 100"),
        (["--num-prompts", "0"], "at least 1"),
        (["--max-concurrency", "0"], "at least 1"),
        (["--request-rate", "0"], "must be positive"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(arguments)
    assert error.value.code == 2
    assert reason in capsys.readouterr().err
