"""lm-evaluation-harness finds what our server answers; the test runs where its command `lm_eval` is, such as after `uv
tool install 'lm-eval[api]'`.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import UsedServer
from tests.runs.processes import HANG_S
from tests.runs.rl import MODEL

pytestmark = pytest.mark.engine

_WORDS = ("act", "bee", "car", "dog", "ear", "fig", "gum", "hat", "ink", "jam", "key", "log")
_TASK = {
    "task": "reversed_words",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "generation_kwargs": {"until": ["<|end|>"], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0},
}
# By its name for the API: the route, and what a prompt is made of.
_APIS = {
    "local-chat-completions": ("chat/completions", "Reverse: {{word}}"),
    "local-completions": ("completions", "<|user|>Reverse: {{word}}<|end|><|assistant|>"),
}


def asked(url: str, route: str, prompt: str) -> str:
    """Return what the server says to a prompt, with the likeliest token at each place."""
    is_chat = route.startswith("chat")
    body: dict[str, Any] = {"model": str(MODEL), "max_tokens": 16, "temperature": 0.0}
    body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    (choice,) = httpx.post(f"{url}/v1/{route}", json=body, timeout=HANG_S).raise_for_status().json()["choices"]
    return choice["message"]["content"] if is_chat else choice["text"]


@pytest.mark.parametrize("api", list(_APIS))
def test_the_harness_finds_what_the_server_answers(vllm_server: UsedServer, tmp_path: Path, api: str) -> None:
    command = shutil.which("lm_eval")
    if command is None:
        pytest.skip("needs lm-evaluation-harness: uv tool install 'lm-eval[api]'")
    url, (route, template) = vllm_server.handle.url, _APIS[api]
    prompts = [template.replace("{{word}}", word) for word in _WORDS]
    said = [asked(url, route, prompt) for prompt in prompts]
    # The answers of the server to every other question are the right ones, so that the number tells something.
    rows = [
        {"word": word, "answer": answer if number % 2 else word.upper()}
        for number, (word, answer) in enumerate(zip(_WORDS, said, strict=True))
    ]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = _TASK | {"doc_to_text": template, "dataset_kwargs": {"data_files": {"test": str(tmp_path / "words.jsonl")}}}
    (tmp_path / "task.yaml").write_text(json.dumps(task))  # JSON is YAML
    settings = (
        f"model={MODEL},base_url={url}/v1/{route},num_concurrent=4,tokenized_requests=False,tokenizer_backend=None"
    )
    argv = [command, "--model", api, "--model_args", settings, "--tasks", "reversed_words"]
    argv += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    argv += ["--apply_chat_template"] * route.startswith("chat")
    surroundings = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(argv, env=surroundings, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())
    assert found["results"]["reversed_words"]["exact_match,none"] == 0.5
    assert found["n-samples"]["reversed_words"]["effective"] == len(_WORDS)
