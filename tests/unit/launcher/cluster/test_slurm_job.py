"""`--slurm`: the script, what it is made of, and what is refused."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.config import RlConfig, SftConfig, SupervisedCommand, program_config
from holdfast.config.cluster import SlurmConfig
from holdfast.config.load import parse_command_line, read_toml
from holdfast.errors import ConfigError
from holdfast.launcher.cluster.slurm import SlurmCluster
from holdfast.launcher.launch import launch_rl, launch_training

pytestmark = pytest.mark.usefixtures("in_root")


def parsed(output_dir: Path, *flags: str) -> RlConfig:
    return parse_command_line(RlConfig, ["@", "configs/reverse_text/rl.toml", "--output-dir", str(output_dir), *flags])


def parsed_training(program: str, output_dir: Path, *flags: str) -> SupervisedCommand:
    config = program_config(program)
    assert issubclass(config, SupervisedCommand)
    data = "examples/reverse_text/" + ("sft.jsonl" if program == "sft" else "preferences.jsonl")
    argv = ["--model.name", "examples/reverse_text/model", "--data.name", data, "--output-dir", str(output_dir), *flags]
    return parse_command_line(config, argv)


def training_script(program: str, output_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    config = parsed_training(program, output_dir, "--ckpt.interval", "5", "--slurm", "--dry-run", *flags)
    assert launch_training(config) == 0
    return capsys.readouterr().out


def check_shell(script: str) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([shellcheck, "--shell=bash", "-"], input=script, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def put(program: Path, code: str) -> None:
    program.write_text(f"#!/bin/bash\n{code}\n")
    program.chmod(0o755)


def script_of(output_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert launch_rl(parsed(output_dir, "--ckpt.interval", "5", "--slurm", "--dry-run", *flags)) == 0
    return capsys.readouterr().out


@pytest.mark.launch
def test_the_script_asks_for_what_the_settings_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ("--slurm.nodes", "2", "--slurm.gpus-per-node", "8", "--slurm.time", "24:00:00", "--slurm.partition", "gpu")
    more = ("--slurm.account", "me", "--slurm.extra", '["--qos=high"]', "--slurm.setup", '["module load cuda"]')
    script = script_of(tmp_path / "run", capsys, *job, *more, "--ckpt.grace-s", "200.5")
    options = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    asked = "job-name=holdfast nodes=2 ntasks-per-node=1 exclusive gpus-per-node=8 time=24:00:00 partition=gpu"
    # The signal comes ahead by the grace of the trainer, and a minute for all to end.
    output = f"account=me output={tmp_path}/run/slurm/job_%j.out open-mode=append requeue signal=B:USR1@261 qos=high"
    assert options == asked.split() + output.split()
    assert "\nmodule load cuda\n" in script and "--ckpt.resume-step auto &" in script
    check_shell(script)
    assert not (tmp_path / "run" / "slurm").exists(), "a dry run submits nothing"


@pytest.mark.launch
def test_a_job_does_not_read_the_variables_of_the_shell_that_submitted_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file says what won, such as the flag here; and `HOLDFAST_SLURM` would submit one job after another."""
    for name, value in (("MAX_STEPS", "7"), ("SLURM__NODES", "2"), ("ADMIN_TOKEN", "x"), ("CACHE", "/tmp")):
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    flags = ("--max-steps", "9")
    for script in (script_of(tmp_path, capsys, *flags), training_script("sft", tmp_path, capsys, *flags)):
        lines = script.splitlines()
        assert lines.index("unset HOLDFAST_MAX_STEPS HOLDFAST_SLURM__NODES") < next(
            place for place, line in enumerate(lines) if line.endswith("--ckpt.resume-step auto &")
        )
        assert "#SBATCH --nodes=2" in lines
        check_shell(script)


@pytest.mark.parametrize("program", ["sft", "dpo", "reward-model"])
def test_training_is_started_on_every_node(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By one step, which signals are sent to: `srun` takes SIGTERM for an order to kill."""
    script = training_script(program, tmp_path / "run", capsys, "--slurm.nodes", "2", "--slurm.gpus-per-node", "8")
    lines = script.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --signal=B:USR1@120"} <= set(lines)
    (start,) = [line for line in lines if line.startswith("srun ")]
    words = shlex.split(start.removesuffix(" &"))
    command = words.index(str(Path(sys.executable).with_name(program)))
    assert words[command + 1 :] == ["@", f"{tmp_path}/run/slurm/{program}.toml", "--ckpt.resume-step", "auto"]
    assert words[words.index("--ntasks-per-node") + 1] == "1" and "--label" in words[:command]
    assert "export MASTER_ADDR" in lines and "HOLDFAST_ADMIN_TOKEN" not in script
    for name in ("USR1", "TERM"):
        assert f"trap 'scancel --signal {name} \"$SLURM_JOB_ID\"' {name}" in lines
    alone = training_script(program, tmp_path / "run", capsys)
    assert "#SBATCH --nodes=1" in alone and "MASTER_ADDR" not in alone and "--label" not in alone
    for one in (script, alone):
        check_shell(one)


def test_the_commands_meet_at_the_first_node_by_its_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `scontrol` says it; a real shell reads that."""
    script = training_script("sft", tmp_path / "run", capsys, "--parallel.nodes", "3")
    assert "#SBATCH --nodes=3" in script
    for name, code in (
        ("scontrol", 'echo "NodeName=$3 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=n Version=24"'),
        ("sft", 'echo "$MASTER_ADDR"'),
        ("srun", 'while [ "$1" != @ ]; do command=$1; shift; done; "$command"'),
    ):
        put(tmp_path / name, code)
    script = script.replace(str(Path(sys.executable).with_name("sft")), str(tmp_path / "sft"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "first"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "10.0.0.7\n"), done.stderr


@pytest.mark.launch
def test_words_are_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch splits its lines at blanks, and takes off quotes, as a shell does; % stands for something in its names."""
    output_dir = tmp_path / "a run's \"100%é"
    script = script_of(output_dir, capsys, "--slurm.job-name", "two words")
    options = [shlex.split(line.removeprefix("#SBATCH ")) for line in script.splitlines() if line.startswith("#SBATCH")]
    in_options = str(output_dir).replace("%", "%%")
    assert ["--job-name=two words"] in options and [f"--output={in_options}/slurm/job_%j.out"] in options
    (command,) = [line for line in script.splitlines() if line.endswith(" auto &")]
    assert f"{output_dir}/slurm/rl.toml" in shlex.split(command)
    check_shell(script)
    (tmp_path / "it's $HOME").mkdir()
    model, data = Path("examples/reverse_text/model").absolute(), Path("examples/reverse_text/sft.jsonl").absolute()
    monkeypatch.chdir(tmp_path / "it's $HOME")
    flags = ["--model.name", str(model), "--data.name", str(data), "--ckpt", "--slurm", "--dry-run"]
    assert launch_training(parse_command_line(SftConfig, flags)) == 0
    script = capsys.readouterr().out
    (line,) = [line for line in script.splitlines() if line.startswith("cd ")]
    assert shlex.split(line)[1] == f"{tmp_path}/it's $HOME"
    assert f"{tmp_path}/it's $HOME/outputs/slurm/sft.toml" in shlex.split(script)


_TIMES = {"0": None, "5": 300, "5:30": 330, "24:00:00": 86400, "2-1": 176400, "1-0:1": 86460, "1-0:0:1": 86401}


@pytest.mark.parametrize(("time", "seconds"), _TIMES.items())
def test_a_time_is_read_as_sbatch_reads_it(time: str, seconds: float | None) -> None:
    assert SlurmConfig(time=time).time_s == seconds and SlurmConfig().time_s is None


@pytest.mark.launch
def test_the_script_passes_signals_on_and_requeues_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real shell runs it, with a launcher that ends as one does that has saved for SIGUSR1."""
    script = script_of(tmp_path / "run", capsys)
    put(tmp_path / "rl", "trap 'exit 138' USR1; trap 'exit 143' TERM; echo up; while true; do sleep 0.01; done")
    put(tmp_path / "scontrol", f'echo "$*" > {tmp_path}/asked')
    rl = next(word for word in script.split() if word.endswith("/rl"))
    for number, code, asked in (("USR1", 138, "requeue 7\n"), ("TERM", 143, None)):
        (tmp_path / "asked").unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        with subprocess.Popen(
            ["bash", "-c", script.replace(rl, str(tmp_path / "rl"))], env=environment, stdout=subprocess.PIPE
        ) as shell:
            assert shell.stdout is not None and shell.stdout.readline() == b"up\n"
            subprocess.run(["kill", f"-{number}", str(shell.pid)], check=True)
            assert shell.wait() == code
        assert ((tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else None) == asked
        # One that comes just when the launcher has been started is passed on too.
        early = script.replace(rl, str(tmp_path / "rl")).replace("launcher=$!\n", f"launcher=$!\nkill -{number} $$\n")
        assert subprocess.run(["bash", "-c", early], env=environment, stdout=subprocess.PIPE).returncode == code


def test_a_job_is_submitted_with_what_the_user_has_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitter = tmp_path / "sbatch"
    put(submitter, f'echo "$*" > {tmp_path}/asked; echo "41;cluster"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    run = tmp_path / "run"
    assert launch_rl(parsed(run, "--ckpt.interval", "5", "--slurm.nodes", "2")) == 0
    assert (tmp_path / "asked").read_text() == f"--parsable {run}/slurm/rl.sbatch\n"
    assert f"submitted job 41; its output: {run}/slurm/job_41.out" in capsys.readouterr().out
    told = read_toml(RlConfig, run / "slurm" / "rl.toml")
    assert told == parsed(run, "--ckpt.interval", "5") and told.slurm is None
    assert told.model_fields_set == parsed(run, "--ckpt.interval", "5").model_fields_set
    sft = parsed_training("sft", tmp_path / "sft", "--ckpt.interval", "5", "--slurm")
    submitter.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    with pytest.raises(ConfigError, match=r"sbatch refuses .*sft\.sbatch: sbatch: error: invalid partition"):
        launch_training(sft)
    submitter.write_text("#!/bin/bash\nkill -KILL $$\n")
    with pytest.raises(ConfigError, match="sbatch was killed by SIGKILL: see by squeue whether the job is there"):
        launch_training(sft)
    submitter.write_text(f"#!/bin/bash\nmkfifo {tmp_path}/nobody; read -r < {tmp_path}/nobody\n")
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.launcher.cluster.slurm._COMMAND_TIMEOUT_S", 0.1)
        with pytest.raises(ConfigError, match=r"sbatch has not answered within 0 s: see by squeue"):
            launch_training(sft)
    names = submitter.with_name("scontrol")  # of the launcher within a job
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    for does, timeout_s, how in (
        ("kill -KILL $$", 60.0, "failed: it was killed by SIGKILL"),
        (f"read -r < {tmp_path}/nobody", 0.1, "has not answered within 0.1 s"),
    ):
        monkeypatch.setattr("holdfast.launcher.cluster.slurm._COMMAND_TIMEOUT_S", timeout_s)
        put(names, does)
        with pytest.raises(ConfigError, match=rf"`scontrol show hostnames node\[1-2\]` {how}"):
            SlurmCluster()
    submitter.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs SLURM's sbatch, which is not on this machine. The script is "):
        launch_training(sft)


@pytest.mark.parametrize(("flags", "reason"), [
    (("--slurm",), "--slurm needs checkpoints"),
    (("--slurm", "--ckpt.resume-step", "3"), "ckpt.resume_step = 3: with --slurm it is 'auto'"),
    (("--slurm", "--ckpt", "--clean"), "--clean with --slurm would remove the run"),
    (("--ckpt", "--slurm.time", "00:02:00"), "00:02:00 is over before .* 120 s"),
    (("--slurm.nodes", "2", "--ckpt", "--parallel.nodes", "4"), r"parallel\.nodes = 4 and slurm\.nodes = 2: all"),
    (("--slurm", "--ckpt", "--parallel.rdzv-endpoint", "head:1"), r"rdzv_endpoint = head:1 names one machine"),
])  # fmt: skip
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_impossible_jobs_are_told(flags: tuple[str, ...], reason: str, more: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        launch_training(parsed_training("sft", tmp_path / "run", *flags, *more))


@pytest.mark.launch
@pytest.mark.parametrize(("flags", "reason"), [
    (("--slurm.partition", "a\nb"), "must not hold line breaks"),
    (("--slurm.partition", " "), "flag --slurm.partition must not be empty"),
    (("--slurm.extra", '["rm -rf /"]'), "must be options such as --qos=high, got .*rm -rf"),
    (("--slurm.time", "tomorrow"), "must be minutes, HH:MM:SS or D-HH:MM:SS"),
    (("--slurm.time", "1:::2"), "must be minutes, HH:MM:SS or D-HH:MM:SS"),
    (("--cluster", "ray://head"), "should be 'ray', 'ray://HOST:PORT' or 'slurm', got \"ray://head\""),
    (("--slurm", "--ckpt", "--cluster", "ray"), "cluster = 'ray' and --slurm are two places"),
    (("--cluster", "slurm"), r"needs an allocation \(SLURM_JOB_NODELIST is not set\)"),
    (("--trainer.parallel.nodes", "2"), "without --cluster `rl` starts all on this machine"),
    (("--cluster", "ray://127.0.0.1:1"), "there is no Ray cluster at 127.0.0.1:1: .*refused"),
    (("--cluster", "ray", "--inference.server.host", "0.0.0.0"), "names one machine, and `cluster` chooses it"),
])  # fmt: skip
def test_what_no_cluster_takes_is_refused(
    flags: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ConfigError, match=reason):
        launch_rl(parsed(tmp_path / "run", "--dry-run", *flags))
