"""What is checked before anything starts, by a real run and by --dry-run alike.

Models and data by their paths, what `rl`'s processes must agree on, and the code of the user: environments,
losses and advantages are imported in a child process, so that the launcher stays light and free of their side
effects. Not checked here: models and data of hubs, the rows of data, and what a constructor of a user's environment
does.
"""

from __future__ import annotations

import os
import subprocess
import tempfile

from pydantic import BaseModel

from holdfast.shared.config.dpo import DpoConfig
from holdfast.shared.config.inference import InferenceConfig
from holdfast.shared.config.orchestrator import OrchestratorConfig
from holdfast.shared.config.rl import RlConfig
from holdfast.shared.config.rl_trainer import TrainerConfig
from holdfast.shared.config.trainer import SupervisedCommand, TrainingCommand
from holdfast.shared.errors import ConfigError, EnvironmentFailure, HoldfastError
from holdfast.shared.files.local_inputs import (
    check_cache_directory,
    check_data_path,
    check_model_path,
    check_tokenizer_path,
    check_weights_path,
)
from holdfast.shared.files.model_length import check_max_len
from holdfast.shared.process.child import LAUNCHER_ENV
from holdfast.shared.process.gpus import require_vllm
from holdfast.shared.process.import_path import module_command
from holdfast.shared.wire.admin_token import read_admin_token


def check_training(config: TrainingCommand) -> None:
    """Check models, data and functions of the user of one training program.

    Raises:
        DataError: a local path is not there, or its files are not what they are taken for.
        ReadError: one cannot be read.
        ConfigError: a function of the user cannot be loaded, or a setting is missing that `rl` would hand down.
    """
    check_model_path(config.model.name, key="model.name")
    ckpt = config.ckpt
    if config.model.init == "pretrained" and not (ckpt and (ckpt.resume_step or ckpt.resume_dir or ckpt.weights_only)):
        check_weights_path(config.model.name)
    if isinstance(config, SupervisedCommand):
        key = "model.tokenizer" if config.model.tokenizer else "model.name"
        check_tokenizer_path(config.model.tokenizer_name, key=key)
        check_data_path(config.data.name, key="data.name")
        check_cache_directory(config.data.cache_dir, key="data.cache_dir")
    if isinstance(config, DpoConfig) and config.loss.reference_model:
        check_model_path(config.loss.reference_model, key="loss.reference_model")
    if not isinstance(config, TrainerConfig):
        return
    for key, name in (
        ("kl.reference", config.kl and config.kl.reference),
        ("critic.name", config.critic and config.critic.name),
        ("reward_model.name", config.reward_model and config.reward_model.name),
    ):
        if name:
            check_model_path(name, key=key)
    if config.pretraining is not None:
        check_data_path(config.pretraining.data.name, key="pretraining.data.name")
        check_cache_directory(config.pretraining.data.cache_dir, key="pretraining.data.cache_dir")
    if config.loss.aggregation == "constant" and config.loss.constant_tokens is None:
        raise ConfigError(
            "loss.aggregation = 'constant' needs loss.constant_tokens: set it to orchestrator.sampling.max_tokens, "
            "which `rl` does by itself"
        )
    if any(":" in name for name in (config.loss.type, *config.advantages)):
        check_in_child("holdfast.commands.launcher.check_functions", config)


def check_orchestrator(config: OrchestratorConfig) -> None:
    """Check that every environment is there and takes its arguments.

    Raises:
        ConfigError, DataError: one is not, or does not; or the admin token is none.
    """
    read_admin_token(config.client.admin_token_env)
    check_in_child("holdfast.orchestrator.check_environments", config)


def check_inference(config: InferenceConfig) -> None:
    """Check that model, weights and tokenizer are there, and whole as far as headers tell.

    Raises:
        DataError: they are not.
        ReadError: one cannot be read.
        ConfigError: vLLM is not installed, the admin token is none, several servers are asked for, or sessions longer
            than the model takes.
    """
    if config.engines > 1:
        raise ConfigError(
            f"engines = {config.engines}: `inference` is one server. Start it once for each, with a --server.port and "
            "an --output-dir of its own, or let `rl` start them with --inference.engines."
        )
    read_admin_token(config.server.admin_token_env)
    check_model_path(config.model.name, key="model.name")
    if config.model.load == "auto":
        check_weights_path(config.model.name, needs_index=False)
    key = "model.tokenizer" if config.model.tokenizer else "model.name"
    check_tokenizer_path(config.model.tokenizer_name, key=key)
    check_max_len(config, config.model.name, key="model")
    require_vllm()


def check_rl(config: RlConfig, *, starts_inference: bool) -> None:
    """Check the three processes of `rl`, and that the server takes sessions as long as they may become.

    Raises:
        ConfigError, DataError: what cannot be used.
    """
    if starts_inference:
        require_vllm()
    model = config.orchestrator.model
    check_tokenizer_path(model.tokenizer_name, key="model.tokenizer" if model.tokenizer else "model.name")
    check_training(config.trainer)
    check_orchestrator(config.orchestrator)
    seq_len, max_len = config.orchestrator.seq_len, config.inference.model.max_len
    if starts_inference and seq_len > max_len:
        raise ConfigError(
            f"orchestrator.seq_len = {seq_len} is more than inference.model.max_len = {max_len}, the longest session "
            "that the inference server takes. Lower seq_len or raise max_len."
        )
    if starts_inference:
        check_max_len(config.inference, config.inference.model.name, key="inference.model")


def check_in_child(module: str, config: BaseModel) -> None:
    """Run `module` with the configuration on its standard input; raise what it says is wrong."""
    with tempfile.TemporaryFile() as output:  # no pipe: what the user's code starts may hold it open for ever
        child = subprocess.run(
            module_command(module),
            input=config.model_dump_json().encode(),
            stdout=subprocess.DEVNULL,
            stderr=output,
            env={**os.environ, LAUNCHER_ENV: str(os.getpid())},
        )
        if child.returncode == 0:
            return
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    message = f"\n{said}".rpartition("\nerror: ")[2].strip()
    if child.returncode == ConfigError.exit_code:
        raise ConfigError(message)
    if child.returncode == EnvironmentFailure.exit_code:
        failure = EnvironmentFailure(message)
        failure.exit_code = ConfigError.exit_code  # nothing was started
        raise failure
    error = HoldfastError(f"checking the configuration failed (exit code {child.returncode}):\n{said}")
    error.exit_code = 1
    raise error
