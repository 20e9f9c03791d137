"""The command line: files from left to right, sections from files, flags over files, and every error."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.config import InferenceConfig, OrchestratorConfig, RlConfig, SftConfig, TrainerConfig
from holdfast.config.advantages import GrpoAdvantage, PassAtK
from holdfast.config.base import CkptConfig, Command
from holdfast.config.flags import flags_of
from holdfast.config.help import hint, names_elsewhere
from holdfast.config.load import parse_command_line, read_toml, to_toml
from holdfast.config.policy_losses import GrpoLoss
from holdfast.config.resolved import fingerprint
from holdfast.config.rl import hand_down_shared
from holdfast.config.view import ProfiledSteps
from holdfast.errors import ConfigError, is_storage_failure

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(name: str, content: str) -> str:
        path = tmp_path / name
        path.write_text(content)
        return str(path)

    return to_file


def sft(*argv: str) -> SftConfig:
    return parse_command_line(SftConfig, list(argv))


def rl(*argv: str) -> RlConfig:
    return parse_command_line(RlConfig, list(argv))


def refused(*argv: str, command: type[Command] = SftConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_command_line(command, list(argv))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_files_compose_from_left_to_right_and_flags_win_wherever_they_stand(write: Write) -> None:
    first = write("first.toml", "max_steps = 7\nseed = 3\n[optim]\nlr = 0.5\nschedule = 'linear'\n")
    second = write("second.toml", "max_steps = 9\n[optim]\nlr = 0.25\n")
    config = sft("@", first, "@", second)
    assert (config.max_steps, config.seed, config.optim.lr, config.optim.schedule) == (9, 3, 0.25, "linear")
    config = sft(f"@{second}", "--dry-run", "@", first)  # a file behind a switch is one of the whole
    assert (config.max_steps, config.optim.lr, config.dry_run) == (7, 0.5, True)
    assert sft("--no-data.pack", "@", first).max_steps == 7
    path = write("a.toml", "max_steps = 7\n[optim]\nlr = 0.5\nwarmup_steps = 2\n")
    for argv in (["--max-steps=8", "--optim.lr", "0.1", "--data.pack", "@", path],
                 ["@", path, "--max-steps=8", "--optim.lr", "0.1"]):  # fmt: skip
        config = sft(*argv)
        assert (config.max_steps, config.optim.lr, config.optim.warmup_steps) == (8, 0.1, 2)


def test_a_section_from_a_file_adds_to_what_another_file_says(write: Write) -> None:
    whole = write("whole.toml", "seed = 4\n[ckpt]\nkeep = 3\n")
    config = sft("@", whole, "--ckpt", "@", write("section.toml", "interval = 2\n"))
    assert config.ckpt is not None and (config.ckpt.interval, config.ckpt.keep, config.seed) == (2, 3, 4)


@pytest.mark.parametrize(("line", "says"), [
    ("advantag = 'grpo'", "unknown key 'trainer.environments.sums.advantag'. Did you mean 'advantage'?"),
    ("trainer = 1", "unknown key 'trainer.environments.sums.trainer'. Allowed here: "),
    ("weight = 0", "'trainer.environments.sums.weight' should be greater than 0, got 0"),
    (
        "advantage = 3",
        "'trainer.environments.sums.advantage' is a section: give its settings, as in "
        "--trainer.environments.sums.advantage.NAME VALUE or [trainer.environments.sums.advantage], got 3",
    ),
    ("advantage = { type = 'pass_at_k' }", "'trainer.environments.sums.advantage.k' is needed"),
    ("advantage = 'rlo'", "'trainer.environments.sums.advantage.type' there is no 'rlo'. Did you mean 'rloo'?"),
])  # fmt: skip
def test_a_mistake_in_a_table_that_the_user_named_is_told_with_that_name(write: Write, line: str, says: str) -> None:
    path = write("rl.toml", f"[trainer.environments.sums]\n{line}\n")
    assert refused("@", path, command=RlConfig).startswith(f"{path}: {says}")
    assert "'trainer.environments.sums' " in refused("--trainer.environments", '{"sums": 3}', command=RlConfig)


@pytest.mark.parametrize(("command", "flags", "content", "said"), [
    (SftConfig, ("@",), "[optim]\nschdule = 'linear'\n", ("'optim.schdule'", "'schedule'")),
    # With nothing similar the allowed keys are listed.
    (RlConfig, ("--trainer", "@"), "[optim]\nlearning_rate = 1\n", ("trainer.optim.learning_rate", "lr")),
    (RlConfig, ("--traner", "@"), "max_steps = 3\n", ("'traner'", "'trainer'")),
    (OrchestratorConfig, ("@",), "[[environments]]\nwieght = 2.0\n", ("environments.0.wieght", "'weight'")),
    (SftConfig, ("@",), "seed = 1\nmax_steps = = 3\n", ("line 2",)),
])  # fmt: skip
def test_an_unknown_key_names_its_file_itself_and_the_nearest_spelling(
    command: type[Command], flags: tuple[str, ...], content: str, said: tuple[str, ...], write: Write
) -> None:
    good, bad = write("good.toml", ""), write("bad.toml", content)
    message = refused("@", good, *flags, bad, command=command)
    assert bad in message and good not in message
    assert all(part in message for part in said)


@pytest.mark.parametrize(("toml", "key", "given", "allowed"), [
    ("max_steps = 'many'", "max_steps", '"many"', "integer"),
    ("max_steps = 0", "max_steps", "0", "greater than or equal to 1"),
    ("optim = 3", "optim", "3", "is a section: give its settings"),
    ("[optim]\nlr = -1.0", "optim.lr", "-1.0", "greater than 0"),
    ("[optim]\nbetas = [1, 2, 3]", "optim.betas", "[1, 2, 3]", "2"),
    ("[optim]\nschedule = 'cosin'", "optim.schedule", '"cosin"', "'cosine'"),
    ("[model]\ndtype = 'float16'", "model.dtype", '"float16"', "'bfloat16'"),
    ("[ckpt]\nresume_step = 'newest'", "ckpt.resume_step", '"newest"', "'latest' or 'auto'"),
])  # fmt: skip
def test_a_wrong_value_is_told_with_its_place(toml: str, key: str, given: str, allowed: str, write: Write) -> None:
    path = write("a.toml", toml)
    message = refused("@", path)
    assert message.startswith(path)
    assert f"'{key}'" in message and given in message and allowed in message
    assert "int," not in message and "literal[" not in message, "alternatives of a union are not keys"


def test_a_wrong_flag_is_named_as_the_flag_even_when_a_file_says_the_same_key(write: Write) -> None:
    path = write("a.toml", "[optim]\nlr = 0.5\n")
    message = refused("@", path, "--optim.lr", "fast")
    assert "--optim.lr" in message and "fast" in message and path not in message
    betas = write("b.toml", "[optim]\nmoments_dtype = 'bfloat16'\n")
    wrong = refused("@", betas, "--optim.betas", "0.9,0.99")
    assert wrong.startswith(f"{betas}, flag --optim.betas: 'optim' moments_dtype")
    other = refused("@", path, "--optim.momentum", "0.3")
    assert other.startswith("flag --optim.momentum has no effect with optim.type = 'adamw' (the default): it belongs")


def test_all_mistakes_are_told_at_once(write: Write) -> None:
    first = write("first.toml", "sed = 1\n[optim]\nlr = -1.0\n")
    second = write("second.toml", "[data]\nbatchsize = 3\n")
    message = refused("@", first, "@", second, "--max-steps", "0")
    for part in (f"{first}: unknown key 'sed'", f"{first}: 'optim.lr'", f"{second}: unknown key 'data.batchsize'",
                 "--max-steps"):  # fmt: skip
        assert part in message
    assert len(message.splitlines()) == 4


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbfmax_steps = 7")
    assert sft("@", str(tmp_path / "marked.toml")).max_steps == 7


def test_what_is_no_file_of_text_is_named(tmp_path: Path) -> None:
    assert "'@ nowhere/a.toml'" in refused("@", "nowhere/a.toml") and "path" in refused("@")
    assert "path" in refused("--trainer", "@", command=RlConfig) and str(tmp_path) in refused("@", str(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "binary.toml" in refused("@", str(tmp_path / "binary.toml"))
    # A pipe without a writer would be waited for, and `/dev/zero` has no end.
    pipe, sparse = tmp_path / "pipe.toml", tmp_path / "sparse.toml"
    os.mkfifo(pipe)
    with open(sparse, "wb") as file:
        file.truncate(1 << 34)
    assert "is not a regular file" in refused("@", str(pipe))
    assert "is not a regular file" in refused("@", "/dev/zero")
    assert "has 17179869184 bytes, allowed are" in refused("@", str(sparse))


@pytest.mark.parametrize(
    "argv", [["stray"], ["--max-steps"], ["--data.pack=maybe"], ["--ckpt", "stray"], ["--data.pack=true", "false"],
             ["--no-data.pack", "false"]]
)  # fmt: skip
def test_words_that_fit_nowhere_are_refused(argv: list[str]) -> None:
    assert argv[-1].split("=")[-1].removeprefix("--") in refused(*argv)


@pytest.mark.parametrize(("argv", "said"), [
    (["--data.pack", "maybe"], "--data.pack takes no value, or true or false."),
    (["--no-data.pack", "yes"], "--no-data.pack takes no value."),
    (["optim.weight_decay=0.1"], "Did you mean '--optim.weight_decay=0.1'?"),
    (["s3://me:PW@b/x"], "unexpected 's3://***@b/x'"),
])  # fmt: skip
def test_what_a_stray_word_may_mean(argv: list[str], said: str) -> None:
    assert said in refused(*argv)


@pytest.mark.parametrize(("word", "packs"), [("false", False), ("True", True)])
def test_a_switch_takes_true_or_false_behind_it(word: str, packs: bool) -> None:
    config = sft("--data.pack", word, "--max-steps", "7")
    assert config.data.pack is packs and config.max_steps == 7


def test_a_file_tells_names_of_other_systems_as_flags_do(write: Write) -> None:
    known = [flag.key for flag in flags_of(SftConfig).values()]
    for name in names_elsewhere():
        if name not in SftConfig.model_fields and "." not in name and (said := hint(name, known)):
            assert f"unknown key '{name}'.{said}" in refused("@", write("theirs.toml", f"{name} = 1"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("seed = " + "1" * 10_000, "is not valid TOML: Exceeds the limit"),
        ("x = " + "[" * 100_000 + "]" * 100_000, "nested too deeply|not valid TOML"),
        ("[" + ".".join("a" * 50_000) + "]\nb = 1", "nested too deeply|not valid TOML"),
        ("[optim]\nlr = 1e-4\nlr = 2e-5", "sets a key twice.* in line 3, 'lr = 2e-5'. Keep one"),
        ("[data]\n[optim]\n[data]", r"begins a table twice.* in line 3, '\[data\]'"),
        ("data = {name = 'x', name = 'y'}", "sets a key twice.* in line 1"),
        ("seed = true", "'seed' should be a number, not true or false, got true"),
        ("[optim]\nbetas = [0.9, 1]", "'optim.betas' should be two numbers from 0 on and below 1"),
        ('[optim]\nmoments_dtype = "bfloat16"\nbetas = [0.9, 0.999]', "needs decay rates of at most 0.96, got betas"),
        ('[parallel]\nrdzv_endpoint = "a..b:1"', "'parallel.rdzv_endpoint' should be HOST:PORT or HOST"),
        ("[optim]\nlr = true", "'optim.lr' should be a number, not true or false"),
        ("[optim]\nlr = inf", "'optim.lr' should be a finite number, got Infinity"),
        ("[optim]\nlr = nan", "'optim.lr' should be "),
        ('[model]\nname = "a\\u0000b"', "'model.name' must not hold the character NUL"),
        ('output_dir = "a\\u0000b"', "'output_dir' must not hold the character NUL"),
        ('[tracking]\ntags = ["a\\u0000b"]', "'tracking.tags' must not hold the character NUL"),
    ],
    ids=[
        "int", "array", "table", "twice", "again", "inline", "betas", "slow", "host", "bool", "float", "inf", "nan",
        "NUL", "path", "list",
    ],
)  # fmt: skip
def test_values_that_nothing_can_do_with_are_told_in_a_line(write: Write, content: str, said: str) -> None:
    message = refused("@", write("strange.toml", content))
    assert "strange.toml" in message and re.search(said, message) and len(message) < 1500


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "1" * 10_000], "seed"),
        (["--client.urls", "[" * 100_000 + "]" * 100_000], "."),
        (["--client.urls", "[" + "1" * 10_000 + "]"], "."),
        (["--environments", '[{"id": "reverse_text", "weight": 1e999}]'], "environments.0.weight"),
        (["--weights-timeout-s", "inf"], "weights-timeout-s should be a finite number"),
        (["--client.ready-timeout-s", "nan"], "client.ready-timeout-s"),
        (["--output-dir", os.fsdecode(b"caf\xe9")], "must be text in UTF-8"),
        (["--environments", r'[{"id": "a", "args": {"b": [{"c": "\ud800"}]}}]'], "environments.0.args.* text in UTF-8"),
        (["--environments", r'[{"id": "a", "name": "b\nc"}]'], "environments.0.name.* must be text on one line"),
        (["--environments", r'[{"id": "a", "args": {"\u0000": 1}}]'], "environments.0.args.* character NUL"),
    ],
    ids=["digits", "array", "long", "weight", "timeout", "nan", "latin-1", "half a pair", "a name", "NUL in a key"],
)
def test_flags_that_nothing_can_do_with_are_told_in_a_line(flags: list[str], said: str) -> None:
    message = refused(*flags, command=OrchestratorConfig)
    assert re.search(said, message) and len(message) < 1500


def test_flags_are_read_as_their_settings_are_typed() -> None:
    """Dashes and underscores are alike; lists in three ways; `null` unsets what a file has set."""
    config = sft("--max_steps", "7", "--ckpt.resume_step=-1", "--optim.betas", "0.5,0.75", "--no-data.pack")
    assert config.max_steps == 7 and config.ckpt is not None and config.ckpt.resume_step == -1
    assert config.optim.betas == (0.5, 0.75) and not config.data.pack
    assert sft("--optim.betas", "[0.5, 0.75]") == sft("--optim.betas", "0.5", "--optim.betas", "0.75")
    assert sft("--ckpt", '{"keep": 3}', "--ckpt.interval", "2").ckpt == CkptConfig(keep=3, interval=2)
    assert sft("--ckpt.keep", "3", "--ckpt", "null").ckpt is None
    urls = parse_command_line(OrchestratorConfig, ["--client.urls", "http://a:1,http://b:1"]).client.urls
    assert urls == ["http://a:1", "http://b:1"]


@pytest.mark.parametrize("flag", ["--no-clean", "--no_clean", "--no-dry_run", "--no_data.pack"])
def test_a_switch_that_is_turned_off_is_off_however_it_is_spelled(flag: str) -> None:
    """`--no_clean` as `--clean` would remove a run."""
    config = sft(flag)
    assert not config.clean and not config.dry_run and config.data.pack is not flag.endswith("pack")
    assert "takes no value" in refused(f"{flag}=true")


def test_tables_and_words_in_a_list() -> None:
    (one,) = rl("--orchestrator.environments", '{"id": "jsonl"}').orchestrator.environments
    assert one.id == "jsonl"
    lora = sft("--model.lora.target-modules", "all-linear").model.lora
    assert lora is not None and lora.target_modules == "all-linear"
    assert "(@ FILE.toml)" in refused("--engine.args", "seed=3", command=InferenceConfig)
    assert refused("--engine.args", '{"a": {}}', command=InferenceConfig).endswith(" or should be a valid boolean")


def test_one_item_of_a_list_is_changed_by_its_number_or_name(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("rl.toml", "[[orchestrator.environments]]\nid = 'jsonl'\nname = 'a.b'\nargs = { path = 'x' }\n")
    begin = "--orchestrator.environments"
    flags = (f"{begin}.0.args.max_rows", "3", f"{begin}.a.b.args.path=1e3.jsonl", f"{begin}.0.group-size", "4")
    (one,) = rl("@", path, *flags, f"{begin}.a.b.sampling.max_tokens", "5").orchestrator.environments
    assert (one.args, one.group_size, one.sampling.max_tokens) == ({"path": "1e3.jsonl", "max_rows": 3}, 4, 5)
    (one,) = rl("@", path, begin, '{"id": "jsonl"}', f"{begin}.jsonl.weight", "2").orchestrator.environments
    assert (one.label, one.weight) == ("jsonl", 2), "the list of the flag, and not of the file"
    assert sft("--hooks", "m:A,m:B", "--hooks.B.args.x", "true").hooks[1].args == {"x": True}
    monkeypatch.setenv("HOLDFAST_ORCHESTRATOR__ENVIRONMENTS", '[{"id": "reverse_text"}, {"id": "jsonl"}]')
    assert [one.weight for one in rl("@", path, f"{begin}.1.weight", "2").orchestrator.environments] == [1, 2]
    for flag, said in (
        ("jsonI.weight", "has no item 'jsonI'. Did you mean 'jsonl'? There are: 0 (reverse_text), 1 (jsonl)"),
        ("2.weight", "has no item '2'. There are: 0 (reverse_text), 1 (jsonl)"),
        ("1.weigth", f"flag {begin}.1.weigth: unknown key 'orchestrator.environments.1.weigth'. Did you mean 'weight'"),
    ):
        assert said in refused(f"{begin}.{flag}", "2", command=RlConfig)
    assert refused(f"{begin}.1.weight", command=RlConfig) == f"flag '{begin}.1.weight' needs a value"
    assert f"flag {begin}.1.weight should be a valid number" in refused(f"{begin}.1.weight=x", command=RlConfig)


def test_all_unknown_flags_are_told_at_once() -> None:
    message = refused("--max-stepz", "3", "--unheard-of=4", "--seed", "1", "--another", "--dry-run")
    assert [line.split("'")[1] for line in message.splitlines()] == ["--max-stepz", "--unheard-of", "--another"]
    assert "'--max-stepz'" in refused("--max-stepz", "0.9", "0.95")


def test_where_there_need_be_no_limit_infinity_is_one(write: Write) -> None:
    assert sft("--optim.max-grad-norm", "inf").optim.max_grad_norm == math.inf
    path = write("orch.toml", "[[environments]]\nid = 'jsonl'\ntimeout_s = inf\n")
    assert parse_command_line(OrchestratorConfig, ["@", path]).environments[0].deadline_s is None


def test_a_resolved_file_that_the_storage_does_not_give_is_no_mistake_in_it() -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_toml(SftConfig, "/proc/self/mem")  # whose first byte is nobody's: EIO
    assert is_storage_failure(caught.value), "so a process that reads its configuration is started again"


def test_many_mistakes_are_not_all_listed(write: Write) -> None:
    message = refused("@", write("many.toml", "".join(f"unknown_{number} = 1\n" for number in range(10_000))))
    assert "and 9980 more like these" in message and len(message) < 10_000


def test_a_file_for_another_section_is_told_by_its_keys(write: Write) -> None:
    trainer = write("trainer.toml", "[loss]\ntype = 'grpo'\n[optim]\nlr = 1e-4\n")
    said = refused("--orchestrator", "@", trainer, command=RlConfig)
    assert f"{trainer}: unknown key 'orchestrator.optim'. Did you mean 'trainer.optim'" in said


def _sft(*flags: str) -> SftConfig:
    return parse_command_line(SftConfig, ["--max-steps", "100", *flags])


# The last has digits all the same, of another script.
_NO_STEPS = ("3", "a:b", "3:5:7", "-1:2", "3:9999999999", "5:3", "0:2", "\u0663:\u0665")
_ALLOWED = "should be FIRST:LAST, the first and the last step to profile, from 1 on, such as 3:5, got"
_TOO_LATE = ("3:101", "profile = '3:101' ends after max_steps = 100: choose other steps, or raise it")


@pytest.mark.parametrize(
    ("given", "said"), [*((given, f"{_ALLOWED} {json.dumps(given)}") for given in _NO_STEPS), _TOO_LATE]
)
def test_what_names_no_steps_of_the_run_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _sft(f"--profile={given}")
    assert said in str(refused.value) and "profile" in str(refused.value)


def test_steps_are_both_included_and_survive_the_file(tmp_path: Path) -> None:
    config = _sft("--profile", "3:5")
    steps = config.profiled_steps
    assert steps == ProfiledSteps(3, 5) and steps is not None and len(steps) == 3 and str(steps) == "3:5"
    (tmp_path / "sft.toml").write_text(to_toml(config))
    assert read_toml(SftConfig, tmp_path / "sft.toml").profiled_steps == steps
    assert len(ProfiledSteps.parse("100:100")) == 1 and _sft("--profile", "100:100").profile == "100:100"
    assert _sft().profiled_steps is None
    assert fingerprint(config) == fingerprint(_sft()), "it changes nothing that is computed"
    (tmp_path / "sft.toml").write_text("profile = 3\n")
    with pytest.raises(ConfigError, match="'profile' should be FIRST:LAST.*, got 3"):
        read_toml(SftConfig, tmp_path / "sft.toml")


def test_rl_hands_it_to_its_trainer() -> None:
    given = RlConfig.model_validate({"profile": "3:5", "orchestrator": {"max_steps": 5}})
    assert hand_down_shared(given).trainer.profile == "3:5"
    of_trainer = hand_down_shared(RlConfig.model_validate({"trainer": {"profile": "2:2"}}))
    assert of_trainer.trainer.profile == of_trainer.profile == "2:2"


OF_POLICY_GRADIENT = "[loss]\ntype = 'policy_gradient'\nratio_max = 3\n"


@pytest.mark.parametrize(("file", "flags", "said"), [
    ("", "--loss.ratio-max 3", "flag --loss.ratio-max has no effect with loss.type = 'dapo' (the default): it "
     "belongs to 'dppo', 'policy_gradient'. Leave it out, or set loss.type to one of these"),
    (OF_POLICY_GRADIENT, "--loss.type gspo", "trainer.toml: 'loss.ratio_max' has no effect with loss.type = 'gspo' "
     "(flag --loss.type): it belongs to"),
    (OF_POLICY_GRADIENT, "--loss.clip-high 1", "flag --loss.clip-high has no effect with loss.type = "
     "'policy_gradient' (trainer.toml): it belongs to 'grpo', "),
    ("", "--loss.type cipso", "flag --loss.type: there is no 'cipso'. Did you mean 'cispo'? Allowed: grpo, "),
    ("", "--loss 3", "flag --loss: there is no '3'. Allowed: grpo, "),
    ("[loss]\nclip_lo = 1\n", "", "trainer.toml: unknown key 'loss.clip_lo'. Did you mean 'clip_low'?"),
    ("[weights]\nhost = 'h'\n", "", "trainer.toml: 'weights.host' has no effect with weights.transport = "
     "'directory' (the default): it belongs to 'collective'. Leave it out, or set weights.transport to "
     "'collective'"),
    ("", "--loss.correction.high 0.5 --loss.correction.type mask", "flag --loss.correction.high should be greater"),
])  # fmt: skip
def test_a_setting_of_another_type_is_refused_with_the_types_that_have_it(
    file: str, flags: str, said: str, in_tmp_path: Path
) -> None:
    (in_tmp_path / "trainer.toml").write_text(file)
    with pytest.raises(ConfigError) as refused:
        parse_command_line(TrainerConfig, ["@", "trainer.toml", *flags.split()])
    assert said in str(refused.value)


def test_a_type_by_a_flag_takes_the_settings_that_a_file_gives_it(in_tmp_path: Path) -> None:
    (in_tmp_path / "trainer.toml").write_text("[loss]\nclip_high = 0.5\nratio_to = 'old'\n")
    config = parse_command_line(TrainerConfig, ["@", "trainer.toml", "--loss.type", "grpo", "--loss.clip-low", "0.1"])
    assert isinstance(config.loss, GrpoLoss) and config.loss.clip_range == (0.9, 1.5)
    assert config.loss.ratio_to == "old" and config.loss.aggregation == "sequence"


def test_a_section_by_type_may_be_given_by_its_type_alone(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    both = "[trainer]\nadvantage = 'pass_at_k'\nloss = 'gspo'\n[trainer.environments.a]\nadvantage = 'rloo'\n"
    path = write("rl.toml", both)
    trainer = rl("@", path, "--trainer.advantage.k", "2", "--trainer.loss.correction", "mask").trainer
    assert trainer.advantage == PassAtK(k=2) and trainer.advantage_of("a").type == "rloo"
    assert (trainer.loss.type, trainer.loss.correction.type) == ("gspo", "mask")
    monkeypatch.setenv("HOLDFAST_TRAINER__OPTIM", "muon")
    trainer = rl("@", path, "--trainer.advantage", "grpo", "--trainer.advantage.std", "batch").trainer
    assert trainer.advantage == GrpoAdvantage(std="batch") and trainer.optim.type == "muon"
    with pytest.raises(ConfigError, match="flag --trainer.advantage.std has no effect with trainer.advantage.type"):
        rl("@", path, "--trainer.advantage", "rloo", "--trainer.advantage.std", "batch")
    with pytest.raises(ConfigError, match="flag --trainer.loss: there is no 'gspoo'. Did you mean"):
        rl("@", path, "--trainer.loss", "gspoo")
