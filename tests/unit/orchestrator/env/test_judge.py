"""What a judge is asked, how its reply is read, and the scorer `judge` of questions from a file."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import Judge, JudgeConfig, Task, TaskSeed, judging
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, DataError
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.judge import JudgeFailure
from holdfast.orchestrator.env.registry import load_environment
from holdfast.protocol.inference import ChatReply
from tests.servers.judge import FakeJudge, judge_serving

URL = "http://127.0.0.1:9/v1"


def judge_of(**settings: Any) -> Judge:
    return Judge(JudgeConfig(**{"url": URL, "model": "m", "prompt": "Rate {completion}", **settings}))


def score_of(text: str, finish_reason: str = "stop", **settings: Any) -> float | None:
    judgement = judge_of(unreadable_reward=-1.0, **settings).read(ChatReply(text, finish_reason))
    assert judgement.text == text and judgement.is_readable == (judgement.score != -1.0)
    return judgement.score if judgement.is_readable else None


@pytest.mark.parametrize(("text", "score"), [
    ("8", 0.8), ("It is so so.\n\nScore: 7.5.", 0.75), ("**10**", 1.0), ("0", 0.0), (" .5 \n", 0.05),
    # Nobody can say which number is meant, or it is none that the judge may give.
    ("8/10", None), ("Score (0 to 10): 8", None), ("11", None), ("-3", None), ("eight", None), ("", None),
    ("8\nThat was it.", None), ("1e1", None), ("v8", None),
])  # fmt: skip
def test_the_only_number_of_the_last_line_counts(text: str, score: float | None) -> None:
    assert score_of(text, max_score=10.0) == score
    assert score_of(text, "length", max_score=10.0) is None, "a reply that is cut off may lack its last digit"


def test_a_pattern_says_where_the_score_is() -> None:
    scored = {"pattern": r"Score: (\S+)", "max_score": 10.0}
    assert score_of("Score: 3\nno, Score: 8 of 10", **scored) == 0.8
    assert score_of("no score", **scored) is None and score_of("Score: high", **scored) is None
    assert score_of("Score: nan", **scored) is None and score_of("Score: inf", **scored) is None
    assert score_of("[8] or [9]", pattern=r"\d+", max_score=10.0) == 0.9 and score_of("ab", pattern="a(x)?b") is None


def test_words_may_be_verdicts() -> None:
    verdicts = {"yes": 1.0, "No": -0.5, "not sure": 0.25}
    assert score_of("I think so.\n**YES**.", verdicts=verdicts) == 1.0
    assert score_of("no", verdicts=verdicts) == -0.5 and score_of("Not sure", verdicts=verdicts) == 0.25
    for text in ("yes or no", "yesterday", "", "1"):
        assert score_of(text, verdicts=verdicts) is None
    assert score_of("verdict=no!", verdicts=verdicts, pattern="verdict=([a-z]+)") == -0.5


def test_a_reply_without_a_score_is_a_failure_that_says_what_was_expected() -> None:
    said = r"judge 'm' gave a reply in which there is not a number from 0 to 10: huh\."
    with pytest.raises(JudgeFailure, match=said):
        judge_of(max_score=10.0).read(ChatReply("huh", "stop"))
    with pytest.raises(JudgeFailure, match=r"a reply longer than max_tokens = 256 .* not one of yes, no: y") as caught:
        judge_of(verdicts={"yes": 1.0, "no": 0.0}).read(ChatReply("y", "length"))
    assert caught.value.reason == "judge_unreadable"


def test_a_request_is_what_was_asked_and_nothing_of_it_is_replaced_twice() -> None:
    judge = judge_of(prompt='{question} is "{completion}", {"score"}', system="Be {fair}.", extra_body={"a": 1})
    assert judge.fields == ["completion", "question"]
    request = judge.request({"question": "2+2", "completion": "{question} \ud800"})
    body = json.loads(request.body)
    assert body["messages"] == [
        {"role": "system", "content": "Be {fair}."},
        {"role": "user", "content": '2+2 is "{question} \\ud800", {"score"}'},
    ]
    assert (body["temperature"], body["max_tokens"], body["model"], body["a"]) == (0, 256, "m", 1)
    assert request.url == f"{URL}/chat/completions"
    # What decides the reply is the key, and nothing else.
    patient = judge_of(timeout_s=1.0, max_concurrency=2).request({"completion": "a"})
    assert patient.key == judge_of().request({"completion": "a"}).key
    others = [judge_of(model="n"), judge_of(max_tokens=1), judge_of(url=f"{URL}2"), judge_of(extra_body={"seed": 1})]
    assert len({one.request({"completion": "a"}).key for one in [judge_of(), *others]}) == 5


@pytest.mark.parametrize(("settings", "said"), [
    ({"pattern": "("}, "is not a regular expression"),
    ({"extra_body": {"temperature": 1}}, "must not set temperature"),
    ({"verdicts": {}}, "verdicts must be different words"),
    ({"verdicts": {"yes": 1.0, "YES ": 0.0}}, "verdicts must be different words"),
    ({"verdicts": {"yes": 1.0}, "max_score": 2.0}, "max_score is about numbers"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        judge_of(**settings)


def test_a_missing_key_and_an_unknown_field_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"the environment variable JUDGE_KEY \(api_key_env\) is not set"):
        judge_of(api_key_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "k")
    config = JudgeConfig(url=URL, model="m", prompt="{complet}", api_key_env="JUDGE_KEY")
    said = r"has \{complet\}, which is not a field. Did you mean 'completion'\? Fields: com"
    with pytest.raises(ConfigError, match=said):
        Judge(config, fields=["completion"])


def test_nobody_asks_where_no_desk_is() -> None:
    with pytest.raises(RuntimeError, match=r"async with holdfast.judging\(\)"):
        asyncio.run(judge_of().ask({"completion": "x"}))


def load(path: Path, rows: list[dict[str, Any]], settings: dict[str, Any], **args: Any) -> Environment:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = {"url": URL, "model": "m", **settings}
    args = {"path": str(path), "scorer": "judge", "shuffle": False, "judge": judge} | args
    return load_environment(EnvironmentConfig(id="jsonl", args=args), key="environments[0]")


def test_a_judge_scores_questions_from_a_file(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "short"}, {"role": "user", "content": "1+1"}]
    rows = [{"q": "2+2", "a": 4, "rubric": "x"}, {"q": chat, "a": "2", "rubric": 0.5}]
    asked: list[str] = []
    with judge_serving(FakeJudge()) as fake:

        async def scores() -> list[Any]:
            prompt = "{prompt}|{answer}|{rubric}|{completion}"
            judge = {"url": fake.url, "prompt": prompt, "max_score": 100.0, "unreadable_reward": 0.5}
            environment = load(tmp_path / "q.jsonl", rows, judge, prompt="q", answer="a")
            found = []
            async with judging():
                for index in (0, 1, 0):
                    sessions: Any = [SimpleNamespace(completion=text) for text in ("a", "b")]
                    found.append(await environment.score(environment.make_task(TaskSeed(0, "env", index)), sessions))
            return found

        first, second, again = asyncio.run(scores())
        asked = fake.questions
    assert sorted(asked[:2]) == ["2+2|4|x|a", "2+2|4|x|b"]
    assert sorted(asked[2:]) == ["system: short\nuser: 1+1|2|0.5|a", "system: short\nuser: 1+1|2|0.5|b"]
    assert first == again, "what was asked before is not asked again"
    assert sorted(score.reward for score in first) == [0.01, 0.02] and len(second) == 2
    assert set(first[0].metrics) == {"judge", "judge_unreadable"} and first[0].metrics["judge_unreadable"] == 0.0


def test_a_judge_that_is_told_no_answer_needs_none(tmp_path: Path) -> None:
    environment = load(tmp_path / "q.jsonl", [{"prompt": "Tell a joke."}], {"prompt": "Funny?\n{completion}"})
    task = environment.make_task(TaskSeed(0, "env", 0))
    assert isinstance(task, Task) and task.answer == ""


@pytest.mark.parametrize(("judge", "args", "error", "said"), [
    ({"prompt": "{completion}", "modle": "x"}, {}, ConfigError, r"args.judge: modle: Extra inputs are not"),
    ({"prompt": "{completion}", "url": "http://u:secret@h"}, {}, ConfigError, r"args.judge: url: .* user name"),
    ({"prompt": "Good?"}, {}, ConfigError, r"judge.prompt has no \{completion\}"),
    ({"prompt": "{completion} {answer}"}, {}, DataError, r"has no column 'answer'.*with the argument `answer`"),
    ({"prompt": "{completion} {b}"}, {}, DataError, r"has no column 'b'.*with `judge.prompt`, which has \{b\}"),
    ({"prompt": "{completion} {flag}"}, {}, DataError, r"'flag' is True, expected text or a number"),
    ({"prompt": "{completion}"}, {"scorer": "exact"}, ConfigError, r"belongs to scorer 'judge'; got .*'exact'"),
    ({"prompt": "{completion}"}, {"judge": None}, ConfigError, r"got scorer 'judge' and no judge"),
])  # fmt: skip
def test_a_judge_that_cannot_be_asked_is_refused(
    tmp_path: Path, judge: dict[str, Any], args: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        load(tmp_path / "q.jsonl", [{"prompt": "Why?", "flag": True}], judge, **args)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret", "“sk-secret”"])
def test_a_key_no_header_can_hold_is_refused_untold(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(ConfigError, match=r"variable SOME_KEY holds spaces.*SOME_KEY=\$\(cat FILE\)") as caught:
        load(tmp_path / "q.jsonl", [{"prompt": "Why?"}], {"prompt": "{completion}", "api_key_env": "SOME_KEY"})
    assert "secret" not in str(caught.value)
