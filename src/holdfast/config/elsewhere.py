"""What other systems call a setting: the hints for unknown flags and keys (docs/coming_from.md has all names).

A name stands for the first of its settings that the command has, or else for a sentence. A name that is not here is
compared by spelling. A wrong hint trains the wrong thing, so a name without a counterpart says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ENVIRONMENTS = "tasks and rewards come from orchestrator.environments; rows of a file are tasks with id = 'jsonl'"
_BATCH = "a batch is orchestrator.problems_per_step x orchestrator.group_size rollouts, whatever the number of GPUs"
_STEPS = "a run has max_steps steps; an epoch is the number of rows by data.batch_size"
_VLLM = "the engine is always vLLM, a process of its own: see inference.engine and inference.server"

# Old name: settings to look for in this order, and what is said if the command has none of them.
ELSEWHERE: dict[str, tuple[tuple[str, ...], str]] = {
    # TRL
    "model_name_or_path": (("model.name",), ""),
    "dataset_name": (("data.name",), _ENVIRONMENTS),
    "dataset_train_split": (("data.split",), _ENVIRONMENTS),
    "dataset_num_proc": (("data.num_proc",), _ENVIRONMENTS),
    "train_dataset": (("data.name",), _ENVIRONMENTS),
    "learning_rate": (("optim.lr", "trainer.optim.lr"), ""),
    "lr": (("optim.lr", "trainer.optim.lr"), ""),
    "lr_scheduler_type": (("optim.schedule", "trainer.optim.schedule"), ""),
    "warmup_ratio": ((), "optim.warmup_steps counts steps"),
    "warmup_steps": (("optim.warmup_steps", "trainer.optim.warmup_steps"), ""),
    "weight_decay": (("optim.weight_decay", "trainer.optim.weight_decay"), ""),
    "max_grad_norm": (("optim.max_grad_norm", "trainer.optim.max_grad_norm"), ""),
    "adam_beta1": (("optim.betas", "trainer.optim.betas"), ""),
    "adam_beta2": (("optim.betas", "trainer.optim.betas"), ""),
    "adam_epsilon": (("optim.eps", "trainer.optim.eps"), ""),
    "num_train_epochs": ((), _STEPS),
    "epochs": ((), _STEPS),
    "per_device_train_batch_size": (("data.micro_batch_size",), _BATCH),
    "train_batch_size": (("data.batch_size",), _BATCH),
    "gradient_accumulation_steps": (
        (),
        "a step takes a whole batch, whatever the number of ranks: data.batch_size rows, and in rl "
        "orchestrator.problems_per_step x orchestrator.group_size rollouts",
    ),
    "gradient_checkpointing": (("model.activation_checkpointing", "trainer.model.activation_checkpointing"), ""),
    "attn_implementation": (("model.attention", "trainer.model.attention"), ""),
    "bf16": (("model.dtype", "trainer.model.dtype"), ""),
    "fp16": ((), "there is no float16: model.dtype is float32 or bfloat16"),
    "max_length": (("data.seq_len", "orchestrator.seq_len", "seq_len"), ""),
    "max_seq_length": (("data.seq_len", "orchestrator.seq_len", "seq_len"), ""),
    "max_prompt_length": ((), "orchestrator.seq_len is the most tokens of prompt and answers together"),
    "packing": (("data.pack",), "rows always hold several samples"),
    "assistant_only_loss": (("data.train_on",), "what the policy sampled is trained, and nothing else"),
    "completion_only_loss": (("data.train_on",), "what the policy sampled is trained, and nothing else"),
    "use_peft": (("model.lora.rank", "trainer.model.lora.rank"), ""),
    "lora_r": (("model.lora.rank", "trainer.model.lora.rank"), ""),
    "lora_rank": (("model.lora.rank", "trainer.model.lora.rank"), ""),
    "lora_alpha": (("model.lora.alpha", "trainer.model.lora.alpha"), ""),
    "lora_dropout": (("model.lora.dropout", "trainer.model.lora.dropout"), ""),
    "lora_target_modules": (("model.lora.target_modules", "trainer.model.lora.target_modules"), ""),
    "load_in_4bit": ((), "there is no quantised training"),
    "eval_steps": (("val_interval", "eval.interval"), ""),
    "eval_strategy": (("val_interval", "eval.interval"), ""),
    "save_steps": (("ckpt.interval",), ""),
    "save_strategy": (("ckpt.interval",), ""),
    "save_total_limit": (("ckpt.keep",), ""),
    "resume_from_checkpoint": (("ckpt.resume_step",), ""),
    "logging_steps": ((), "every step is logged"),
    "report_to": (("tracking.backends",), ""),
    "run_name": (("tracking.name",), ""),
    "push_to_hub": ((), "nothing is uploaded to a hub: weights/step_N is a directory that `hf upload` takes"),
    "deepspeed": ((), "the trainer is FSDP2: see parallel"),
    "fsdp": ((), "the trainer is FSDP2: see parallel"),
    "beta": (("loss.beta", "trainer.kl.coef", "kl.coef"), ""),
    "loss_type": (("loss.type", "trainer.loss.type"), ""),
    "label_smoothing": (("loss.label_smoothing",), ""),
    "num_generations": (("orchestrator.group_size", "group_size"), ""),
    "max_completion_length": (("orchestrator.sampling.max_tokens", "sampling.max_tokens"), ""),
    "max_new_tokens": (("orchestrator.sampling.max_tokens", "sampling.max_tokens"), ""),
    "temperature": (("orchestrator.sampling.temperature", "sampling.temperature"), ""),
    "top_p": (("orchestrator.sampling.top_p", "sampling.top_p"), ""),
    "top_k": (("orchestrator.sampling.top_k", "sampling.top_k"), ""),
    "min_p": (("orchestrator.sampling.min_p", "sampling.min_p"), ""),
    "reward_funcs": ((), _ENVIRONMENTS),
    "epsilon": (("trainer.loss.clip_low", "loss.clip_low"), ""),
    "epsilon_high": (("trainer.loss.clip_high", "loss.clip_high"), ""),
    "num_iterations": (("trainer.updates.epochs", "updates.epochs"), ""),
    "scale_rewards": (("trainer.advantage", "advantage"), ""),
    "sync_ref_model": (("trainer.kl.refresh_interval", "kl.refresh_interval"), ""),
    "use_vllm": ((), _VLLM),
    "vllm_mode": ((), _VLLM),
    "vllm_gpu_memory_utilization": (
        ("inference.engine.gpu_memory_utilization", "engine.gpu_memory_utilization"),
        "",
    ),
    "vllm_tensor_parallel_size": (("inference.engine.tensor_parallel_size", "engine.tensor_parallel_size"), ""),
    # prime-rl, whose keys are dotted as they are there
    "batch_size": (("data.batch_size",), _BATCH),
    "orchestrator.batch_size": ((), _BATCH),
    "rollouts_per_example": (("orchestrator.group_size", "group_size"), ""),
    "env": (("orchestrator.environments", "environments"), ""),
    "max_async_level": (("async_level",), ""),
    "max_off_policy_steps": (("async_level",), ""),
    "seq_len": (("data.seq_len", "orchestrator.seq_len"), ""),
    "keep_last": (("ckpt.keep",), ""),
    "wandb": (("tracking.backends",), ""),
    "wandb.project": (("tracking.project",), ""),
    "wandb.name": (("tracking.name",), ""),
    "scheduler.type": (("optim.schedule", "trainer.optim.schedule"), ""),
    "scheduler.warmup_steps": (("optim.warmup_steps", "trainer.optim.warmup_steps"), ""),
    "optim.max_norm": (("optim.max_grad_norm", "trainer.optim.max_grad_norm"), ""),
    "model.ac": (("model.activation_checkpointing", "trainer.model.activation_checkpointing"), ""),
    "model.attn": (("model.attention", "trainer.model.attention"), ""),
    "parallel.tp": (("inference.engine.tensor_parallel_size", "engine.tensor_parallel_size"), ""),
    "parallel.dp": (("inference.engines", "engines"), ""),
    "model.tp": ((), "the trainer has no tensor parallelism: see parallel"),
    "model.cp": (("parallel.sequence_parallel", "trainer.parallel.sequence_parallel"), ""),
    "gpu_memory_utilization": (("inference.engine.gpu_memory_utilization", "engine.gpu_memory_utilization"), ""),
    "max_model_len": (("inference.model.max_len", "model.max_len"), ""),
    "trainer_gpu_ids": ((), "CUDA_VISIBLE_DEVICES says which GPUs; trainer.parallel.num_ranks how many train"),
    "inference_gpu_ids": ((), "CUDA_VISIBLE_DEVICES says which GPUs; inference.engines how many engines there are"),
    "val.interval": (("val_interval",), ""),
    "data.path": (("data.name",), _ENVIRONMENTS),
    "log.level": ((), "logs are whole; log_format says what the terminal gets"),
    "micro_batch_size": (("data.micro_batch_size",), "the trainer packs rows: trainer.row_tokens"),
    "output": (("output_dir",), ""),
}
_SIMILAR = 0.75


def hint(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?``, a sentence with a space before it, or an empty string for an unknown setting.

    Args:
        name: dotted, with or without dashes, as it was given.
        known: the dotted keys of the command.
    """
    keys = list(known)
    given = name.lstrip("-").replace("-", "_").lower()
    parts = given.split(".")
    for begin in range(len(parts)):
        entry = ELSEWHERE.get(".".join(parts[begin:]))
        if entry is None:
            continue
        settings, said = entry
        found = next((one for one in settings if one in keys and one != given), None)
        return f" Did you mean '{_as_given(found, name)}'?" if found else f" Here {said}." if said else ""
    by_end = sorted((one for one in keys if one.rpartition(".")[2] == parts[-1]), key=lambda one: (len(one), one))
    if by_end:
        return f" Did you mean {' or '.join(repr(_as_given(one, name)) for one in by_end[:3])}?"
    similar = difflib.get_close_matches(given, keys, n=1, cutoff=_SIMILAR)
    similar = similar or difflib.get_close_matches(parts[-1], [one for one in keys if "." not in one], 1, _SIMILAR)
    return f" Did you mean '{_as_given(similar[0], name)}'?" if similar else ""


def _as_given(key: str, name: str) -> str:
    return f"--{key.replace('_', '-')}" if name.startswith("--") else key
