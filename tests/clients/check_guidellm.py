"""`guidellm`: a load generator. All of its requests are answered, with the tokens that they asked for.

It makes prompts with a tokenizer, as a folder of Hugging Face has it: here MODEL is the folder of the driver's small
checkpoint, and its name the name of the served model, so no hub is asked for anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.checking import Target, run_checks

GUIDELLM = str(Path(sys.executable).with_name("guidellm"))
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 32, 12
TIMEOUT_S = 240
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",  # each takes seconds to start
}


def benchmark(target: Target, profile: str, request_format: str) -> Any:
    """Run `guidellm run` and give the one benchmark of its report."""
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    server = f"kind=openai_http,target={target.base_url},model={Path(target.model).name},api_key={target.api_key}"
    with tempfile.TemporaryDirectory(prefix="guidellm-") as folder:
        report = Path(folder) / "report.json"
        command = [GUIDELLM, "run", "--backend", f"{server},request_format={request_format}", "--profile", profile]
        command += ["--data", data, "--tokenizer", f"kind=huggingface_auto,model={target.model}"]
        command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--output", f"kind=json,path={report}"]
        done = subprocess.run(
            [*command, "--disable-console"],
            cwd=folder,
            env={**os.environ, **SETTINGS},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, (done.stdout + done.stderr).strip()[-600:]
        (found,) = json.loads(report.read_text())["benchmarks"]
        return found


def assert_answered(found: Any) -> None:
    counts = found["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"], counts["incomplete"]) == (NUM_REQUESTS, 0, 0), counts
    for request in found["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS, request


def check_chats_one_after_the_other(target: Target) -> None:
    assert_answered(benchmark(target, "kind=synchronous", "/v1/chat/completions"))


def check_completions_at_once(target: Target) -> None:
    assert_answered(benchmark(target, "kind=concurrent,streams=4", "/v1/completions"))


if __name__ == "__main__":
    run_checks(vars())
