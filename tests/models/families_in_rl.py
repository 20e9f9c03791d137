"""Families through `rl`, as vLLM samples them. `python -m tests.models.families_in_rl [NAME ...]` measures them."""

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import HoldfastError
from holdfast.launcher.restart_policy import engine_failure
from holdfast.launcher.supervisor import error_message
from holdfast.run.run_dir import RunDir
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.parity_check import check_model
from holdfast.trainer.model.policy import build_policy, predict
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.tensor_names import TensorLayout, names_in_files
from holdfast.trainer.rl.kl import k3
from holdfast.trainer.rl.mismatch import LIMITS
from tests.forking.engines import config_of, shared_engines
from tests.models.families import FAMILIES, Family, write_model
from tests.pages.families import IN_RL
from tests.runs.processes import HANG_S

TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "reverse_text" / "base"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# vLLM's attention on CPU takes heads of 32, 64, 80, 96, ... numbers.
_SIZES = {
    "num_attention_heads": 2, "head_dim": 32, "num_key_value_heads": 2, "num_kv_heads": 2, "n_head": 2, "n_heads": 2,
    "num_heads": 2, "attention_heads": 2, "v_head_dim": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "kv_lora_rank": 64,
}  # fmt: skip
# Of these vLLM, and every published model, has one tensor for both ends.
_TIED = ("gemma2", "cohere", "cohere2", "bloom", "lfm2")
# vLLM makes a shared expert of any model whose config has a size for it; these have none.
_WITHOUT_SHARED_EXPERT = ("qwen3_moe",)
_MAMBA_KINDS = ("mamba2",)  # whose heads are none of attention
_COMMON = ("num_attention_heads", "head_dim", "num_key_value_heads")
_CAUSES = {
    "cohere2": "a window of vLLM's holds one token more (without effect where model.max_len is no longer than it)",
    "doge": "vLLM leaves out the mask that its layers compute",
    "ernie4_5_moe": "vLLM's router on CPU leaves out the correction bias of the experts",
}
"""Why engine and trainer differ, where it is known."""
_HIDDEN = 64
_PROMPTS, _SAMPLES, _TOKENS = 4, 4, 16
_MOST_REASON = 130


class Refused(Exception):
    """A family does not go through `rl`, and why."""


def names() -> list[str]:
    return [family.name for family in FAMILIES]


def read_results() -> dict[str, str]:
    """Return what was measured: name -> `yes`, or `no: ` and the reason."""
    return json.loads(IN_RL.read_text())


def for_engines(family: Family) -> Family:
    """Return the family with heads that vLLM has on CPU."""
    special = json.loads((TOKENIZER / "config.json").read_text())
    common = ("vocab_size", "bos_token_id", "eos_token_id")
    fields = {key: special[key] for key in common if special.get(key) is not None}
    if "vocab_size_per_layer_input" in family.fields:
        fields["vocab_size_per_layer_input"] = fields["vocab_size"]
    if family.kind in _TIED:
        fields["tie_word_embeddings"] = True
    if family.kind == "deepseek_v3":  # as all published models say
        fields["topk_method"] = "noaux_tc"
    if family.kind not in _MAMBA_KINDS:
        fields |= {key: size for key, size in _SIZES.items() if key in family.fields or key in _COMMON}
    if family.kind == "lfm2":  # as all published models say
        fields |= {"block_dim": _HIDDEN, "conv_dim": _HIDDEN, "conv_dim_out": _HIDDEN}
    if family.kind in ("falcon", "zamba2"):  # they compute it
        fields.pop("head_dim")
    if family.kind == "codegen":  # its heads are in four groups
        fields = {key: size for key, size in fields.items() if key not in ("n_head", "num_attention_heads")}
    if family.kind == "deepseek_v3":  # the only ones that vLLM has on CPU
        fields |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    fields = family.fields | fields
    if family.kind in _WITHOUT_SHARED_EXPERT:
        fields.pop("shared_expert_intermediate_size", None)
    return replace(family, fields=fields)


def measure(name: str, directory: Path, mesh: Mesh) -> float:
    """Return the mismatch KL, in nats a token, after an update. Raises `Refused`: trainer or vLLM does not take it."""
    family = for_engines(next(family for family in FAMILIES if family.name == name))
    model = write_model(family, directory / "model", seed=5)
    for file in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / file, model)
    try:
        policy = build_policy(TrainedModelConfig(name=str(model)), mesh, seed=0)
        check_model(policy, mesh, name=str(model), pack=True, dtype="float32")
    except HoldfastError as error:
        raise Refused(_one_line(str(error).removeprefix(f"model.name = '{model}': "), directory)) from None
    with torch.no_grad():
        generator = torch.Generator().manual_seed(6)
        for parameter in policy.parameters():  # in all directions: a copy of old ones would not show by size alone
            parameter.mul_(1.05).add_(0.02 * torch.randn(parameter.shape, generator=generator))
    layout = TensorLayout(policy.hf_model, names_in_files(str(model)))
    tokenizer = AutoTokenizer.from_pretrained(model)
    publisher = WeightPublisher(RunDir(directory / "run"), policy, tokenizer, mesh, dtype="float32", layout=layout)
    answers = _sampled(model, publisher.publish(1), directory)
    policy.eval()
    gaps = []
    for prompt, choices in answers:
        for choice in choices:
            ids = np.asarray(prompt + choice["token_ids"], dtype=np.int32)
            sample = Sample(ids, np.arange(len(ids)) >= len(prompt))
            micro = build_micro_batch([sample], [0], pack=policy.layout.packs, device=mesh.device)
            with torch.no_grad():
                ours_N = predict(policy, micro).logprobs_N
            gaps.append(ours_N.double() - torch.tensor(choice["logprobs"], dtype=torch.float64))
    mismatch_kl = float(k3(torch.cat(gaps)).mean())
    if mismatch_kl > LIMITS["float32"]:
        cause = f": {_CAUSES[name]}" if name in _CAUSES else ""
        raise Refused(f"mismatch_kl is {mismatch_kl:.0e}: rl ends before its first step{cause}")
    return mismatch_kl


def _sampled(model: Path, published: Path, directory: Path) -> list[tuple[list[int], list[dict[str, Any]]]]:
    """Return prompts and the choices that an engine sampled by the published weights."""
    log = directory / "inference.log"
    server = shared_engines().start(config_of(model, max_len=128), log)
    try:
        server.wait_ready()
        answer = httpx.post(f"{server.url}/update_weights", json={"path": str(published), "version": 1}, timeout=HANG_S)
        if answer.status_code != 200:
            raise Refused(_one_line(engine_failure(log) or answer.json()["error"], directory))
        generator = np.random.default_rng(1)
        answers = []
        for number in range(_PROMPTS):
            prompt = generator.integers(5, 30, 3 + 5 * number).tolist()
            body = {"token_ids": prompt, "seeds": list(range(_SAMPLES)), "max_tokens": _TOKENS}
            answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=HANG_S)
            if answer.status_code != 200:
                raise Refused(_one_line(engine_failure(log) or answer.text, directory))
            choices = answer.json()["choices"]
            if any(None in choice["logprobs"] for choice in choices):
                raise Refused("vLLM gives NaN after an update of the weights: rl ends at its first answer")
            answers.append((prompt, choices))
        return answers
    except RuntimeError:
        raise Refused(_one_line(engine_failure(log) or error_message(log) or server.log()[-400:], directory)) from None
    except httpx.TransportError as error:
        raise Refused(_one_line(engine_failure(log) or str(error), directory)) from None
    finally:
        server.kill()


def _one_line(reason: str, directory: Path) -> str:
    line = " ".join(reason.replace(str(directory), "").replace("|", "/").split())
    return line if len(line) <= _MOST_REASON else f"{line[:_MOST_REASON].rsplit(' ', 1)[0]} ..."


def main(chosen: list[str]) -> None:
    results = read_results()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    mesh = Mesh(rank=0, world_size=1, device=torch.device("cpu"), device_mesh=device_mesh)
    for name in chosen or names():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                mismatch_kl = measure(name, Path(scratch), mesh)
                results[name] = "yes"
                print(f"{name}: {mismatch_kl:.1e}", flush=True)
            except Refused as refusal:
                results[name] = f"no: {refusal}"
                print(f"{name}: {refusal}", flush=True)
        IN_RL.write_text(json.dumps({key: results[key] for key in names() if key in results}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
