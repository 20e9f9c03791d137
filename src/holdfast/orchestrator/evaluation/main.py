"""The process of `evaluate`: `python -m holdfast.orchestrator.evaluation.main <resolved.toml>`.

It asks an inference server of its own, and writes `rollouts.jsonl` and `summary.json` into the evaluation's directory.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from holdfast.chat.template import template_date
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.load import read_toml
from holdfast.config.orchestrator import OrchestratorConfig, ServersConfig
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.client.http import load_vocab_size
from holdfast.orchestrator.env.guard import watching_calls
from holdfast.orchestrator.evaluation import evaluator
from holdfast.orchestrator.group_players import Workers, starting_workers
from holdfast.orchestrator.judge_client import judging
from holdfast.orchestrator.tasks import FreezeTolerantLoop, run_until_stopped
from holdfast.orchestrator.teacher import adopt_served_weights
from holdfast.process import child
from holdfast.process.events import report
from holdfast.run.manifest import content_digest
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import files_of_model


async def run(config: EvaluateConfig) -> None:
    """Play the tasks that are not done yet, and write the summary."""
    if child.DATE_ENV not in os.environ:  # a run that evaluates beside its training sets its own date
        child.keep_date(RunDir(config.run or config.output_dir).created_unix_s())
    child.allow_connections(config.max_concurrency, key="max_concurrency")
    async with judging(RunDir(config.output_dir).judgements), starting_workers(_group_config(config)) as workers:
        tasks = load_tasks(config, workers)
        with watching_calls():
            await _evaluate(config, tasks)
    report("finished")


def _group_config(config: EvaluateConfig) -> OrchestratorConfig:
    changes = {"environments": config.environments, "group_size": config.samples_per_task, "seq_len": config.seq_len}
    return OrchestratorConfig(model=config.inference.model).model_copy(update={**changes, "sampling": config.sampling})


def load_tasks(config: EvaluateConfig, workers: Mapping[str, Workers]) -> evaluator.HeldOutTasks:
    """Return the tasks. Raises what `load_environments`, `refuse_training_tasks` and `count_tasks` raise."""
    environments = evaluator.load_environments(config.environments, key="environments")
    sizes = evaluator.sizes_of(environments, workers)
    if config.run is not None and (trained := evaluator.settings_of_run(config.run)) is not None:
        evaluator.refuse_training_tasks(sizes, config.environments, trained.environments, key="environments")
    return evaluator.HeldOutTasks(
        config=_group_config(config),
        environments=environments,
        workers=workers,
        counts=evaluator.count_tasks(sizes, config.num_tasks, key="num_tasks"),
        seed=config.seed,
    )


async def _evaluate(config: EvaluateConfig, tasks: evaluator.HeldOutTasks) -> None:
    model = config.inference.model
    tokenizer = load_tokenizer(model.tokenizer_name)
    servers = ServersConfig(urls=config.inference.urls, max_concurrency=config.max_concurrency)
    vocab_size = load_vocab_size(model.name)
    async with InferenceClient(servers, key="inference", vocab_size=vocab_size) as client:
        await client.wait_until_ready(model=model.name, seq_len=config.seq_len)
        digest = await adopt_served_weights(client, key="inference")
        identity = tokenizer.identity()
        if "strftime_now" in identity:  # the date of the first start, unless run.json was damaged since
            identity += template_date().date().isoformat()
        asked_by = xxhash.xxh3_128_hexdigest(identity.encode())
        policy: dict[str, object] = {"kind": "weights", "digest": digest, "dtype": model.dtype, "tokenizer": asked_by}
        if model.fp32_lm_head:  # older evaluations have no such key
            policy["fp32_lm_head"] = True
        if config.inference.engine.args:  # they may replace parts of the model
            policy["engine"] = config.inference.engine.args
        if config.model is not None:  # the manifest of a run's step has these files, too
            # The same weights compute something else with another rope_theta.
            policy |= {path.stem: content_digest(path) for path in files_of_model(Path(model.name), has_weights=False)}
        await evaluator.evaluate(
            tasks,
            policy,
            client,
            tokenizer=tokenizer,
            directory=config.output_dir,
            max_concurrency=config.max_concurrency,
            confidence=config.confidence,
        )


def main(argv: Sequence[str]) -> None:
    """Evaluate as the resolved configuration says that `argv` names; never returns."""
    child.die_with_launcher()
    child.set_up_logging("evaluation")

    def evaluate_it() -> None:
        with asyncio.Runner(loop_factory=FreezeTolerantLoop) as runner:
            runner.run(run_until_stopped(run(read_toml(EvaluateConfig, argv[0]))))

    child.run_reporting_errors(evaluate_it)


if __name__ == "__main__":
    main(sys.argv[1:])
