"""What those who come from other programs are told: of a flag that there is not, and by the table of the docs."""

import ast
import re
from dataclasses import fields
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from holdfast.config import DpoConfig, RlConfig, SftConfig
from holdfast.config.elsewhere import hint, names_elsewhere
from holdfast.config.load import flags_of
from tests.conftest import ROOT

COMMANDS = {"sft": SftConfig, "dpo": DpoConfig, "rl": RlConfig}
KEYS = {name: [flag.key for flag in flags_of(command).values()] for name, command in COMMANDS.items()}

# Flags of TRL: what is said by `sft`, `dpo` and `rl`. A word that begins with a capital letter begins a sentence.
TRL = {
    "model_name_or_path": ("model.name",) * 3,
    "dataset_name": ("data.name", "data.name", "Here tasks"),
    "dataset_num_proc": ("data.num_proc", "data.num_proc", "Here tasks"),
    "learning_rate": ("optim.lr", "optim.lr", "trainer.optim.lr"),
    "lr_scheduler_type": ("optim.schedule", "optim.schedule", "trainer.optim.schedule"),
    "warmup_ratio": ("Here optim.warmup_steps counts",) * 3,
    "weight_decay": ("optim.weight_decay", "optim.weight_decay", "trainer.optim.weight_decay"),
    "max_grad_norm": ("optim.max_grad_norm", "optim.max_grad_norm", "trainer.optim.max_grad_norm"),
    "adam_beta1": ("optim.betas", "optim.betas", "trainer.optim.betas"),
    "adam_epsilon": ("optim.eps", "optim.eps", "trainer.optim.eps"),
    "num_train_epochs": ("epochs", "epochs", "Here a run has max_steps"),
    "per_device_train_batch_size": ("data.micro_batch_size", "data.micro_batch_size", "Here a batch is"),
    "gradient_accumulation_steps": ("Here a step takes",) * 3,
    "gradient_checkpointing": (
        "model.activation_checkpointing", "model.activation_checkpointing", "trainer.model.activation_checkpointing"
    ),
    "attn_implementation": ("model.attention", "model.attention", "trainer.model.attention"),
    "bf16": ("model.dtype", "model.dtype", "trainer.model.dtype"),
    "fp16": ("Here there is no float16",) * 3,
    "max_length": ("data.seq_len", "data.seq_len", "orchestrator.seq_len"),
    "max_seq_length": ("data.seq_len", "data.seq_len", "orchestrator.seq_len"),
    "max_prompt_length": ("Here orchestrator.seq_len is",) * 3,
    "packing": ("data.pack", "data.pack", "Here rows always"),
    "assistant_only_loss": ("data.train_on", "data.train_on", "Here what the policy"),
    "use_peft": ("model.lora.rank", "model.lora.rank", "trainer.model.lora.rank"),
    "lora_r": ("model.lora.rank", "model.lora.rank", "trainer.model.lora.rank"),
    "lora_alpha": ("model.lora.alpha", "model.lora.alpha", "trainer.model.lora.alpha"),
    "lora_target_modules": (
        "model.lora.target_modules", "model.lora.target_modules", "trainer.model.lora.target_modules"
    ),
    "load_in_4bit": ("Here there is no quantised",) * 3,
    "eval_steps": ("val_interval", "val_interval", "eval.interval"),
    "save_steps": ("ckpt.interval",) * 3,
    "save_total_limit": ("ckpt.keep",) * 3,
    "resume_from_checkpoint": ("ckpt.resume_step",) * 3,
    "logging_steps": ("Here every step",) * 3,
    "report_to": ("tracking.backends",) * 3,
    "run_name": ("tracking.name",) * 3,
    "push_to_hub": ("Here nothing is uploaded",) * 3,
    "beta": ("", "loss.beta", "trainer.kl.coef"),
    "loss_type": ("", "loss.type", "trainer.loss.type"),
    "num_generations": ("", "", "orchestrator.group_size"),
    "max_completion_length": ("", "", "orchestrator.sampling.max_tokens"),
    "temperature": ("", "", "orchestrator.sampling.temperature"),
    "use_vllm": ("Here the engine is",) * 3,
    "reward_funcs": ("Here tasks",) * 3,
    "epsilon_high": ("", "", "trainer.loss.clip_high"),
    "num_iterations": ("", "", "trainer.updates.epochs"),
}  # fmt: skip

# Keys of prime-rl: what `rl` says.
PRIME_RL = {
    "orchestrator.batch_size": "Here a batch is",
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.env": "orchestrator.environments",
    "orchestrator.max_off_policy_steps": "async_level",
    "max_async_level": "async_level",
    "orchestrator.model.max_model_len": "inference.model.max_len",
    "ckpt.keep_last": "ckpt.keep",
    "wandb": "tracking.backends",
    "wandb.project": "tracking.project",
    "wandb.name": "tracking.name",
    "trainer.scheduler.type": "trainer.optim.schedule",
    "trainer.scheduler.warmup_steps": "trainer.optim.warmup_steps",
    "trainer.optim.max_norm": "trainer.optim.max_grad_norm",
    "trainer.model.ac": "trainer.model.activation_checkpointing",
    "trainer.model.attn": "trainer.model.attention",
    "trainer.model.tp": "Here the trainer has no tensor",
    "trainer.model.cp": "trainer.parallel.sequence_parallel",
    "inference.parallel.tp": "inference.engine.tensor_parallel_size",
    "inference.parallel.dp": "inference.engines",
    "inference.gpu_memory_utilization": "inference.engine.gpu_memory_utilization",
    "trainer_gpu_ids": "Here CUDA_VISIBLE_DEVICES",
    "inference_gpu_ids": "Here CUDA_VISIBLE_DEVICES",
    "log.level": "Here logs are whole",
    "val.interval": "",
    "data.path": "Here tasks",
    "trainer.optim.learning_rate": "trainer.optim.lr",
    "trainer.data.micro_batch_size": "Here the trainer packs",
    "orchestrator.sampling.max_new_tokens": "orchestrator.sampling.max_tokens",
    "weight_broadcast": "",
    "bench": "",
}


def _expected(said: str, *, flag: bool) -> str:
    if not said or said[0].isupper():
        return said and f" {said}"
    return f" Did you mean '--{said.replace('_', '-')}'?" if flag else f" Did you mean '{said}'?"


@pytest.mark.parametrize("name", TRL)
def test_flags_of_trl(name: str) -> None:
    for command, said in zip(COMMANDS, TRL[name], strict=True):
        wanted = _expected(said, flag=True)
        given = hint(f"--{name}", KEYS[command])
        assert given.startswith(wanted) and bool(given) == bool(wanted), (command, given)


@pytest.mark.parametrize("name", PRIME_RL)
def test_keys_of_prime_rl(name: str) -> None:
    wanted = _expected(PRIME_RL[name], flag=False)
    given = hint(name, KEYS["rl"])
    assert given.startswith(wanted) and bool(given) == bool(wanted), given


def test_every_name_of_another_system_stands_for_settings_that_there_are() -> None:
    known = {key for keys in KEYS.values() for key in keys}
    alone = {key.partition(".")[2] for key in KEYS["rl"]}  # of `trainer`, `orchestrator` and `inference`
    for theirs, one in names_elsewhere().items():
        assert (one["settings"] or one["said"]) and set(one["settings"]) <= known | alone, theirs


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--lr", " Did you mean '--optim.lr'?"),
        ("--data.learning-rate", " Did you mean '--optim.lr'?"),
        ("--name", " Did you mean '--data.name' or '--model.name'?"),
        ("--max-stepz", " Did you mean '--max-steps'?"),
        ("--data.batch", ""),
        ("--unlike_any", ""),
    ],
)
def test_by_its_last_part_or_its_spelling(flag: str, said: str) -> None:
    known = ["optim.lr", "output_dir", "eval.output_dir", "data.name", "model.name", "max_steps"]
    assert hint(flag, known) == said


OPTION = re.compile(r"`([\w.]+)`(?: \(`?([\w.-]+)`?\))?")


def rows() -> list[dict[str, str]]:
    section = (ROOT / "docs" / "coming_from.md").read_text().split("\n## RL\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def options(cell: str) -> list[tuple[str, str]]:
    """Names and the defaults in brackets behind them; empty where there are none."""
    return [(name, default) for name, default in OPTION.findall(cell)]


def found(config: type[BaseModel], key: str) -> Any:
    """The default of a dotted key, also below sections that are unset."""
    name, _, rest = key.partition(".")
    assert name in config.model_fields, f"{key}: {config.__name__} has no {name}"
    field = config.model_fields[name]
    if not rest:
        return field.default
    kinds = [field.annotation, *get_args(field.annotation)]
    return found(next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), rest)


def equal(value: Any, text: str) -> bool:
    return str(value) == text or (isinstance(value, float) and float(text) == value)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[""])
def test_what_the_table_calls_ours_is_there_and_has_that_default(row: dict[str, str]) -> None:
    assert options(row["here"])
    for name, default in options(row["here"]):
        value = found(RlConfig, name if name.startswith("orchestrator.") else f"trainer.{name}")
        assert not default or equal(value, default), f"{name} is {value}"


@pytest.mark.trl
def test_what_the_table_says_of_trl_is_there_and_has_that_default() -> None:
    from trl import GRPOConfig

    known = {field.name: field.default for field in fields(GRPOConfig)}
    for row in rows():
        for name, default in options(row["TRL"]):
            if name[0].isupper() or "." in name:
                continue  # a trainer of its own
            assert name in known, name
            assert not default or equal(known[name], default), f"{name} is {known[name]}"


@pytest.mark.trl
def test_the_script_for_trl_has_names_that_trl_knows() -> None:
    from trl import GRPOConfig

    page = (ROOT / "docs" / "coming_from.md").read_text()
    script = ast.parse(page.split("```python\n")[1].split("```")[0])
    calls = [node for node in ast.walk(script) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    (config,) = (call for call in calls if getattr(call.func, "id", "") == "GRPOConfig")
    given = {keyword.arg for keyword in config.keywords}
    assert len(given) > 8 and given <= {field.name for field in fields(GRPOConfig)}
