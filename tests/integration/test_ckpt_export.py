"""`ckpt show` and `export` on real runs of two ranks: in bfloat16, and of experts."""

import base64
import io
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast import cli
from holdfast.config.training import TrainedModelConfig
from holdfast.run import manifest
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.init_from import load_weights_only
from holdfast.trainer.export import Export, TensorReader, export
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.policy import build_policy
from tests.builders.checkpoint_files import flip
from tests.conftest import ModelFactory
from tests.forking.engines import config_of, shared_engines
from tests.integration.conftest import PROMPT, Served
from tests.models.served import reference_logprobs, write_model
from tests.runs.training import run_sft, succeeded

pytestmark = [pytest.mark.ranks, pytest.mark.launch]

STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=1, tied=True)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, model: Path, sft_data: Path) -> RunDir:
    flags = ("--max-steps", str(STEPS), "--ckpt.interval", "1", "--parallel.num-ranks", "2")
    flags = (*flags, "--model.dtype", "bfloat16", "--model.init", "pretrained")
    return succeeded(run_sft(tmp_path_factory.mktemp("run") / "run", model, sft_data, *flags)).run_dir


@dataclass(frozen=True)
class Done:
    stdout: str
    stderr: str


def ckpt(*argv: object, code: int = 0) -> Done:
    """Run the command in this process, and check its exit code."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["ckpt", *map(str, argv)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as caught:
            cli.ckpt()
    finally:
        sys.argv = before
    done = Done(out.getvalue(), err.getvalue())
    assert (caught.value.code or 0) == code, done
    return done


@pytest.fixture(scope="module")
def masters(run_dir: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last step, exported in float32: all bits of the master weights."""
    target = tmp_path_factory.mktemp("masters") / "export"
    ckpt("export", run_dir.path, STEPS, "--to", target, "--dtype", "float32")
    return target


def bare_step(run_dir: RunDir, target: Path) -> Path:
    """Copy the last step as a training loop of one's own would have saved it: without config and tokenizer."""
    shutil.copytree(run_dir.checkpoint(STEPS), target)
    shutil.rmtree(target / "model")
    (target / "trainer" / "config.toml").unlink()
    listing = manifest.read_manifest(target)
    listing.files = manifest.describe_files(target)
    manifest.write_manifest(target, listing)
    return target


def test_an_export_equals_the_published_weights_bit_for_bit(run_dir: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "new" / "export"
    written = json.loads(ckpt("export", run_dir.path, STEPS, "--to", target, "--json").stdout)
    assert (written["directory"], written["dtype"], written["files"]) == (str(target), "bfloat16", 1)
    published = run_dir.weights_of(STEPS)
    names = {str(path.relative_to(published)) for path in published.rglob("*")} - {"manifest.json"}
    assert {str(path.relative_to(target)) for path in target.rglob("*")} - {"manifest.json"} == names
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= names
    for name in names:
        assert (target / name).read_bytes() == (published / name).read_bytes(), name
    listing, source = manifest.verify(target), manifest.read_manifest(run_dir.checkpoint(STEPS))
    assert (listing.kind, listing.step, listing.run_id) == ("weights", STEPS, source.run_id)
    assert written["parameters"] == sum(tensor.numel() for tensor in load_file(target / "model.safetensors").values())


def test_an_export_loads_in_transformers_with_the_trainers_logits(run_dir: RunDir, masters: Path, mesh: Mesh) -> None:
    config = TrainedModelConfig.model_validate({"name": str(run_dir.checkpoint(STEPS) / "model")})
    policy = build_policy(config, mesh, seed=0, weights=False)
    load_weights_only(trained_tensors(policy.hf_model), run_dir.checkpoint(STEPS))
    loaded, findings = AutoModelForCausalLM.from_pretrained(masters, output_loading_info=True)
    assert not findings["missing_keys"] and not findings["unexpected_keys"] and loaded.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(masters)("abc")["input_ids"]
    ids = torch.randint(5, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    policy.eval()
    with torch.no_grad():
        ours, theirs = policy.hf_model.get_decoder()(ids), loaded.eval().get_decoder()(ids)
        head = policy.hf_model.get_output_embeddings()
        assert head is not None
        assert torch.equal(head(ours.last_hidden_state), loaded.lm_head(theirs.last_hidden_state))


@pytest.mark.engine
def test_vllm_serves_an_export(masters: Path, tmp_path: Path) -> None:
    with Served(shared_engines().start(config_of(masters), tmp_path / "inference.log").wait_ready()) as server:
        (choice,) = server.choices(max_tokens=16)
    assert choice["logprobs"] == pytest.approx(reference_logprobs(masters, PROMPT, choice["token_ids"]), abs=1e-3)


def test_a_step_without_config_is_refused(run_dir: RunDir, tmp_path: Path) -> None:
    bare_step(run_dir, tmp_path / "loop" / "step_2")
    done = ckpt("export", tmp_path / "loop", 2, "--to", tmp_path / "x", code=2)
    assert "has no model/config.json, as a training program writes it" in done.stderr
    for form in ("trainer", "dcp"):
        done = ckpt("export", tmp_path / "loop", 2, "--to", tmp_path / "x", "--format", form, code=2)
        assert f"--format {form} takes steps of sft and dpo with AdamW" in done.stderr
    assert not list(tmp_path.glob("*x*"))


def test_a_damaged_step_is_not_exported_and_nothing_is_written_over(run_dir: RunDir, tmp_path: Path) -> None:
    copy = RunDir(shutil.copytree(run_dir.path, tmp_path / "run"))
    flip(copy.checkpoint(1) / "trainer" / "__1_0.distcp")
    for argv in (("export", 1, "--to", tmp_path / "x"), ("show", 1)):
        assert "__1_0.distcp is damaged" in ckpt(argv[0], copy.path, *argv[1:], code=2).stderr
    assert not (tmp_path / "x").exists()
    (tmp_path / "mine").mkdir()
    done = ckpt("export", copy.path, 2, "--to", tmp_path / "mine", code=2)
    assert "exists already; nothing is written over" in done.stderr


def test_show_tells_counters_tensors_and_settings(run_dir: RunDir) -> None:
    document = json.loads(ckpt("show", run_dir.path, STEPS, "--json").stdout)
    assert document["counters"]["step"] == document["manifest"]["step"] == STEPS
    assert document["manifest"]["world_size"] == 2 and document["config"]["model"]["dtype"] == "bfloat16"
    published = load_file(run_dir.weights_of(STEPS) / "model.safetensors")
    elements = sum(tensor.numel() for tensor in published.values())
    groups = document["tensors"]
    assert groups["model"] == {"tensors": len(published), "elements": elements, "bytes": 4 * elements}
    assert groups["optim"]["tensors"] == 3 * len(published)
    out = ckpt("show", run_dir.path, "latest").stdout
    assert "model.dtype" in out and f"{elements:,}" in out and "config fingerprint" in out


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NAME = "model.safetensors"


@pytest.fixture(scope="module")
def experts(tiny_model: ModelFactory) -> Path:
    return tiny_model("qwen3_moe", tied=False, **EXPERTS)


@pytest.fixture(scope="module")
def run_of_experts(tmp_path_factory: pytest.TempPathFactory, experts: Path, sft_data: Path) -> RunDir:
    flags = ("--model.init", "pretrained", "--max-steps", "2", "--ckpt", "--parallel.num-ranks", "2")
    return succeeded(run_sft(tmp_path_factory.mktemp("run") / "run", experts, sft_data, *flags)).run_dir


def test_sft_publishes_original_names_with_its_checkpoints_values(run_of_experts: RunDir, experts: Path) -> None:
    published, original = load_file(run_of_experts.weights_of(2) / NAME), load_file(experts / NAME)
    assert {name: one.shape for name, one in published.items()} == {name: one.shape for name, one in original.items()}
    reader = TensorReader(run_of_experts.checkpoint(2) / "trainer")
    loaded = AutoModelForCausalLM.from_pretrained(run_of_experts.weights_of(2)).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in loaded
    for name, tensor in loaded.items():
        assert torch.equal(reader.read(f"model.{name}"), tensor), name


def test_an_export_keeps_names_and_bits(run_of_experts: RunDir, tmp_path: Path) -> None:
    published = run_of_experts.weights_of(2)
    exported = tmp_path / "exported"
    export(Export(run_of_experts.checkpoint(2), exported))
    assert (exported / NAME).read_bytes() == (published / NAME).read_bytes()
    assert sorted(path.name for path in exported.iterdir()) == sorted(path.name for path in published.iterdir())


class _Hub(BaseHTTPRequestHandler):
    """A hub as far as an upload goes: it keeps the files of a commit by their repository."""

    kept: ClassVar[dict[str, dict[str, bytes]]] = {}

    def do_POST(self) -> None:
        status, answer = self._answer(self.path.split("/")[2:], self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, path: list[str], body: bytes) -> tuple[int, dict[str, object]]:
        if self.headers["Authorization"] != "Bearer hf_right":
            return 401, {"error": "Invalid user token."}
        if path == ["repos", "create"]:
            asked = json.loads(body)
            self.kept[asked["name"]] = {"visibility": asked["visibility"].encode()}
            return 200, {"url": f"http://{self.headers['Host']}/me/{asked['name']}"}
        if path == ["validate-yaml"]:
            return 200, {"errors": [], "warnings": []}
        if path[3] == "preupload":
            names = [one["path"] for one in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        assert path[3] == "commit"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.kept[path[2]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"http://{self.headers['Host']}/me/x/commit/0", "commitOid": "0"}

    def log_message(self, format: str, *args: object) -> None: ...


def test_an_export_is_uploaded_with_a_card(
    run_dir: RunDir, model: Path, sft_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, hub = tmp_path / "to", ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    with hub, ThreadPoolExecutor(1) as serving, ExitStack() as ended:
        serving.submit(hub.serve_forever, 0.01)
        ended.callback(hub.shutdown)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        asked = ("export", run_dir.path, STEPS, "--to-hub", "me/mine", "--private", "--to")
        refused = ckpt(*asked, to, code=1)
        assert "refused" in refused.stderr and f"`hf upload me/mine {to}`" in refused.stderr and to.is_dir()
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        done = ckpt(*asked, tmp_path / "again")
    assert f"uploaded to http://127.0.0.1:{hub.server_port}/me/mine" in done.stdout
    kept = _Hub.kept["mine"]
    assert kept.pop("visibility") == b"private"
    assert kept == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    card = ModelCard(kept["README.md"].decode())
    assert card.data.library_name == "transformers" and card.data.tags == ["holdfast", "sft"]
    assert f"| data.name | {sft_data.name} |" in card.text and str(sft_data.parent) not in card.content
    assert card.data.base_model is None and str(model.parent) not in card.content, "paths say who trained where"
    for flags, said in (
        (("--to-hub", "a/b/c"), "Give USER/NAME"),
        (("--private",), "is of the repository of --to-hub"),
    ):
        assert said in ckpt("export", run_dir.path, STEPS, "--to", tmp_path / "no", *flags, code=2).stderr
