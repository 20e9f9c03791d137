"""TRL's own trainers on a tiny model, given a test's tensors: B sequences, T tokens; imported by `trl_trainers`."""

from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

_PREFERENCE = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig), "cpo": (CPOTrainer, CPOConfig), "orpo": (ORPOTrainer, ORPOConfig),
}  # fmt: skip


def plain_settings(output: Path, **settings: Any) -> dict[str, Any]:
    """Return training arguments for one process on the CPU, which reports and saves nothing."""
    return {
        "output_dir": str(output), "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True,
        "gradient_checkpointing": False, "save_strategy": "no", "dataloader_pin_memory": False, **settings,
    }  # fmt: skip


def causal_model(directory: Path) -> PreTrainedModel:
    """Load a model in float64, in which TRL then computes as well."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)


def _trainer(
    classes: Any, model: Any, directory: Path, output: Path, rows: list[Any], settings: dict[str, Any], **more: Any
) -> Any:
    """Return a trainer of such classes, about to train `model`, with the tokenizer of `directory`."""
    kind, config = classes
    trainer = kind(
        model=model, args=config(**plain_settings(output, **settings)), train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(directory), **more,
    )  # fmt: skip
    trainer.model.train()
    return trainer


class GivenRollouts:
    """What a trainer of TRL would sample, score and run through the model; the arithmetic with it stays TRL's."""

    completions: list[list[int]]  # token ids
    rewards: list[float]  # one per completion
    sampler_logprobs: list[list[float]] | None = None  # as vLLM would report them, by completion
    forwards: list[Tensor]  # (B, T) each, the log-probabilities that the next forward passes return

    def _calculate_rewards(self, *_: object) -> Tensor:
        return torch.tensor(self.rewards, dtype=torch.float64)[:, None]

    def _get_per_token_logps_and_entropies(self, *_: object, **__: object) -> tuple[Tensor, Tensor, None]:
        logprobs_BT = self.forwards.pop(0)
        return logprobs_BT, torch.zeros_like(logprobs_BT), None


class GivenGrpo(GivenRollouts, trl.GRPOTrainer):
    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        texts = [""] * len(prompts)
        return [[5]] * len(prompts), self.completions, None, texts, self.sampler_logprobs, {}, None, None


class GivenRloo(GivenRollouts, trl.RLOOTrainer):
    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        return [[5]] * len(prompts), self.completions, [""] * len(prompts)


def _rl_trainer(classes: Any, model: Path, output: Path, settings: dict[str, Any], group_size: int) -> Any:
    """Return a trainer whose optimizer step is one micro-batch of one rank."""
    settings |= {"num_generations": group_size, "per_device_train_batch_size": 2 * group_size}
    rows, more = [{"prompt": "a"}], {"reward_funcs": lambda **_: []}
    trainer = _trainer(classes, causal_model(model), model, output, rows, settings, **more)
    trainer.reward_weights = trainer.reward_weights.double()
    trainer.current_gradient_accumulation_steps = 1  # which `transformers.Trainer.train` sets
    return trainer


def grpo_trainer(model: Path, output: Path, *, group_size: int = 4, **settings: Any) -> GivenGrpo:
    return _rl_trainer((GivenGrpo, trl.GRPOConfig), model, output, settings, group_size)


def rloo_trainer(model: Path, output: Path, *, group_size: int = 4, **settings: Any) -> GivenRloo:
    return _rl_trainer((GivenRloo, trl.RLOOConfig), model, output, settings, group_size)


_PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}]


def preference_trainer(kind: str, model: Path, output: Path, **settings: Any) -> Any:
    """Return a trainer of preference pairs: `dpo`, with `model` as its reference too, `cpo` or `orpo`."""
    more = {"ref_model": causal_model(model)} if kind == "dpo" else {}
    settings |= {} if kind == "dpo" else {"remove_unused_columns": False}  # as it asks for
    return _trainer(_PREFERENCE[kind], causal_model(model), model, output, _PAIRS, settings, **more)


def trained(
    kind: str, model: Path, output: Path, rows: list[Any], *, resume: Path | None = None, **settings: Any
) -> dict[int, float]:
    """Train with TRL in float32, in the order of the rows, and save; return the loss of each step."""
    classes = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": _PREFERENCE["dpo"]}[kind]
    own = {"save_strategy": "steps", "logging_steps": 1, "train_sampling_strategy": "sequential", **settings}
    more = {"peft_config": own.pop("peft_config", None)}
    trainer = _trainer(
        classes, AutoModelForCausalLM.from_pretrained(model, dtype="float32"), model, output, rows, own, **more
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


def kto_trainer(model: Path, output: Path, **settings: Any) -> trl.KTOTrainer:
    """Return a trainer of labelled answers, which is given what the reference says."""
    settings |= {"precompute_ref_log_probs": True, "train_sampling_strategy": "sequential"}
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    more = {"ref_model": causal_model(model)}
    return _trainer((trl.KTOTrainer, trl.KTOConfig), causal_model(model), model, output, rows, settings, **more)


def reward_trainer(model: Path, output: Path, **settings: Any) -> trl.RewardTrainer:
    """Return a trainer of a reward model with the decoder of `model`."""
    scoring = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float64)
    return _trainer((trl.RewardTrainer, trl.RewardConfig), scoring, model, output, _PAIRS, settings)
