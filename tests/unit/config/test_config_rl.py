"""`rl`: settings that several processes share are handed down, and disagreement is an error."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import RlConfig, TrainerConfig
from holdfast.config.advantages import GROUP_ADVANTAGES, SINGLE_ADVANTAGES
from holdfast.config.environments import RolloutSettings
from holdfast.config.load import parse_command_line, read_toml, to_toml
from holdfast.config.resolved import makes_same_batches
from holdfast.config.rl import hand_down_shared
from holdfast.config.training import AdamWConfig
from holdfast.errors import ConfigError
from holdfast.protocol.rollouts import Sampling
from tests.builders.advantage_settings import ONLINE_DPO_LOSS
from tests.builders.toy import TOY
from tests.conftest import ROOT

ALGORITHMS = ROOT / "configs" / "reverse_text" / "algorithms"


def rl(*argv: str) -> RlConfig:
    """The example's environment, unless the words name others."""
    environments = () if any("environments" in word or word == "@" for word in argv) else TOY["rl"][2:]
    return hand_down_shared(parse_command_line(RlConfig, [*environments, *argv]))


def disagreement(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        rl(*argv)
    return str(caught.value)


def test_what_rl_is_given_goes_to_every_process_whatever_its_section_says() -> None:
    config = rl("--max-steps", "7", "--seed", "3", "--output-dir", "runs/a", "--async-level", "2",
                "--ckpt.interval", "5", "--model.name", "some/model")  # fmt: skip
    for process in (config.trainer, config.orchestrator, config.inference):
        assert (process.seed, process.output_dir) == (3, Path("runs/a"))
        assert process.model.name == process.model.tokenizer_name == "some/model"
    for process in (config.trainer, config.orchestrator):
        assert (process.max_steps, process.async_level) == (7, 2)
        assert process.ckpt is not None and process.ckpt.interval == 5
    handed = hand_down_shared(RlConfig.model_validate({"journal": {"keep": "all"}, "seed": 3, "trainer": {"seed": 4}}))
    assert (handed.trainer.journal.keep, handed.trainer.seed, handed.inference.seed) == ("all", 3, 3)
    assert hand_down_shared(RlConfig()).trainer.journal.keep == 20


def test_what_is_said_of_the_optimizer_leaves_the_learning_rates_of_policy_and_critic(tmp_path: Path) -> None:
    path = tmp_path / "betas.toml"
    path.write_text("[trainer.optim]\nbetas = [0.9, 0.99]\n[trainer.critic.optim]\nwarmup_steps = 2\n")
    trainer = rl("@", str(path), "--trainer.advantage", "gae", "--trainer.optim.warmup-steps", "5").trainer
    assert trainer.critic is not None and (trainer.optim.lr, trainer.critic.optim.lr) == (1e-6, 1e-5)
    resolved = tmp_path / "trainer.toml"
    resolved.write_text(to_toml(rl("--trainer.optim.warmup-steps", "5").trainer))
    assert read_toml(TrainerConfig, resolved).optim == AdamWConfig(lr=1e-6, warmup_steps=5)


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


@pytest.mark.parametrize(
    ("setting", "one", "other", "process"),
    [("max-steps", "5", "6", "orchestrator"), ("seed", "1", "2", "orchestrator"), ("ckpt.interval", "2", "3",
     "orchestrator"), ("model.name", "a/b", "c/d", "inference")],
)  # fmt: skip
def test_disagreement_names_both_processes_and_the_flag(setting: str, one: str, other: str, process: str) -> None:
    message = disagreement(f"--trainer.{setting}", one, f"--{process}.{setting}", other)
    assert "trainer." in message and f"{process}." in message
    assert one in message and other in message
    assert f"--{setting.split('.')[0]}" in message


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


def test_a_value_equal_to_the_default_still_counts_as_given() -> None:
    default = RlConfig().trainer.max_steps
    message = disagreement("--trainer.max-steps", str(default), "--orchestrator.max-steps", str(default + 1))
    assert str(default) in message and rl("--trainer.max-steps", "7", "--orchestrator.max-steps", "7").max_steps == 7


def test_the_orchestrator_asks_where_the_server_listens_unless_told_otherwise() -> None:
    assert rl("--inference.server.port", "9001").orchestrator.client.urls == ["http://127.0.0.1:9001"]
    for host, place in (("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]"), ("node", "node")):
        found = rl("--inference.server.port", "9001", "--inference.server.host", host)
        assert found.orchestrator.client.urls == [f"http://{place}:9001"]
    told = rl("--inference.server.port", "9001", "--orchestrator.client.urls", "http://far:1")
    assert told.orchestrator.client.urls == ["http://far:1"]


@pytest.mark.parametrize(("first", "second"), [
    ("http://far:1", "http://far:1"), ("http://far:1", "http://far:1/"), ("http://far", "http://FAR.:80"),
    ("https://far/engine", "https://far:443/engine/"), ("http://localhost:8000", "http://127.0.0.1:8000"),
])  # fmt: skip
def test_a_server_is_named_once(first: str, second: str) -> None:
    for setting in ("client", "teacher"):
        with pytest.raises(ConfigError, match=rf"--orchestrator\.{setting}\.urls must name each server once"):
            rl(f"--orchestrator.{setting}.urls", json.dumps([first, second]))
    urls = ["http://far:1", "http://far:2", "http://near:1", "http://far:1/b", "http://localhost:1"]
    assert rl("--orchestrator.client.urls", json.dumps(urls)).orchestrator.client.urls == urls


NEEDED = {
    "gae": ("--trainer.critic",), "distillation": ("--trainer.kl.reference", "teacher"),
    "pass_at_k": ("--trainer.advantage.k", "2"), "gdpo": ("--trainer.rewards.weights", '{"reward": 1}'),
    "online_dpo": ("--trainer.kl", "--trainer.loss", json.dumps(ONLINE_DPO_LOSS)),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
def test_groups_of_one_are_refused_where_the_advantage_compares_rollouts(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' compares.*group_size = 1.*group_size to 2 or more.*reinforce_pp"):
        rl("--orchestrator.group-size", "1", "--trainer.advantage", name, *NEEDED.get(name, ()))


def test_groups_of_one_are_taken_where_there_is_nothing_to_compare() -> None:
    for name in (*SINGLE_ADVANTAGES, "own:advantage"):
        config = rl("--orchestrator.group-size", "1", "--trainer.advantage", name, *NEEDED.get(name, ()))
        assert config.orchestrator.group_size == 1
    assert rl("--orchestrator.group-size", "1", *SAMPLES, *SFT).trainer.advantage.type == "dr_grpo"


def mixed(own: dict[str, Any], *flags: str) -> tuple[str, ...]:
    """The flags of a run with an environment as all are, and one with settings of its own."""
    return ("--orchestrator.environments", json.dumps([{"id": "reverse_text"}, {"id": "jsonl"} | own]), *flags)


DYNAMIC = ("--orchestrator.dynamic-sampling",)
TEACHER = ("--orchestrator.teacher.urls", "http://127.0.0.1:9000", "--orchestrator.teacher.model", "a/teacher")
SAMPLES = (*TEACHER, "--orchestrator.teacher.mode", "samples")
DISTIL = ("--trainer.advantage", "distillation", "--trainer.loss.type", "policy_gradient")
BESIDE = ("--trainer.distillation.coef", "0.5")
SFT, GSPO = ("--trainer.loss.type", "sft"), ("--trainer.loss.type", "gspo")
GAE = ("--trainer.advantage", "gae", "--trainer.critic")
WEIGHTED = (*TOY["rl"][2:], "--trainer.environments", '{"reverse_text": {"weight": 2}}')
IN_REWARD = ("--trainer.kl.place", "reward", "--trainer.kl.coef", "0.1")
OF_MODEL = ("--trainer.advantage", "distillation", "--trainer.kl.reference", "a/b")
CUT = ("--orchestrator.sampling.top-p", "0.9", "--orchestrator.sampling.min-p", "0.05")
PENALTY = ("--trainer.rewards.length-buffer-tokens", "9", "--trainer.rewards.length-max-tokens")
OWN = ("--orchestrator.environments", '[{"id": "own:Env"}]')
KEPT = ("--orchestrator.environments", '[{"id": "own:Env", "history": "keep"}]')
SERVED = {"id": "jsonl", "args": {"path": "x"}, "mcp_servers": {"a": {"command": "sh"}}, "history": "keep"}
TOOLS = ("--orchestrator.environments", json.dumps([SERVED]))


@pytest.mark.parametrize(("flags", "says"), [
    # Rewards that trainer and orchestrator see differently.
    ((*TOY["rl"][2:], "--trainer.environments", '{"revers": {"weight": 2}}'),
     "names 'revers'.*Did you mean 'reverse_text'"),
    (("--trainer.advantage", "pass_at_k", "--trainer.advantage.k", "9"), "= 9 is more than the 8 rollouts"),
    ((*DYNAMIC, "--trainer.reward-model.name", "m"), "rules_weight = 0 leaves it out"),
    ((*DYNAMIC, "--trainer.rewards.weights", '{"exact": 1}'), "weights leaves 'reward' out"),
    ((*DYNAMIC, "--trainer.rewards.weights", '{"exact": 1, "reward": 0}'), "weights leaves 'reward' out"),
    ((*PENALTY, "129"), "= 129 is never reached: orchestrator.sampling.max_tokens allows 128"),
    ((*PENALTY, "1024", *KEPT), "= 1024 is never reached: orchestrator.seq_len = 1024 with a prompt allows 1023"),
    # Advantages that the loss does not take.
    ((*GAE, *GSPO), "set loss.type = 'gspo_token'"),
    (("--trainer.advantage", "grpo_process", *GSPO), "what advantage = 'grpo_process' says of single tokens"),
    ((*OF_MODEL, *GSPO), "set loss.type = 'gspo_token'"),
    ((*WEIGHTED, *SFT), "has no effect with loss.type = 'sft'"),
    ((*GAE, *SFT), "has no effect with loss.type = 'sft'"),
    ((*IN_REWARD, *SFT), "has no effect with loss.type = 'sft'"),
    (("--trainer.reward-model.name", "m", *SFT), "reward_model has no effect with loss.type = 'sft'"),
    # A distillation needs one teacher, and a loss for what it gives.
    (DISTIL, "set trainer.kl.reference, or orchestrator.teacher"),
    (BESIDE, "set trainer.kl.reference, or orchestrator.teacher"),
    ((*DISTIL, *SAMPLES), "set trainer.kl.reference"),
    ((*DISTIL, *TEACHER, "--trainer.kl.reference", "b/teacher"), "both say what the reference is"),
    ((*DISTIL, *TEACHER, *DYNAMIC), "drops problems by their rewards"),
    (SAMPLES, "trainer.loss.type = 'dapo' takes the samples for the policy's own"),
    ((*SAMPLES, *SFT, "--weights.transport", "collective"), "and here a teacher samples"),
    ((*SAMPLES, *SFT, "--trainer.weights.transport", "collective"), "and here a teacher samples"),
    # What is set for all is checked with what one process has.
    (("--weights.transport", "collective", "--trainer.model.lora"), "^trainer: .*'collective' sends whole models"),
    ((*SAMPLES, *SFT, "--eval.interval", "5"), "^orchestrator: eval asks the engines of the policy"),
    (SFT, "set orchestrator.teacher with mode = 'samples'"),
    ((*SFT, *TEACHER), "set orchestrator.teacher with mode = 'samples'"),
    ((*DISTIL, *TEACHER, "--orchestrator.sampling.temperature", "2"), "log-probabilities of a teacher"),
    ((*DISTIL, *TEACHER, "--orchestrator.sampling.top-p", "0.9"),
     "sampling of environment 'reverse_text' at temperature 1, top_p 0.9"),
    # No divergence is taken between distributions that have different tokens.
    ((*CUT, "--trainer.kl"),
     r"cuts off tokens \(temperature 1, top_p 0.9, min_p 0.05, environment 'reverse_text'\), and trainer.kl"),
    (("--orchestrator.sampling.top-k", "1"), "1 leaves one token to choose from"),
    (("--inference.engine.args", '{"data_parallel_size": 2}'), "start more servers instead"),
    # A strategy for nodes needs a cluster of Ray.
    (("--cluster-strategy", "spread"), "cluster_strategy = 'spread' is for the nodes"),
    (("--cluster-strategy", "spread", "--cluster", "slurm"), "cluster_strategy = 'spread' is for the nodes"),
    # What one environment cannot have.
    (mixed({"seq_len": 1025}), "environment 'jsonl': seq_len = 1025 is more than the seq_len = 1024 of all"),
    (mixed({"group_size": 1}), "gives each of environment 'jsonl' a single one"),
    (mixed({"group_size": 1}, *DYNAMIC),
     r"every group of one is \(environment 'jsonl'\): set group_size to 2"),
    (mixed({"group_size": 2}, "--trainer.advantage", "pass_at_k", "--trainer.advantage.k", "3"),
     "advantage.k = 3 is more than the 2 rollouts of a problem of environment 'jsonl'"),
    (mixed({"sampling": {"top_k": 5}}, "--trainer.kl"), r"\(temperature 1, top_k 5, environment 'jsonl'\)"),
    (mixed({"sampling": {"top_k": 1}}), "1 leaves one token to choose from"),
    (mixed({"sampling": {"temperature": 0.5}}, *TEACHER, "--trainer.advantage", "distillation"),
     "sampling of environment 'jsonl' at temperature 0.5"),
])  # fmt: skip
def test_parts_of_a_run_that_do_not_fit_together_are_refused(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=says):
        rl(*flags)


@pytest.mark.parametrize("flags", [
    (*DYNAMIC, "--trainer.reward-model.name", "m", "--trainer.reward-model.rules-weight", "0.5"),
    (*DYNAMIC, "--trainer.rewards.weights", '{"exact": 1, "reward": 0.1}'),
    WEIGHTED, GAE, IN_REWARD, CUT,
    (*PENALTY, "128"),
    ("--trainer.advantage", "max_rl", "--trainer.rewards.clip", "1", "--trainer.rewards.scale", "running"),
    (*PENALTY, "2000", *OWN),  # it may have several turns, and branches
    (*PENALTY, "1000", *TOOLS),
    (*GAE, "--trainer.loss.type", "gspo_token"),
    (*OF_MODEL, "--trainer.loss.type", "gspo_token"),
    (*DISTIL, "--trainer.kl.reference", "b/teacher"),
    (*DISTIL, *TEACHER),
    (*BESIDE, *TEACHER, *DYNAMIC),
    (*SAMPLES, *SFT),
    (*SAMPLES, "--trainer.loss.type", "my_losses:imitate"),
    # What a teacher samples is imitated by the whole distribution.
    (*CUT, "--trainer.kl", *SAMPLES, *SFT),
    mixed({"group_size": 1}, "--trainer.environments", '{"jsonl": {"advantage": "reinforce_pp"}}'),
    mixed({"group_size": 9}, "--trainer.environments", '{"jsonl": {"advantage": {"type": "pass_at_k", "k": 9}}}'),
    mixed({"seq_len": 500}, *PENALTY, "128"),
])  # fmt: skip
def test_parts_of_a_run_that_fit_together_are_taken(flags: tuple[str, ...]) -> None:
    rl(*flags)


def test_dtype_follows_the_trainer_and_a_random_model_waits_for_weights() -> None:
    config = rl("--trainer.model.dtype", "bfloat16", "--trainer.model.init", "random")
    assert config.inference.model.dtype == "bfloat16" and config.inference.model.load == "dummy"
    kept = rl("--trainer.model.dtype", "bfloat16", "--inference.model.dtype", "float32")
    assert kept.inference.model.dtype == "float32"


def test_handing_down_leaves_its_argument_alone() -> None:
    config = parse_command_line(RlConfig, ["--max-steps", "7", "--clean"])
    before = config.model_copy(deep=True)
    handed = hand_down_shared(config)
    assert config == before
    assert handed.trainer.clean and not config.trainer.clean


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


def test_the_inference_server_computes_logits_as_the_trainer_does() -> None:
    both = rl("--trainer.model.fp32-lm-head", "--trainer.model.dtype", "bfloat16")
    assert both.inference.model.fp32_lm_head and both.inference.model.dtype == "bfloat16"
    alone = rl("--trainer.model.fp32-lm-head", "--no-inference.model.fp32-lm-head")
    assert alone.trainer.model.fp32_lm_head and not alone.inference.model.fp32_lm_head


def test_an_environment_has_its_own_settings_or_those_of_all() -> None:
    own = {"group_size": 3, "seq_len": 99, "sampling": {"temperature": 0.5, "max_tokens": 7, "stop": ["ab"]}}
    top_p = ("--orchestrator.sampling.top-p", "0.9", "--orchestrator.group-size", "4")
    orchestrator = rl(*mixed(own, *top_p)).orchestrator
    plain, other = (orchestrator.rollouts_of(section) for section in orchestrator.environments)
    assert plain == RolloutSettings(4, 1024, 128, Sampling(1.0, 0.9))
    assert other == RolloutSettings(3, 99, 7, Sampling(0.5, 0.9, stop=("ab",)))
    assert orchestrator.largest_group == 4 and not makes_same_batches(orchestrator, rl(*mixed({})).orchestrator)
    longest = rl(*mixed({"sampling": {"max_tokens": 300}}, "--trainer.loss.type", "dr_grpo"))
    assert longest.trainer.loss.constant_tokens == 300


@pytest.mark.parametrize("process", ["trainer", "orchestrator", "inference"])
def test_a_dry_run_of_a_process_is_a_dry_run_of_all(process: str) -> None:
    assert rl(f"--{process}.dry-run").dry_run and not rl(f"--{process}.seed", "3").dry_run


SAME_PORT = ("--dashboard.port", "8100", "--inference.server.port", "8100")


@pytest.mark.parametrize(("flags", "named"), [
    (SAME_PORT, "dashboard.port = 8100 is the port of inf"),
    (("--trainer.dashboard.port", "8101", "--inference.server.port", "8100", "--inference.engines", "2"),
     "dashboard.port = 8101 is the port of inference_1 as well"),
    (("--dashboard.port", "8000"), ""),  # the server takes the next one
    ((*SAME_PORT, "--dashboard.port", "0"), ""),
    ((*SAME_PORT, "--cluster", "ray"), ""),
    ((*SAME_PORT, "--orchestrator.client.urls", '["http://127.0.0.1:8000"]'), ""),  # no server is started
])  # fmt: skip
def test_the_live_page_and_a_server_may_not_be_given_the_same_port(flags: tuple[str, ...], named: str) -> None:
    if named:
        assert disagreement(*flags).startswith(named)
    else:
        assert rl(*flags).trainer.dashboard is not None
