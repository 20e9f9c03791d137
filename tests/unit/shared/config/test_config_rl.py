"""`rl`: settings that several processes share are handed down, and disagreement is an error."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.commands.launcher.launch import launch_rl
from holdfast.shared.config import RlConfig, SftConfig, TrainerConfig
from holdfast.shared.config.environments import RolloutSettings
from holdfast.shared.config.fingerprint import makes_same_batches
from holdfast.shared.config.load import parse_command_line, read_toml, to_toml
from holdfast.shared.config.orchestrator import EvalConfig, OrchestratorConfig
from holdfast.shared.config.registry import GROUP_ADVANTAGES, SINGLE_ADVANTAGES
from holdfast.shared.config.reward_training import RewardTrainingConfig
from holdfast.shared.config.rl import hand_down_shared
from holdfast.shared.config.trainer import PolicyOptimConfig
from holdfast.shared.errors import ConfigError, InferenceError
from holdfast.shared.wire.sampling import Sampling
from tests.builders.advantage_settings import ONLINE_DPO_LOSS

ALGORITHMS = Path(__file__).resolve().parents[4] / "configs" / "reverse_text" / "algorithms"


def rl(*argv: str) -> RlConfig:
    return hand_down_shared(parse_command_line(RlConfig, list(argv), program="rl"))


def disagreement(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        rl(*argv)
    return str(caught.value)


def test_what_rl_is_given_goes_to_every_process() -> None:
    config = rl("--max-steps", "7", "--seed", "3", "--output-dir", "runs/a", "--async-level", "2",
                "--ckpt.interval", "5", "--model.name", "some/model")  # fmt: skip
    for process in (config.trainer, config.orchestrator, config.inference):
        assert process.seed == 3
        assert process.output_dir == Path("runs/a")
        assert process.model.name == "some/model"
        assert process.model.tokenizer_name == "some/model"
    for process in (config.trainer, config.orchestrator):
        assert process.max_steps == 7
        assert process.async_level == 2
        assert process.ckpt is not None and process.ckpt.interval == 5


def test_what_is_said_of_the_optimizer_leaves_the_learning_rates_of_policy_and_critic(tmp_path: Path) -> None:
    path = tmp_path / "betas.toml"
    path.write_text("[trainer.optim]\nbetas = [0.9, 0.99]\n[trainer.critic.optim]\nwarmup_steps = 2\n")
    gae = ("--trainer.advantage", "gae", "--trainer.critic.clip", "0.5")
    for flags in (
        (),
        ("--trainer.optim.warmup-steps", "5"),
        ("@", str(path), *gae),
        ("@", str(path), *gae, "--trainer.critic.optim.warmup-steps", "5", "--trainer.optim.eps", "1e-6"),
    ):
        trainer = rl(*flags).trainer
        assert trainer.optim.lr == 1e-6, flags
        assert trainer.critic is None or trainer.critic.optim.lr == 1e-5, flags
    resolved = tmp_path / "trainer.toml"
    resolved.write_text(to_toml(rl("--trainer.optim.warmup-steps", "5").trainer))
    assert read_toml(TrainerConfig, resolved).optim == PolicyOptimConfig(warmup_steps=5)
    assert rl("--trainer.optim.lr", "1e-5").trainer.optim.lr == 1e-5
    assert (SftConfig().optim.lr, RewardTrainingConfig().optim.lr) == (1e-5, 1e-5)


def test_rl_wins_over_its_sections() -> None:
    config = rl("--seed", "3", "--trainer.seed", "4", "--orchestrator.seed", "5", "--model.name", "a/b",
                "--trainer.model.name", "c/d")  # fmt: skip
    assert config.trainer.seed == config.orchestrator.seed == config.inference.seed == 3
    assert config.trainer.model.name == "a/b"


@pytest.mark.parametrize("process", ["trainer", "orchestrator"])
def test_what_one_process_is_given_goes_to_the_others(process: str) -> None:
    config = rl(f"--{process}.max-steps", "7", f"--{process}.model.name", "a/b", f"--{process}.ckpt.interval", "4",
                f"--{process}.output-dir", "runs/b", f"--{process}.async-level", "0")  # fmt: skip
    assert config.trainer.max_steps == config.orchestrator.max_steps == config.max_steps == 7
    assert config.trainer.async_level == config.orchestrator.async_level == 0
    assert config.trainer.model.name == config.orchestrator.model.name == config.inference.model.name == "a/b"
    assert config.trainer.ckpt == config.orchestrator.ckpt == config.ckpt
    assert config.ckpt is not None and config.ckpt.interval == 4
    assert config.output_dir == config.inference.output_dir == Path("runs/b")


def test_equal_values_are_no_disagreement() -> None:
    assert rl("--trainer.max-steps", "7", "--orchestrator.max-steps", "7").max_steps == 7


@pytest.mark.parametrize(
    ("setting", "one", "other"),
    [("max-steps", "5", "6"), ("seed", "1", "2"), ("output-dir", "a", "b"), ("async-level", "0", "1"),
     ("ckpt.interval", "2", "3")],
)  # fmt: skip
def test_disagreement_names_both_processes_and_the_shared_flag(setting: str, one: str, other: str) -> None:
    message = disagreement(f"--trainer.{setting}", one, f"--orchestrator.{setting}", other)
    assert "trainer." in message and "orchestrator." in message
    assert one in message and other in message
    assert f"--{setting.split('.')[0]}" in message


def test_disagreement_about_the_model_names_both_and_the_shared_flag() -> None:
    message = disagreement("--trainer.model.name", "a/b", "--inference.model.name", "c/d")
    for part in ("trainer.model.name = 'a/b'", "inference.model.name = 'c/d'", "--model.name"):
        assert part in message


@pytest.mark.parametrize("flag", ["--max-steps", "--trainer.max-steps", "--orchestrator.max-steps"])
def test_warm_ups_are_compared_with_the_last_step_wherever_that_is_set(flag: str) -> None:
    policy = ("--trainer.optim.warmup-steps", "150")
    critic = ("--trainer.advantage", "gae", "--trainer.critic.warmup-steps", "150")
    for warmup in (policy, critic, (*critic, "--trainer.critic.optim.warmup-steps", "150")):
        assert rl(*warmup, flag, "200").trainer.max_steps == 200
        with pytest.raises(ConfigError, match=r"warmup_steps \(150\) must be below max_steps \(20\)"):
            rl(*warmup, flag, "20")
    assert rl(*policy, "--max-steps", "200", "--trainer.max-steps", "20").trainer.max_steps == 200
    assert "max_steps" in disagreement("--trainer.max-steps", "20", "--orchestrator.max-steps", "30")
    (line,) = disagreement(flag, "0").splitlines()
    assert "should be greater than or equal to 1" in line
    assert rl().trainer.max_steps == rl().orchestrator.max_steps == 100


def test_the_last_step_is_handed_on_as_it_was_given_or_refused_once(tmp_path: Path) -> None:
    sections = {"trainer": TrainerConfig(), "orchestrator": OrchestratorConfig()}
    assert hand_down_shared(RlConfig(max_steps=5, **sections)).trainer.max_steps == 5
    assert hand_down_shared(RlConfig(**sections)).trainer.max_steps == 100
    path = tmp_path / "rl.toml"
    path.write_text("max_steps = true\n")
    assert disagreement("@", str(path)) == f"{path}: 'max_steps' should be a number, not true or false, got true"


def test_a_value_equal_to_the_default_still_counts_as_given() -> None:
    default = RlConfig().trainer.max_steps
    message = disagreement("--trainer.max-steps", str(default), "--orchestrator.max-steps", str(default + 1))
    assert str(default) in message


def test_the_orchestrator_asks_where_the_server_listens_unless_told_otherwise() -> None:
    assert rl("--inference.server.port", "9001").orchestrator.client.urls == ["http://127.0.0.1:9001"]
    anywhere = rl("--inference.server.port", "9001", "--inference.server.host", "0.0.0.0")
    assert anywhere.orchestrator.client.urls == ["http://127.0.0.1:9001"]
    told = rl("--inference.server.port", "9001", "--orchestrator.client.urls", "http://far:1")
    assert told.orchestrator.client.urls == ["http://far:1"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://far:1", "http://far:1"),
        ("http://far:1", "http://far:1/"),
        ("http://far:1", "http://FAR.:1"),
        ("http://far", "http://far:80"),
        ("https://far/engine", "https://far:443/engine/"),
        ("http://localhost:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000", "http://localhost:8000/"),
    ],
)
def test_a_server_is_named_once_however_it_is_spelled(first: str, second: str) -> None:
    for setting in ("client", "teacher"):
        with pytest.raises(ConfigError, match=rf"{setting}\.urls' must name each server once"):
            rl(f"--orchestrator.{setting}.urls", json.dumps([first, second]))


def test_servers_that_differ_in_host_port_or_path_are_several() -> None:
    urls = ["http://far:1", "http://far:2", "http://near:1", "http://far:1/b", "http://localhost:1"]
    assert rl("--orchestrator.client.urls", json.dumps(urls)).orchestrator.client.urls == urls


NEEDED = {
    "gae": ("--trainer.critic",),
    "distillation": ("--trainer.kl.reference", "teacher"),
    "pass_at_k": ("--trainer.advantage-k", "2"),
    "gdpo": ("--trainer.rewards.weights", '{"reward": 1}'),
    "online_dpo": ("--trainer.kl", "--trainer.loss", json.dumps(ONLINE_DPO_LOSS)),
}


@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
def test_groups_of_one_are_refused_where_the_advantage_compares_rollouts(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' compares.*group_size = 1.*group_size to 2 or more.*reinforce_pp"):
        rl("--orchestrator.group-size", "1", "--trainer.advantage", name, *NEEDED.get(name, ()))


def test_groups_of_one_are_taken_where_there_is_nothing_to_compare() -> None:
    for name in (*SINGLE_ADVANTAGES, "own:advantage"):
        config = rl("--orchestrator.group-size", "1", "--trainer.advantage", name, *NEEDED.get(name, ()))
        assert config.orchestrator.group_size == 1
    imitation = (*TEACHER, "--orchestrator.teacher.mode", "samples", "--trainer.loss.type", "sft")
    assert rl("--orchestrator.group-size", "1", *imitation).trainer.advantage == "dr_grpo"


def test_groups_of_one_cannot_be_chosen_by_how_their_rewards_differ() -> None:
    with pytest.raises(ValueError, match="every group of one is .*: set group_size to 2 or more"):
        OrchestratorConfig.model_validate({"group_size": 1, "dynamic_sampling": {}})


DYNAMIC = ("--orchestrator.dynamic-sampling",)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--trainer.environments", '{"revers": {"weight": 2}}'), "names 'revers'.*Did you mean 'reverse_text'"),
        (("--trainer.advantage", "pass_at_k", "--trainer.advantage-k", "9"), "= 9 is more than the 8 rollouts"),
        ((*DYNAMIC, "--trainer.reward-model.name", "m"), "rules_weight = 0 leaves it out"),
        ((*DYNAMIC, "--trainer.rewards.weights", '{"exact": 1}'), "weights leaves 'reward' out"),
        ((*DYNAMIC, "--trainer.rewards.weights", '{"exact": 1, "reward": 0}'), "weights leaves 'reward' out"),
        (("--trainer.rewards.length-max-tokens", "129", "--trainer.rewards.length-buffer-tokens", "9"),
         "length_max_tokens = 129 is never reached: orchestrator.sampling.max_tokens allows 128"),
        (("--trainer.rewards.length-max-tokens", "1024", "--trainer.rewards.length-buffer-tokens", "9",
          "--orchestrator.environments", '[{"id": "own:Env", "history": "keep"}]'),
         "length_max_tokens = 1024 is never reached: orchestrator.seq_len = 1024 with a prompt allows 1023"),
    ],
)  # fmt: skip
def test_rewards_that_trainer_and_orchestrator_see_differently_are_refused(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rl(*flags)


def test_rewards_that_fit_are_taken() -> None:
    rl(*DYNAMIC, "--trainer.reward-model.name", "m", "--trainer.reward-model.rules-weight", "0.5")
    rl(*DYNAMIC, "--trainer.rewards.weights", '{"exact": 1, "reward": 0.1}')
    rl("--trainer.environments", '{"reverse_text": {"weight": 2}}')
    penalty = ("--trainer.rewards.length-buffer-tokens", "9", "--trainer.rewards.length-max-tokens")
    rl(*penalty, "128")
    rl(*penalty, "1023", "--orchestrator.environments", '[{"id": "own:Env"}]')  # it may have several turns


def test_dtype_follows_the_trainer_and_a_random_model_waits_for_weights() -> None:
    config = rl("--trainer.model.dtype", "bfloat16", "--trainer.model.init", "random")
    assert config.inference.model.dtype == "bfloat16"
    assert config.inference.model.load == "dummy"
    kept = rl("--trainer.model.dtype", "bfloat16", "--inference.model.dtype", "float32")
    assert kept.inference.model.dtype == "float32"


def test_handing_down_leaves_its_argument_alone() -> None:
    config = parse_command_line(RlConfig, ["--max-steps", "7", "--clean"], program="rl")
    before = config.model_copy(deep=True)
    handed = hand_down_shared(config)
    assert config == before
    assert handed.trainer.clean and not config.trainer.clean


def test_the_shipped_split_configs_agree(in_root: Path) -> None:
    config = rl("--trainer", "@", "configs/reverse_text/train.toml",
                "--orchestrator", "@", "configs/reverse_text/orch.toml", "--max-steps", "10", "--ckpt")  # fmt: skip
    assert config.trainer.max_steps == config.orchestrator.max_steps == 10
    assert config.trainer.ckpt is not None and config.orchestrator.ckpt is not None
    assert config.orchestrator.output_dir == config.inference.output_dir == config.trainer.output_dir != Path("outputs")


def test_servers_named_elsewhere_are_not_looked_for_at_the_own_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as foreign:  # no inference server: answers 501
        thread = threading.Thread(target=foreign.serve_forever)
        thread.start()
        try:
            flags = ["--inference.server.port", str(foreign.server_port), "--output-dir", str(tmp_path), "--dry-run"]
            assert launch_rl(rl(*flags, "--orchestrator.client.urls", '["http://far:1"]')) == 0
            assert "would start afresh" in capsys.readouterr().out
            with pytest.raises(InferenceError, match="is not an inference server of holdfast"):
                launch_rl(rl(*flags))
        finally:
            foreign.shutdown()
            thread.join()


@pytest.mark.parametrize("path", sorted(ALGORITHMS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_file_of_an_algorithm_goes_over_that_of_the_quick_start(path: Path, in_root: Path) -> None:
    quick_start = rl("@", "configs/reverse_text/rl.toml")
    config = rl("@", "configs/reverse_text/rl.toml", "@", str(path))
    assert config.orchestrator.environments == quick_start.orchestrator.environments
    assert config.trainer.optim == quick_start.trainer.optim
    settings = (config.trainer.loss, config.trainer.advantage)
    assert settings != (quick_start.trainer.loss, quick_start.trainer.advantage)
    for tokens in (config.trainer.loss.constant_tokens, config.trainer.rewards.length_max_tokens):
        assert tokens in (None, config.orchestrator.sampling.max_tokens)


def test_the_constant_of_dr_grpo_is_the_most_tokens_that_a_turn_may_have() -> None:
    constant = ("--trainer.loss.type", "dr_grpo", "--orchestrator.sampling.max-tokens", "77")
    assert rl(*constant).trainer.loss.constant_tokens == 77
    assert rl(*constant, "--trainer.loss.constant-tokens", "5").trainer.loss.constant_tokens == 5
    assert rl("--trainer.loss.type", "grpo").trainer.loss.constant_tokens is None


@pytest.mark.parametrize(
    "flags",
    [
        ("--trainer.advantage", "gae", "--trainer.critic.gamma", "1"),
        ("--trainer.advantage", "distillation", "--trainer.kl.reference", "a/b"),
    ],
)
def test_gspo_is_not_given_advantages_of_single_tokens(flags: tuple[str, ...]) -> None:
    assert "set loss.type = 'gspo_token'" in disagreement(*flags, "--trainer.loss.type", "gspo")
    assert rl(*flags, "--trainer.loss.type", "gspo_token").trainer.loss.correction.type == "truncate"


@pytest.mark.parametrize(
    "flags",
    [
        ("--trainer.environments", '{"reverse_text": {"weight": 2}}'),
        ("--trainer.advantage", "gae", "--trainer.critic"),
        ("--trainer.kl.place", "reward", "--trainer.kl.coef", "0.1"),
    ],
)
def test_what_acts_through_advantages_is_refused_where_the_loss_takes_none(flags: tuple[str, ...]) -> None:
    assert "has no effect with loss.type = 'sft'" in disagreement(*flags, "--trainer.loss.type", "sft")
    rl(*flags)


TEACHER = ("--orchestrator.teacher.urls", "http://127.0.0.1:9000", "--orchestrator.teacher.model", "a/teacher")


def test_a_distillation_needs_one_teacher_and_a_loss_for_what_it_gives() -> None:
    distil = ("--trainer.advantage", "distillation", "--trainer.loss.type", "policy_gradient")
    assert "set trainer.kl.reference, or orchestrator.teacher" in disagreement(*distil)
    assert "set trainer.kl.reference" in disagreement(*distil, *TEACHER, "--orchestrator.teacher.mode", "samples")
    assert "both say what the reference is" in disagreement(*distil, *TEACHER, "--trainer.kl.reference", "b/teacher")
    rl(*distil, "--trainer.kl.reference", "b/teacher")
    beside = ("--trainer.distillation.coef", "0.5")
    assert "set trainer.kl.reference, or orchestrator.teacher" in disagreement(*beside)
    assert rl(*beside, *TEACHER).trainer.advantage == "dr_grpo"
    dynamic = ("--orchestrator.dynamic-sampling",)
    assert "drops problems by their rewards" in disagreement(*distil, *TEACHER, *dynamic)
    rl(*beside, *TEACHER, *dynamic)
    rl(*distil, *TEACHER)
    samples = (*TEACHER, "--orchestrator.teacher.mode", "samples")
    assert "trainer.loss.type = 'dapo' takes the samples for the policy's own" in disagreement(*samples)
    rl(*samples, "--trainer.loss.type", "sft")
    for flags in ((), TEACHER):
        assert "set orchestrator.teacher with mode = 'samples'" in disagreement("--trainer.loss.type", "sft", *flags)
    rl(*samples, "--trainer.loss.type", "my_losses:imitate")
    assert "log-probabilities of a teacher" in disagreement(
        *distil, *TEACHER, "--orchestrator.sampling.temperature", "2"
    )
    assert "sampling of environment 'reverse_text' at temperature 1, top_p 0.9" in disagreement(
        *distil, *TEACHER, "--orchestrator.sampling.top-p", "0.9"
    )


def test_the_inference_server_computes_logits_as_the_trainer_does() -> None:
    both = rl("--trainer.model.fp32-lm-head", "--trainer.model.dtype", "bfloat16")
    assert both.inference.model.fp32_lm_head and both.inference.model.dtype == "bfloat16"
    alone = rl("--trainer.model.fp32-lm-head", "--no-inference.model.fp32-lm-head")
    assert alone.trainer.model.fp32_lm_head and not alone.inference.model.fp32_lm_head
    with pytest.raises(ValueError, match="a reward model has no such layer"):
        RewardTrainingConfig.model_validate({"model": {"fp32_lm_head": True}})


def test_a_divergence_is_not_taken_between_distributions_that_have_different_tokens() -> None:
    cut = ("--orchestrator.sampling.top-p", "0.9", "--orchestrator.sampling.min-p", "0.05")
    assert (
        "cuts off tokens (temperature 1, top_p 0.9, min_p 0.05, environment 'reverse_text'), and trainer.kl"
        in disagreement(*cut, "--trainer.kl")
    )
    rl(*cut)
    # What a teacher samples is imitated by the whole distribution.
    rl(*cut, "--trainer.kl", *TEACHER, "--orchestrator.teacher.mode", "samples", "--trainer.loss.type", "sft")
    assert "1 leaves one token to choose from" in disagreement("--orchestrator.sampling.top-k", "1")


def mixed(own: dict[str, Any], *flags: str) -> RlConfig:
    """A run with an environment as all are, and one with settings of its own."""
    return rl("--orchestrator.environments", json.dumps([{"id": "reverse_text"}, {"id": "python_code"} | own]), *flags)


def test_an_environment_has_its_own_settings_or_those_of_all() -> None:
    own = {"group_size": 3, "seq_len": 99, "sampling": {"temperature": 0.5, "max_tokens": 7}}
    orchestrator = mixed(own, "--orchestrator.sampling.top-p", "0.9", "--orchestrator.group-size", "4").orchestrator
    plain, other = (orchestrator.rollouts_of(section) for section in orchestrator.environments)
    assert plain == RolloutSettings(4, 1024, 128, Sampling(1.0, 0.9))
    assert other == RolloutSettings(3, 99, 7, Sampling(0.5, 0.9))
    assert orchestrator.largest_group == 4 and not makes_same_batches(orchestrator, mixed({}).orchestrator)
    longest = mixed({"sampling": {"max_tokens": 300}}, "--trainer.loss.type", "dr_grpo")
    assert longest.trainer.loss.constant_tokens == 300
    mixed({"group_size": 1}, "--trainer.environments", '{"python_code": {"advantage": "reinforce_pp"}}')
    mixed(
        {"group_size": 9},
        "--trainer.environments",
        '{"python_code": {"advantage": "pass_at_k"}}',
        "--trainer.advantage-k",
        "9",
    )
    mixed({"seq_len": 500}, "--trainer.rewards.length-max-tokens", "128", "--trainer.rewards.length-buffer-tokens", "9")


@pytest.mark.parametrize(
    ("own", "flags", "says"),
    [
        ({"seq_len": 1025}, (), "environment 'python_code': seq_len = 1025 is more than the seq_len = 1024 of all"),
        ({"group_size": 1}, (), "gives each of environment 'python_code' a single one"),
        ({"group_size": 1}, DYNAMIC, "every group of one is (environment 'python_code'): set group_size to 2"),
        ({"group_size": 2}, ("--trainer.advantage", "pass_at_k", "--trainer.advantage-k", "3"),
         "advantage_k = 3 is more than the 2 rollouts of a problem of environment 'python_code'"),
        ({"sampling": {"top_k": 5}}, ("--trainer.kl",), "(temperature 1, top_k 5, environment 'python_code')"),
        ({"sampling": {"top_k": 1}}, (), "1 leaves one token to choose from"),
        ({"sampling": {"temperature": 0.5}}, (*TEACHER, "--trainer.advantage", "distillation"),
         "sampling of environment 'python_code' at temperature 0.5"),
    ],
)  # fmt: skip
def test_what_one_environment_cannot_have_is_refused_by_its_name(
    own: dict[str, Any], flags: tuple[str, ...], says: str
) -> None:
    with pytest.raises((ConfigError, ValueError)) as caught:
        mixed(own, *flags)
    assert says in str(caught.value)


def test_an_evaluation_has_a_number_of_samples_of_its_own() -> None:
    with pytest.raises(ValueError, match="'python_code': group_size = 2 means nothing in an evaluation"):
        EvalConfig.model_validate({"environments": [{"id": "python_code", "group_size": 2}]})


def test_a_length_that_branches_or_tools_can_reach_is_taken() -> None:
    penalty = ("--trainer.rewards.length-max-tokens", "2000", "--trainer.rewards.length-buffer-tokens", "9")
    tools = {"id": "jsonl", "args": {"path": "x"}, "mcp_servers": {"a": {"command": "sh"}}, "history": "keep"}
    for section, most in (({"id": "own:Env"}, "2000"), (tools, "1000")):
        config = rl(*penalty, "--trainer.rewards.length-max-tokens", most, "--orchestrator.environments",
                    json.dumps([section]))  # fmt: skip
        assert config.trainer.rewards.length_max_tokens == int(most)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--prometheus.port", "8100", "--inference.server.port", "8100"), "prometheus.port = 8100 is the port of inf"),
        (
            ("--trainer.dashboard.port", "8101", "--inference.server.port", "8100", "--inference.engines", "2"),
            "dashboard.port = 8101 is the port of inference_1 as well",
        ),
        (("--prometheus.port", "8000", "--dashboard"), ""),  # the server takes the next one
        (("--prometheus.port", "0", "--inference.server.port", "8100"), ""),
        (("--prometheus.port", "8100", "--inference.server.port", "8100", "--cluster", "ray"), ""),
        (  # no server is started
            (
                "--prometheus.port",
                "8100",
                "--inference.server.port",
                "8100",
                "--orchestrator.client.urls",
                '["http://127.0.0.1:8000"]',
            ),
            "",
        ),
    ],
)
def test_the_launcher_and_a_server_may_not_be_given_the_same_port(flags: tuple[str, ...], named: str) -> None:
    if not named:
        assert rl(*flags).trainer.prometheus is not None
        return
    said = disagreement(*flags)
    assert said.startswith(named) and said.endswith(".port, or 0 for any free one."), said


@pytest.mark.parametrize("owners", [("", ""), ("trainer.", "trainer."), ("", "trainer."), ("trainer.", "")])
def test_numbers_and_page_of_a_run_may_not_be_given_the_same_port(owners: tuple[str, str]) -> None:
    def flags(port: str) -> list[str]:
        return [f"--{owners[0]}prometheus.port", port, f"--{owners[1]}dashboard.port", port]

    said = disagreement(*flags("8100"))
    assert "prometheus.port and dashboard.port are both 8100: give each a port of its own, or 0" in said
    trainer = rl(*flags("0")).trainer
    assert trainer.prometheus is not None and trainer.dashboard is not None
    assert trainer.prometheus.port == trainer.dashboard.port == 0


def test_rl_hands_the_journal_to_its_trainer() -> None:
    config = hand_down_shared(RlConfig.model_validate({"journal": {"keep": "all"}}))
    assert config.trainer.journal.keep == "all"
    assert hand_down_shared(RlConfig()).trainer.journal.keep == 20
