"""The launcher: prepares the run directory and the plan of a run, and starts it (`launcher.restarts`).

`rl` decides once which step to resume from, for all processes, and starts them at the same time: a process that is
ready first waits for the others through the run directory. `sft`, `dpo` and `reward-model` may start evaluations beside
training. On several nodes the command of the head node starts the trainers of all (`launcher.nodes`).
"""

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from holdfast.config.base import CkptConfig, Command
from holdfast.config.inference import InferenceConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.rl import RlConfig, hand_down_shared
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import EvaluatedCommand, ParallelConfig, SupervisedCommand, TrainingCommand
from holdfast.errors import ConfigError, NodeLost, RunDirError
from holdfast.launcher import devices, forecast, preflight
from holdfast.launcher import plan as plans
from holdfast.launcher.cluster.cluster import check_shared, trainer_names, wait_for_places
from holdfast.launcher.cluster.slurm import submit_rl, submit_training
from holdfast.launcher.liveness import Health
from holdfast.launcher.nodes import Follower, Nodes, Registration, in_vain, meet
from holdfast.launcher.outer_nodes import with_outer_nodes
from holdfast.launcher.placement import ClusterPlacement, placed_on_cluster
from holdfast.launcher.restart_policy import RestartLimit, RestartPolicy, StorageBackoff
from holdfast.launcher.restarts import watch
from holdfast.launcher.resume.attempt import Attempt, process_name, with_resume, write_config
from holdfast.launcher.resume.config_diff import find_inputs
from holdfast.launcher.resume.prepare import prepare
from holdfast.launcher.resume.resume_step import clear_unpublished, resolve_resume_step
from holdfast.launcher.server_choice import chosen_servers, picks_its_port, reserve
from holdfast.launcher.side_processes import check_outputs
from holdfast.launcher.supervisor import STOP_SIGNALS
from holdfast.process.child import NotedSignals, available_cores, wait_passively
from holdfast.process.events import PROCESS_ENV
from holdfast.process.gpus import Gpu, find_gpus
from holdfast.process.imports import module_command
from holdfast.run.manifest import other_data, read_manifest
from holdfast.run.run_dir import RunDir
from holdfast.view.console import code_of_error

_ANSWERING_S = 10.0  # a timely answer may arrive so late on a busy machine
_NODE_RESTART_WINDOW_S = 600.0
_NODE_HEARTBEAT_TIMEOUT_S = 120.0


def with_evaluations(
    plan: plans.Plan, attempt: Attempt, config: TrainingCommand, placement: devices.Placement, gpus: tuple[Gpu, ...]
) -> plans.Plan:
    """Return `plan` with the process that evaluates, if `config` asks for one."""
    if not isinstance(config, EvaluatedCommand) or config.eval is None:
        return plan
    run_dir = RunDir(config.output_dir)
    if not config.dry_run:
        run_dir.given_up.unlink(missing_ok=True)  # by an earlier attempt
    settings = config.eval.following(run_dir.path, run_dir.evaluations)
    path = write_config(attempt, plans.EVALUATION, settings, dry_run=config.dry_run)
    return replace(
        plan,
        commands=plan.commands | {plans.EVALUATION: module_command("holdfast.launcher.evaluation.follow", str(path))},
        paths=[*plan.paths, path],
        environments=plan.environments | {plans.EVALUATION: placement.environment(gpus)},
        processes=[*plan.processes, plans.planned_engine(plans.EVALUATION, config.eval.inference, gpus)],
    )


def launch_training(config: TrainingCommand) -> int:
    """Run `sft`, `dpo`, `reward-model`, or only the trainer of `rl`; return the exit code."""
    if _plans_only(config, config.parallel, key="parallel"):
        return forecast.forecast_alone(config)
    if isinstance(config, SupervisedCommand) and config.slurm is not None:
        preflight.check_training(config)
        return submit_training(config)
    config, rank = with_outer_nodes(config, os.environ)
    preflight.check_training(config)
    check_outputs(config)
    preflight.check_evaluations(config)
    devices.keep_picks(config, devices.settings_of_run(config, clean=config.clean))
    survey = preflight.settle_length(config, clean=config.clean)
    machine = devices.this_machine(find_gpus())
    placement = devices.place_training(config.parallel, machine)
    gpus = devices.evaluation_gpus(config, placement, machine)
    asked = config.model_copy(deep=True)
    chosen = devices.choose_training(config, placement, clean=config.clean)
    environment = placement.environment(placement.trainer)
    if config.parallel.nodes > 1 and not config.dry_run:
        print(devices.describe(placement, chosen))
        print(preflight.summary(config, survey))
        if placement.trainer:
            forecast.forecast_meanwhile(config, _card(placement))
        return launch_on_nodes(config, rank=rank, environment=environment)
    attempt = prepare(config, clean=config.clean, dry_run=config.dry_run)
    config = with_resume(config, attempt.resume_step)
    path = write_config(attempt, process_name(config), config, dry_run=config.dry_run)
    print(devices.describe(placement, chosen))
    print(preflight.summary(config, survey))
    plan = plans.Plan(
        attempt,
        {"trainer": trainer_command(config, path)},
        config,
        [path],
        environments={"trainer": environment},
        processes=plans.planned_trainer(config, placement),
    )
    plan = with_evaluations(plan, attempt, config, placement, gpus)
    if config.dry_run:
        if survey is not None and attempt.checkpoint is not None and attempt.resume_step is not None:
            saved = read_manifest(attempt.checkpoint).fingerprints.data
            if told := other_data(saved, survey.fingerprint, step=attempt.resume_step):
                print(told)
        _print_plan(plan)
        forecast.forecast_beside(config if placement.trainer else asked, _card(placement))
        return 0
    if placement.trainer:
        forecast.forecast_meanwhile(config, _card(placement))
    return watch(plan)


def resolve_for_import(config: SupervisedCommand, source: Path) -> SupervisedCommand:
    """Check and resolve the settings of a run that is to begin with the checkpoint of another program; lock its
    directory. Raise RunDirError if it has a run; else as `launch_training`."""
    ckpt, run_dir = config.ckpt or CkptConfig(), RunDir(config.output_dir)
    if config.clean or ckpt.init_from or ckpt.resume_dir or config.slurm or config.parallel.nodes > 1:
        raise ConfigError(
            "ckpt import makes a checkpoint on this machine: leave out --clean, --ckpt.init-from, --ckpt.resume-dir, "
            "--slurm and --parallel.nodes"
        )
    config = with_resume(config, None)
    preflight.check_training(config)
    run_dir.lock()
    if run_dir.holds_run() or run_dir.has_work():
        steps = ", ".join(str(entry.step) for entry in run_dir.entries()) or "none"
        raise RunDirError(
            f"{run_dir.path} holds a run already (checkpoints: {steps}), and {source} begins one. Continue it with "
            "--ckpt.resume-step auto, or choose another directory with --output-dir."
        )
    preflight.settle_length(config, clean=False)
    devices.choose_training(
        config, devices.place_training(config.parallel, devices.this_machine(find_gpus())), clean=False
    )
    return config


def _plans_only(config: Command, parallel: ParallelConfig, *, key: str) -> bool:
    """Whether only a plan is wanted, for GPUs that need not be here; raise `ConfigError` if a run is wanted, too."""
    if parallel.card_gb is not None and not config.dry_run:
        raise ConfigError(f"{key}.card_gb is for a plan without a run: add --dry-run, or leave it out")
    return parallel.card_gb is not None


def _card(placement: devices.Placement) -> float | None:
    """Return the bytes of the smallest GPU of the trainer; None if it has none, or a GPU does not say."""
    return min((gpu.num_bytes for gpu in placement.trainer), default=0) or None


def launch_on_nodes(config: TrainingCommand, *, rank: int | None, environment: dict[str, str]) -> int:
    """Run a training program on this node and the others; return the exit code.

    Args:
        rank: of this node, from an outer launcher; None: the head is the host of `parallel.rdzv_endpoint`.
        environment: variables of the trainer.
    """
    RunDir(config.output_dir).require_writable()  # before the head node changes anything
    registration = Registration.of(config, rank)
    if (server := meet(config.parallel, rank)) is None:
        with NotedSignals(*STOP_SIGNALS) as signals:
            return Follower(config, registration, environment, signals.came).run()
    with Nodes(server, config.parallel, registration) as nodes:
        try:
            RunDir(config.output_dir).lock()
            code = _lead(config, nodes, environment)
        except (Exception, KeyboardInterrupt) as error:
            nodes.end(code_of_error(error), str(error) or type(error).__name__)
            raise
        nodes.end(code)
        return code


def _lead(config: TrainingCommand, nodes: Nodes, environment: dict[str, str]) -> int:
    """Run a training program from the head node; return the exit code."""
    timeout_s = config.parallel.rdzv_timeout_s

    def pause(seconds: float) -> int | None:
        time.sleep(seconds)  # a signal to this command ends it, as nothing has been started
        return nodes.asked_to_stop()

    print(nodes.missing(), flush=True)
    try:
        if (number := wait_for_places(nodes, timeout_s=timeout_s, pause=pause, say=print)) is not None:
            return 128 + number
    except TimeoutError as missing:
        raise NodeLost(in_vain(timeout_s, str(missing))) from None
    healing = RestartPolicy(
        again=lambda: plan_on_nodes(config, nodes, environment, again=True),
        restarts=RestartLimit(config.parallel.max_restarts if config.ckpt else 0, _NODE_RESTART_WINDOW_S),
        storage_backoff=StorageBackoff(0.0),
        heartbeat_timeout_s=_NODE_HEARTBEAT_TIMEOUT_S,
        cluster=nodes,
        cluster_timeout_s=timeout_s,
    )
    return watch(plan_on_nodes(config, nodes, environment), healing)


def plan_on_nodes(
    config: TrainingCommand, nodes: Nodes, environment: dict[str, str], *, again: bool = False
) -> plans.Plan:
    """Prepare the next attempt at the head node, and return its plan: a trainer on every node."""
    run_dir = RunDir(config.output_dir)
    # A restarted head node continues the run that the others wait for.
    again = again or nodes.trains(run_dir)
    attempt = prepare(config, clean=config.clean and not again, dry_run=False, again=again, is_locked=True)
    resumed = with_resume(config, attempt.resume_step)
    path = write_config(attempt, process_name(config), resumed, dry_run=False)
    names, hosts, environments = trainer_names(config.parallel.nodes), nodes.hosts(), nodes.environments()
    check_shared(nodes, list(hosts), run_dir.path, files=[path])
    environments["trainer"] |= environment
    commands = dict.fromkeys(names, trainer_command(config, path))
    return plans.Plan(
        attempt, commands, resumed, [path],
        environments=environments, hosts=hosts, asked_to_stop=nodes.asked_to_stop,
    )  # fmt: skip


def trainer_command(config: TrainingCommand, path: Path) -> list[str]:
    """Return the command line of the process that starts the ranks, which reads `config` from `path`."""
    return module_command("holdfast.trainer.launch", config.program, str(path))


def launch_rl(config: RlConfig) -> int:
    """Run trainer, orchestrator and, unless it uses running ones, inference servers; return the exit code."""
    if _plans_only(config, config.trainer.parallel, key="trainer.parallel"):
        return forecast.forecast_alone(hand_down_shared(config))
    picks_port = picks_its_port(config)
    machine, given = devices.this_machine(find_gpus()), config
    is_here = config.cluster is None and config.slurm is None
    config = hand_down_shared(devices.with_engines(config, machine) if is_here else config)
    if config.slurm is not None:
        preflight.check_rl(config, starts_inference="urls" not in given.orchestrator.client.model_fields_set)
        return submit_rl(config, given)
    with (
        placed_on_cluster(config) as places,
        nullcontext(places.servers(config)) if places else chosen_servers(config, picks_port=picks_port) as servers,
    ):
        machine = places.machine if places else machine
        preflight.check_rl(config, starts_inference=servers.starts_own)
        check_outputs(config.trainer)
        placement = devices.place_rl(config, machine, starts_inference=servers.starts_own)
        before = devices.settings_of_run(config.trainer, clean=config.clean)
        devices.keep_picks(config.trainer, before)
        found = forecast.fit_gpu(config, _card(placement), before) if placement.is_one_gpu else None
        preflight.settle_length(config.trainer, clean=config.clean)
        asked = config.trainer.model_copy(deep=True)
        chosen = devices.choose_rl(config, placement, machine, starts_inference=servers.starts_own)
        make_plan = partial(_plan_rl, config, placement, starts_inference=servers.starts_own, places=places)
        plan = make_plan()
        if servers.line:
            print(servers.line)
        print(devices.describe(placement, chosen, engines=(placement.engines or ((),)) if servers.starts_own else ()))
        trainer = config.trainer.model_copy(update={"dry_run": config.dry_run})
        print(preflight.summary(trainer, None, config.orchestrator))
        load, engine = forecast.load_of(config.orchestrator), None
        if placement.engines:
            engine = forecast.PlannedEngine(config.inference, placement.shares, found)
        if config.dry_run:
            _print_plan(plan)
            trained = config.trainer if placement.trainer else asked
            forecast.forecast_beside(trained, _card(placement), load, prefix="trainer.", engine=engine)
            return 0
        if placement.trainer and found is None:  # else its plan has been told
            forecast.forecast_meanwhile(config.trainer, _card(placement), load, prefix="trainer.", engine=engine)
        healing = RestartPolicy(
            again=partial(make_plan, again=True),
            restarts=RestartLimit(config.max_restarts, config.restart_window_s),
            storage_backoff=StorageBackoff(config.storage_timeout_s),
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            inputs=lambda is_fresh: find_inputs(config.trainer, config.orchestrator, is_fresh=is_fresh),
            cluster=places.cluster if places else None,
            cluster_timeout_s=config.cluster_timeout_s,
        )
        return watch(plan, healing)


def _plan_rl(
    config: RlConfig,
    placement: devices.Placement,
    *,
    starts_inference: bool,
    places: ClusterPlacement | None,
    again: bool = False,
) -> plans.Plan:
    """Decide where the run starts, or continues after its trainer died; write the configurations."""
    if places is not None and again:
        places.tell_addresses(config)
    attempt = prepare(
        config.trainer,
        clean=config.clean and not again,
        dry_run=config.dry_run,
        orchestrator=config.orchestrator,
        inference=config.inference if starts_inference else None,
        again=again,
    )
    trainer = with_resume(config.trainer, attempt.resume_step)
    orchestrator = with_resume(config.orchestrator, attempt.resume_step)
    inference = config.inference.model_copy(deep=True)
    _share_cores(trainer, inference, engine_on_gpu=bool(placement.engines))
    sections = {"trainer": trainer, "orchestrator": orchestrator, "inference": inference}
    paths = {name: write_config(attempt, name, section, dry_run=config.dry_run) for name, section in sections.items()}
    write_config(attempt, "rl", config, dry_run=config.dry_run, tells=False)
    commands = {
        "trainer": trainer_command(trainer, paths["trainer"]),
        "orchestrator": module_command("holdfast.orchestrator.main", str(paths["orchestrator"])),
    }
    environments = {"trainer": placement.environment(placement.trainer), "orchestrator": placement.environment(())}
    cluster = str(config.cluster) if places is not None else None
    processes = [
        *plans.planned_trainer(trainer, placement, cluster=cluster),
        plans.PlannedProcess("orchestrator", host=plans.of_cluster(cluster)),
    ]
    health: dict[str, Health] = {}
    if starts_inference:
        servers = {}
        for number, (name, one) in enumerate(inference.of_each().items()):
            if places is not None and not config.dry_run:
                places.tell_address(name, one)
            if name not in paths or places is not None:
                paths[name] = write_config(attempt, name, one, dry_run=config.dry_run, tells=False)
            servers[name] = module_command("holdfast.inference.main", str(paths[name]), str(attempt.run_dir.path))
            # The server itself reports an engine that takes too long.
            health[name] = Health(f"{one.server.url}/health", one.server.health_timeout_s + _ANSWERING_S)
            gpus = placement.engines[number] if placement.engines else ()
            environments[name] = placement.environment(gpus)
            processes.append(plans.planned_engine(name, one, gpus, cluster=cluster))
        commands = servers | commands
    plan = plans.Plan(attempt, commands, trainer, list(paths.values()), health, environments, processes)
    return plan if places is None or config.dry_run else places.plan(plan, config)


def launch_orchestrator(config: OrchestratorConfig) -> int:
    """Become the orchestrator of a run whose trainer is started elsewhere."""
    preflight.check_orchestrator(config)
    run_dir = RunDir(config.output_dir)
    if not config.dry_run:
        run_dir.lock_orchestrator(over_exec=True)
        if run_dir.is_being_removed():
            raise RunDirError(
                f"{run_dir.path} holds the rest of a run whose removal by --clean was interrupted. Start the trainer "
                "first: it removes the rest."
            )
        clear_unpublished(run_dir)
    ckpt = config.ckpt or CkptConfig()
    if ckpt.resume_dir is not None:
        raise ConfigError(
            f"ckpt.resume_dir = {ckpt.resume_dir}: the trainer's command brings the checkpoint into the run. Start "
            "that first, then this with --ckpt.resume-step and the number of the step."
        )
    resume_step = resolve_resume_step(run_dir, ckpt.resume_step, how=ckpt.verify)
    # The attempt of the trainer, which counts them.
    attempt = Attempt(run_dir, max(1, run_dir.next_attempt() - 1), resume_step)
    config = with_resume(config, resume_step)
    path = write_config(attempt, "orchestrator", config, dry_run=config.dry_run)
    if config.dry_run:
        print(f"would make batches until step {config.max_steps}\nresolved configuration: {path}")
        return 0
    return _become(module_command("holdfast.orchestrator.main", str(path)), "orchestrator")


def launch_inference(config: InferenceConfig) -> int:
    """Become the inference server."""
    preflight.check_inference(config)
    machine = devices.this_machine(find_gpus())
    gpus = devices.inference_gpus(config, machine)
    devices.choose_inference(config, machine)
    attempt = Attempt(RunDir(config.output_dir), 0, None)
    path = write_config(attempt, "inference", config, dry_run=config.dry_run)
    if config.dry_run:
        print(f"resolved configuration: {path}\nwould serve {config.model.name} at {config.server.url}")
        plans.print_table([plans.planned_engine("inference", config, gpus)])
        return 0
    reservation = reserve(config.server.host, config.server.port)
    if reservation is None:
        raise ConfigError(
            f"{config.server.url} is in use, by another server or a run. Stop it, or choose another port with "
            "--server.port."
        )
    reservation.keep_over_exec()
    print(f"loading vLLM to serve {config.model.name} at {config.server.url}; usually 15-60 s on CPU", flush=True)
    os.environ.update(devices.Placement(engines=(gpus,), hides_gpus=bool(machine.inventory.gpus)).environment(gpus))
    return _become(module_command("holdfast.inference.main", str(path)), "inference")


def _become(argv: list[str], process: str) -> int:
    os.environ[PROCESS_ENV] = process
    # execv drops buffered output.
    sys.stdout.flush()
    os.execv(argv[0], argv)


def _share_cores(trainer: TrainerConfig, inference: InferenceConfig, *, engine_on_gpu: bool) -> None:
    """Let trainer and engines on the CPU both use all cores, since they often wait for each other."""
    cores = available_cores()
    if trainer.parallel.threads is None:
        trainer.parallel.threads = max(1, (cores // 2 if engine_on_gpu else cores) // trainer.parallel.ranks)
    if engine_on_gpu:
        return
    if inference.engine.threads is None:
        inference.engine.threads = max(1, cores // inference.engines)
    wait_passively()


def _print_plan(plan: plans.Plan) -> None:
    attempt = plan.attempt
    print(f"would start {attempt.start} in {attempt.run_dir.path} and train until step {plan.trainer.max_steps}")
    for path in plan.paths:
        print(f"resolved configuration: {path}")
    plans.print_table(plan.processes)
