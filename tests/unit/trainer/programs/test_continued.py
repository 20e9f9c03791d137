"""Programs that begin with what another run left: forks, warm starts, stores, and what is refused."""

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from holdfast.config.training import AdamWConfig, learning_rate
from holdfast.errors import CheckpointError, HoldfastError, SaveError, Stopped, StorageError
from holdfast.process.events import EVENTS_ENV
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run import manifest
from holdfast.run.checkpoints import Kind, kind_of
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import ADAPTER_DIR, weights_digest
from holdfast.trainer.export import Export, TensorReader, _about_end_tokens, export
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.preference import reference
from holdfast.trainer.preference.pairs import Preference
from holdfast.trainer.stop import StopRequest
from tests.builders.checkpoint_files import contents
from tests.conftest import ModelFactory
from tests.faults.run_states import checkpoint_state, differing
from tests.runs.rl import exact_metrics
from tests.servers.s3 import BUCKET, S3Server
from tests.unit.trainer.programs.cases import LORA, Programs
from tests.unit.trainer.programs.in_process import HALF, STEPS, column, end_state, train

SCHEDULE = {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 1}
URL = f"s3://{BUCKET}/run"


@pytest.fixture(scope="module")
def sft(programs: Programs) -> dict[str, Any]:
    """Settings of `sft` with dropout and a schedule that ends with the run."""
    return programs.settings("sft, a row for each sample") | {"optim": SCHEDULE}


@pytest.fixture(scope="module")
def straight(sft: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of `sft` until step 8, with the checkpoint of step 5."""
    return train("sft", tmp_path_factory.mktemp("other") / "run", sft | {"ckpt": {"interval": HALF}}, until=STEPS)


def test_a_fork_goes_on_as_the_other_run_did_bit_for_bit(
    straight: RunDir, sft: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = straight.checkpoint(HALF)
    forked = train("sft", tmp_path / "fork", sft | {"ckpt": {"resume_dir": source}}, until=STEPS)
    assert f"forked {source}" in capsys.readouterr().out
    assert differing(*[checkpoint_state(run_dir.checkpoint(STEPS)) for run_dir in (forked, straight)]) == []
    later = range(HALF + 1, STEPS + 1)
    assert exact_metrics(forked, later) == exact_metrics(straight, later)
    identity = json.loads((forked.path / "run.json").read_text())
    assert identity["forked_from"] == {"run_id": straight.run_id(), "step": HALF, "path": str(source)}
    assert identity["run_id"] != straight.run_id()
    assert manifest.verify(forked.checkpoint(HALF)) == manifest.verify(source)
    assert straight.committed_steps() == [HALF, STEPS]


@pytest.mark.parametrize("has_end", [False, True])
def test_more_steps_stretch_a_schedule_without_an_end_of_its_own_and_the_command_says_so(
    has_end: bool, straight: RunDir, sft: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"ckpt": {"resume_dir": straight.checkpoint(HALF)}}
    own |= {"optim": SCHEDULE | {"schedule_steps": STEPS}} if has_end else {}
    run_dir = train("sft", tmp_path / "longer", sft | own, until=STEPS + 1)
    out, rates = capsys.readouterr().out, column(straight, "lr")
    if has_end:
        assert column(run_dir, "lr") == [*rates[HALF:], rates[-1]] and rates[-1] > 0
        assert column(run_dir, "loss")[:-1] == column(straight, "loss")[HALF:] and "schedule now ends" not in out
        return
    cosine = AdamWConfig.model_validate(SCHEDULE)
    expected = [learning_rate(step, cosine, STEPS + 1) for step in range(HALF + 1, STEPS + 2)]
    assert column(run_dir, "lr") == pytest.approx(expected, rel=1e-7)
    assert "the cosine schedule now ends at step 9 instead of 8: the learning rate of step 6 is" in out
    assert "max_steps: 8 -> 9" in out


@pytest.mark.parametrize("kind", ["checkpoint", "weights"])
def test_a_warm_start_takes_the_weights_only(kind: str, straight: RunDir, sft: dict[str, Any], tmp_path: Path) -> None:
    """It is the run that loads the published weights by the name of the model, from its first step on."""
    published = straight.weights_of(STEPS)
    source = {"checkpoint": straight.checkpoint(STEPS), "weights": published}[kind]
    by_name = train("sft", tmp_path / "name", sft | {"model": {"name": str(published)}}, until=2)
    warm = train("sft", tmp_path / "warm", sft | {"ckpt": {"init_from": source}}, until=2)
    assert column(warm, "step") == [1, 2] and column(warm, "samples") == [8, 16]
    assert exact_metrics(warm, (1, 2)) == exact_metrics(by_name, (1, 2))
    assert contents(warm.weights_of(2))["model.safetensors"] == contents(by_name.weights_of(2))["model.safetensors"]
    assert "forked_from" not in (warm.path / "run.json").read_text()


def test_a_reward_model_is_trained_further_from_what_was_published(programs: Programs, tmp_path: Path) -> None:
    """With a learning rate that moves nothing: as its weights, as a warm start, and with adapters on it."""
    before = programs.half("reward-model")
    named = {"optim": {"lr": 1e-12}, "model": {"name": str(before.weights_of(HALF))}}
    settings = programs.settings("reward-model") | named
    adapted = settings | {"model": named["model"] | {"lora": {"rank": 2}}}
    each = {"named": settings, "warm": settings | {"ckpt": {"init_from": before.checkpoint(HALF)}}, "adapted": adapted}
    runs = [train("reward-model", tmp_path / name, one, until=1) for name, one in each.items()]
    expected, *found = (column(run_dir, "val/rewards/std")[-1] for run_dir in (before, *runs))
    assert found == pytest.approx([expected] * 3, rel=1e-4)
    assert exact_metrics(runs[1], (1,)) == exact_metrics(runs[0], (1,))


Change = Callable[[dict[str, Any], Path], dict[str, Any]]


def other_model(settings: dict[str, Any], other: Path) -> dict[str, Any]:
    return settings | {"model": settings["model"] | {"name": str(other)}}


@pytest.mark.parametrize(("name", "change", "message"), [
    ("sft, adapters", other_model, "adapters were trained on other weights"),
    ("reward-model, adapters", other_model, "adapters were trained on other weights"),
    ("sft, adapters", lambda s, _: s | {"model": {"name": s["model"]["name"]}}, "model.lora: set -> unset"),
    ("sft, adapters", lambda s, _: s | {"model": s["model"] | {"lora": {"rank": 4}}}, "model.lora.rank: 2 -> 4"),
    ("dpo", lambda s, _: s | {"data": s["data"] | {"too_long": "truncate", "seq_len": 12}}, "about other pairs"),
    ("dpo, adapters, another reference", lambda s, _: s | {"loss": {}}, "under the reference model"),
    ("dpo, adapters, another reference", lambda s, o: s | {"loss": {"reference_model": str(o)}}, "under the ref"),
])  # fmt: skip
def test_what_a_run_depends_on_must_be_what_it_began_with(
    name: str, change: Change, message: str, programs: Programs, tiny_model: ModelFactory, tmp_path: Path
) -> None:
    shutil.copytree(programs.half(name).path, tmp_path / "run")
    settings = change(programs.settings(name), tiny_model(seed=6))
    with pytest.raises(HoldfastError, match=message) as caught:
        train(name.split(",")[0], tmp_path / "run", settings, until=STEPS, resume=HALF)
    # In its own directory the run goes on from its own checkpoint, and is refused again.
    assert ("init-from" in str(caught.value)) == ("another --output-dir" in str(caught.value)), caught.value
    assert manifest.verify(RunDir(tmp_path / "run").checkpoint(HALF)).step == HALF


@pytest.mark.parametrize("name", ["sft, a row for each sample", "reward-model"])
def test_other_data_under_the_same_name_are_said(
    name: str, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EVENTS_ENV, str(tmp_path / "events"))
    shutil.copytree(programs.half(name).path, tmp_path / "run")
    settings = programs.settings(name)
    rows = Path(settings["data"]["name"]).read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join([*rows[1:], rows[0]]))
    data = settings["data"] | {"name": str(tmp_path / "rows.jsonl")}
    train(name.split(",")[0], tmp_path / "run", settings | {"data": data}, until=HALF + 1, resume=HALF)
    said = re.search(r"data are not those of step 5 \((\w{32}) -> (\w{32})\)", (tmp_path / "events").read_text())
    assert said is not None and said[1] != said[2]


@pytest.mark.parametrize("name", ["dpo", "dpo, adapters"])
def test_a_run_that_goes_further_asks_the_weights_that_it_began_with(
    name: str, programs: Programs, tiny_model: ModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = programs.settings("dpo") | (LORA if "adapters" in name else {})
    settings["model"] = settings["model"] | programs.settings("dpo")["model"]
    del settings["val_interval"]
    settings["data"] = settings["data"] | {"batch_size": 4, "micro_batch_size": 1, "validation_fraction": 0.0}
    straight = end_state(train("dpo", tmp_path / "straight", settings, until=4), last=4)
    half = train("dpo", tmp_path / "run", settings, until=2)
    other = other_model(settings, tiny_model(seed=6))
    shutil.copytree(half.path, tmp_path / "other")
    with pytest.raises(HoldfastError, match="which is needed once more"):
        train("dpo", tmp_path / "other", other, until=4, resume=2)
    begun, compute = [], reference._block_logprobs

    def noting(policy: Policy, block: Sequence[Preference], *rest: Any) -> Any:
        begun.append(block[0].number)
        return compute(policy, block, *rest)

    monkeypatch.setattr(reference, "_block_logprobs", noting)
    with monkeypatch.context() as patched, pytest.raises(Stopped, match="by SIGTERM before step 3") as stop:
        patched.setattr(reference, "STOP_REQUEST", AskedLater())
        train("dpo", half.path, settings, until=4, resume=2)
    assert len(begun) == 2 and stop.value.exit_code == 128 + signal.SIGTERM
    assert not differing(straight, end_state(train("dpo", half.path, settings, until=4, resume=2), last=4))
    assert len(set(begun)) == len(begun) > 2, "no block is computed twice"


class AskedLater(StopRequest):
    """A signal that comes when it has been looked for twice."""

    looks = 0

    def signal_number(self) -> int:
        self.looks += 1
        return signal.SIGTERM if self.looks > 2 else 0


def test_a_run_without_a_reference_cannot_take_one_up(programs: Programs, tmp_path: Path) -> None:
    settings = programs.settings("dpo")
    free = settings | {"loss": {"reference": "none"}}
    train("dpo", tmp_path / "free", free, until=1)
    with pytest.raises(CheckpointError, match=r"--loss\.reference none"):
        train("dpo", tmp_path / "free", settings, until=2, resume=1)
    train("dpo", tmp_path / "free", free, until=2, resume=1)


@pytest.mark.parametrize("of_base", [[7], [7, 9, 5]])
def test_an_adapter_is_told_which_tokens_end_its_turns_if_the_base_does_not(of_base: list[int], tmp_path: Path) -> None:
    """transformers and peft read generation_config.json of the base only."""
    for place, content in (
        ("base/generation_config.json", {"eos_token_id": of_base}),
        ("step/model/generation_config.json", {"eos_token_id": [7, 9]}),
        ("step/model/adapter/adapter_config.json", {"base_model_name_or_path": str(tmp_path / "base")}),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(json.dumps(content))
    remark = _about_end_tokens(tmp_path / "step")
    assert remark == "" if 9 in of_base else "eos_token_id = [7]: generate with [7, 9]" in remark


@pytest.mark.parametrize("name", ["sft, adapters", "reward-model, adapters"])
def test_exports_are_adapter_or_merged(name: str, programs: Programs, tiny_model: ModelFactory, tmp_path: Path) -> None:
    run_dir, base = programs.half(name), programs.settings(name)["model"]["name"]
    step, weights = run_dir.checkpoint(HALF), run_dir.weights_of(HALF)
    saved = [key for key in TensorReader(step / "trainer").saved if ".score." not in key]
    assert saved and all(".lora_" in key for key in saved), "the base is not in checkpoints"
    alone, merged = tmp_path / "alone", tmp_path / "merged"
    export(Export(step, alone))
    assert kind_of(alone) is Kind.ADAPTER and manifest.verify(alone).step == HALF
    for path in (weights / ADAPTER_DIR).iterdir():
        assert (alone / path.name).read_bytes() == path.read_bytes(), path
    export(Export(step, merged, base=base))
    assert weights_digest(merged) == weights_digest(weights)
    assert (merged / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()
    with pytest.raises(HoldfastError, match="has other weights"):
        export(Export(step, tmp_path / "refused", base=str(tiny_model(seed=1))))
    with pytest.raises(HoldfastError, match="an adapter alone is in float32"):
        export(Export(step, tmp_path / "refused", dtype="bfloat16"))
    assert not (tmp_path / "refused").exists()
    if name == "sft, adapters":
        before, after = (load_file(place / "model.safetensors") for place in (Path(base), weights))
        changed = {key for key in before if not before[key].equal(after[key])}
        assert changed == {key for key in before if key.endswith("_proj.weight")}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    known = {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    for name, value in (known | {"DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    yield server
    server.close()


def test_a_run_resumes_on_an_empty_machine_from_a_store(server: S3Server, programs: Programs, tmp_path: Path) -> None:
    settings = programs.settings("sft") | {"ckpt": {"interval": HALF, "keep": 1, "dir": URL}}
    first = train("sft", tmp_path / "first", settings, until=HALF)
    remote = RemoteCheckpoints(URL)
    assert remote.steps() == [HALF]
    second = train("sft", tmp_path / "second", settings, until=STEPS, resume="latest")
    assert second.run_id() == first.run_id()
    later = range(HALF + 1, STEPS + 1)
    expected = programs.whole("sft")
    assert exact_metrics(second, later) == expected["metrics"][HALF:]
    state = checkpoint_state(second.checkpoint(STEPS))
    assert {name: expected.get(name) for name in state} == state and STEPS in remote.steps()
    remote.download(STEPS, tmp_path / "last")
    assert contents(tmp_path / "last") == contents(second.checkpoint(STEPS))
    manifest.verify(tmp_path / "last", step=STEPS)


def test_a_store_that_fails_ends_the_run_with_its_reason(server: S3Server, programs: Programs, tmp_path: Path) -> None:
    server.spoil = lambda method, path: "403" if method == "PUT" else None
    settings = programs.settings("sft") | {"ckpt": {"interval": 2, "dir": URL}}
    with pytest.raises(SaveError, match=rf"{URL}: writing run/run.json(.|\n)*PermissionError"):
        train("sft", tmp_path / "run", settings, until=4)
    assert 2 in RunDir(tmp_path / "run").committed_steps(), "the checkpoint on this machine is whole"
    missing = settings | {"ckpt": {"interval": 2, "dir": "s3://buckett/run"}}
    with pytest.raises(StorageError, match=r"Create the bucket, or correct ckpt\.dir"):
        train("sft", tmp_path / "other", missing, until=4)
