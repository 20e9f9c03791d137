"""Sessions and the chat template: nothing is tokenised twice, limits hold, and a branch is what the template writes."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, DataError
from holdfast.orchestrator.env import interface
from holdfast.orchestrator.env.guard import step_rewards
from holdfast.orchestrator.env.interface import Environment, Message, Score, Session, SessionFull, Task, TaskSeed
from holdfast.orchestrator.env.tool_loop import tool_use_of
from holdfast.protocol.rollouts import Rewards, StepRewards, TokenIds
from tests.builders.scripted_sessions import Asked, scripted_session
from tests.models.chat_templates import TEMPLATES, write_tokenizer
from tests.unit.orchestrator.env.test_environment_tools import Adds, called, tokenizer_of

THOUGHT = "<think>\nHm.\n</think>\n\n"
AGAIN = {"role": "user", "content": "Really?"}


class Asks(Environment):
    def __init__(self, times: int = 2, *, text: bool = False) -> None:
        self.times = times
        self.text = text

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt="1 + 2?" if self.text else [Message("user", "What is 1 + 2?")])

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        for _ in range(self.times):
            session.append_messages([AGAIN])
            await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [Score(1.0) for _ in sessions]


class Played:
    """A session whose policy says `turns`, and what it was asked."""

    def __init__(
        self, template: str, turns: list[str], environment: Environment, *, cuts: tuple[int, ...] = (), **settings: Any
    ) -> None:
        self.tokenizer = tokenizer_of(template)
        asked: Asked = []
        end = self.tokenizer.encode("<|im_end|>")
        self.sampled = [[*self.tokenizer.encode_after(turn), *end] for turn in turns]
        for turn in cuts:
            self.sampled[turn] = self.sampled[turn][: -len(end)]
        config = EnvironmentConfig(id="reverse_text", **settings)
        self.tool_use = tool_use_of(environment, config, self.tokenizer)
        task = environment.make_task(TaskSeed(0, "asks", 0))
        assert isinstance(task, Task)
        self.messages = [] if isinstance(task.prompt, str) else [{"role": "user", "content": "What is 1 + 2?"}]
        prompt = self.tokenizer.text_prompt(task.prompt) if isinstance(task.prompt, str) else self.rendered()
        self.session = scripted_session(
            self.tokenizer, prompt, self.sampled, asked=asked, seq_len=config.seq_len or 20_000, task=task,
            tool_use=self.tool_use, keeps_history=config.history == "keep", max_branches=config.max_branches,
        )  # fmt: skip
        asyncio.run(environment.run(self.session, task))
        self.asked = [token_ids for token_ids, _, _ in asked]

    def rendered(self, *more: dict[str, str]) -> list[int]:
        """What the template makes of the chat with `more` messages behind its prompt."""
        schemas = self.tool_use.schemas if self.tool_use else None
        return self.tokenizer.prompt([*self.messages, *more], tools=schemas)


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_each_branch_is_what_the_template_writes_token_for_token() -> None:
    """Qwen 3's template leaves out the thoughts of turns before the last question."""
    turns = [f"{THOUGHT}No.", "Yes.", f"{THOUGHT}Yes."]
    played = Played("qwen3", turns, Asks())
    prompts = [
        played.rendered(),
        played.rendered(said(turns[0]), AGAIN),
        played.rendered(said(turns[0]), AGAIN, said(turns[1]), AGAIN),
    ]
    assert played.asked == prompts, "the policy never sees anything else"
    session, sampled = played.session, played.sampled
    # The second answer has no thoughts, so the third turn goes on behind it.
    first, second = [*prompts[0], *sampled[0]], [*prompts[2], *sampled[2]]
    assert prompts[2][: len(prompts[1]) + len(sampled[1])] == [*prompts[1], *sampled[1]]
    assert session.token_ids.tolist() == first + second and session.branch_starts == (0, len(first))
    seen = played.tokenizer.decode(prompts[1], skip_special_tokens=False)
    assert "Hm." not in seen and "No." in seen, "the template leaves out the thoughts alone"
    # Every sampled token once, with what the engine said of it.
    places = [place for place, used in enumerate(session.loss_mask) if used]
    assert [session.token_ids[place] for place in places] == [token for turn in sampled for token in turn]
    assert [session.logprobs[place] for place in places] == [-1.0 - n for n, turn in enumerate(sampled) for _ in turn]
    spans = [span for span in session.versions for _ in range(span.start, span.end)]
    assert [span.version for span in spans] == [n for n, turn in enumerate(sampled) for _ in turn]
    assert [place for span in session.versions for place in range(span.start, span.end)] == places
    assert session.texts == turns
    rewards = step_rewards(Score(1.0, turn_rewards=[1.0, 2.0, 3.0]), session)
    ends = [end - 1 for end in session.turn_ends]
    assert rewards == StepRewards(TokenIds(ends), Rewards([1.0, 2.0, 3.0])) and all(session.loss_mask[e] for e in ends)


class SamplesOn(Asks):
    """Lets a turn that was cut go on."""

    async def run(self, session: Session, task: Task) -> None:
        stops = tokenizer_of("qwen3").stop_token_ids
        while not session.texts or session.token_ids[-1] not in stops:
            await session.sample()
        session.append_messages([AGAIN])
        await session.sample()


def test_a_turn_that_was_cut_and_goes_on_is_one_turn_of_the_chat() -> None:
    played = Played("qwen3", [f"{THOUGHT}N", "o.", "Yes."], SamplesOn(), cuts=(0,))
    assert played.asked[1] == [*played.asked[0], *played.sampled[0]], "the same branch, in the middle of a turn"
    assert played.asked[2] == played.rendered(said(f"{THOUGHT}No."), AGAIN)
    assert played.session.branch_starts == (0, len(played.asked[1]) + len(played.sampled[1]))


def test_what_a_template_keeps_stays_one_branch() -> None:
    assert Played("qwen3", ["No.", "Yes.", "Yes."], Asks()).session.branch_starts == (0,), "nothing to leave out"
    for kept in (
        Played("hermes", [f"{THOUGHT}No.", "Yes.", "Yes."], Asks()),
        Played("qwen3", [f"{THOUGHT}No.", "Yes.", "Yes."], Asks(), history="keep"),
    ):
        assert kept.session.branch_starts == (0,)
        assert all(asked == kept.session.token_ids[: len(asked)].tolist() for asked in kept.asked)


def test_within_a_loop_of_tools_thoughts_stay_and_a_turn_that_the_template_cannot_write_splits() -> None:
    call = called("hermes", "add", {"a": 1})
    assert Played("qwen3", [f"{THOUGHT}{call}", "3"], Adds()).session.branch_starts == (0,)
    # Two ends of thoughts: the template leaves out what is between them.
    played = Played("qwen3", [f"<think>\na\n</think>\n\nb</think>c{call}", "3"], Adds())
    assert len(played.session.branch_starts) == 2 and +played.session.tool_counts == {"calls": 1}
    seen = played.tokenizer.decode(played.asked[1], skip_special_tokens=False)
    assert "b</think>" not in seen and "<tool_response>" in seen


def test_the_room_is_that_of_a_branch_and_branches_are_counted() -> None:
    turns = [f"<think>\n{'Hm. ' * 40}\n</think>\n\nNo."] * 3
    whole = Played("qwen3", turns, Asks())
    lengths = [len(asked) + len(sampled) for asked, sampled in zip(whole.asked, whole.sampled, strict=True)]
    played = Played("qwen3", turns, Asks(), seq_len=max(lengths))
    assert played.session.token_ids == whole.session.token_ids, "each fits by itself, all together do not"
    assert played.session.room == 0 and not played.session.truncated
    with pytest.raises(SessionFull, match="its 2 branches .max_branches."):
        Played("qwen3", turns, Asks(), max_branches=2)
    long = [f"{THOUGHT}{'No. ' * 30}"] * 2
    short = len(Played("qwen3", long[:1], Asks(0)).session.token_ids)
    with pytest.raises(SessionFull, match="the chat so far has .* leave no room for a sampled token in the .* of a br"):
        Played("qwen3", long, Asks(), seq_len=short)


def test_a_session_that_began_with_text_is_refused_where_it_would_have_to_split() -> None:
    turns = [f"{THOUGHT}No.", "Yes."]
    with pytest.raises(interface.HistoryRewritten, match=r"Give the prompt as messages, or set `history = \"keep\"`"):
        Played("qwen3", turns, Asks(1, text=True))
    assert Played("qwen3", turns, Asks(1, text=True), history="keep").session.branch_starts == (0,)
    assert Played("qwen3", ["No.", "Yes."], Asks(1, text=True)).session.branch_starts == (0,)

    class Texts(Asks):
        async def run(self, session: Session, task: Task) -> None:
            await session.sample()
            session.append_text("So: ")
            await session.sample()
            session.append_messages([AGAIN])

    played = Played("qwen3", turns, Texts())  # no chat: there is nothing that the template would write of it
    assert played.session.branch_starts == (0,)


BASE = "examples/reverse_text/base"
USER, ASSISTANT, END = 1, 2, 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(BASE)


def limited(
    tokenizer: Tokenizer, prompt_ids: list[int], turns: list[list[int]], *, seq_len: int = 64, max_tokens: int = 16
) -> tuple[Session, Asked]:
    """Return a session that samples `turns`, and the list of what it asks for."""
    asked: Asked = []
    return scripted_session(tokenizer, prompt_ids, turns, asked=asked, seq_len=seq_len, max_tokens=max_tokens), asked


def test_what_is_sampled_comes_back_as_text_and_each_of_its_tokens_can_be_rewarded(tokenizer: Tokenizer) -> None:
    session, asked = limited(tokenizer, tokenizer.prompt([Message("user", "ab")]), [[6, 5, END], [7, END]])
    assert asyncio.run(session.sample()) == "ba"
    session.append_messages([Message("user", "c")])
    assert asyncio.run(session.sample()) == session.completion == "c" and not session.truncated
    assert session.logprobs.tolist() == [0.0] * 5 + [-1.0] * 3 + [0.0] * 4 + [-2.0] * 2
    assert [room for _, _, room in asked] == [16, 16]
    rewards = step_rewards(Score(1.0, token_rewards=[1, 2, 3, 4, 5]), session)
    assert rewards == StepRewards(TokenIds([5, 6, 7, 12, 13]), Rewards([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert step_rewards(Score(1.0), session) is None


def test_a_turn_cut_by_the_limit_is_closed_before_the_next(tokenizer: Tokenizer) -> None:
    session, _ = limited(tokenizer, [USER, 5, END, ASSISTANT], [[5, 6, 7], [END]], max_tokens=2)
    asyncio.run(session.sample())
    assert session.truncated
    session.append_messages([Message("user", "c")])
    assert session.token_ids[4:].tolist() == [5, 6, END, USER, 7, END, ASSISTANT]
    assert session.loss_mask[4:].tolist() == [True, True, False, False, False, False, False]


def test_seq_len_is_never_exceeded(tokenizer: Tokenizer) -> None:
    session, asked = limited(tokenizer, [USER, 5, END, ASSISTANT], [[5, 6, 7]], seq_len=6)
    asyncio.run(session.sample())
    assert asked[0][2] == 2 and len(session.token_ids) == 6 and session.truncated
    before = list(session.token_ids)
    with pytest.raises(SessionFull):
        asyncio.run(session.sample())
    with pytest.raises(SessionFull):
        session.append_text("d")
    assert session.token_ids.tolist() == before


def test_a_template_with_text_after_the_end_token(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, TEMPLATES["chatml"]) / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(path))
    config = tmp_path / "tokenizer_config.json"
    as_a_table = '"eos_token": {"__type": "AddedToken", "content": "</s>"}'
    config.write_text(config.read_text().replace('"eos_token": "</s>"', as_a_table))
    tokenizer = load_tokenizer(str(tmp_path))
    end = tokenizer.encode("<|im_end|>")[0]
    assert sorted(tokenizer.stop_token_ids) == sorted([end, *tokenizer.encode("</s>")])
    chat = [Message("user", " hi "), Message("assistant", "yo"), Message("user", "more")]
    session, _ = limited(tokenizer, tokenizer.prompt(chat[:1]), [[*tokenizer.encode("yo"), end]])
    asyncio.run(session.sample())
    session.append_messages(chat[2:])
    assert session.token_ids.tolist() == tokenizer.prompt(chat)


def test_templates_that_cannot_be_used_say_so(tmp_path: Path) -> None:
    refusing = "{% if messages[2:] %}{{ raise_exception('one question only') }}{% endif %}{{ messages[-1].content }}"
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, refusing)))
    with pytest.raises(DataError, match=r"refuses a chat of \[user, assistant, user\]: one question only"):
        tokenizer.continuation([Message("user", "again")], last_token_id=0)
    with pytest.raises(DataError, match="is not valid"):
        load_tokenizer(str(write_tokenizer(tmp_path, "{% for %}")))
    without = load_tokenizer(str(write_tokenizer(tmp_path, "")))
    with pytest.raises(ConfigError, match="has no chat template"):
        without.prompt([Message("user", "hi")])


def test_an_ended_session_grows_no_more(tokenizer: Tokenizer) -> None:
    session, _ = limited(tokenizer, [5, 6], [[7, 3], [8, 3]])
    asyncio.run(session.sample())
    session.end()
    with pytest.raises(RuntimeError, match=r"sample\(\) after score\(\) has returned"):
        asyncio.run(session.sample())
    with pytest.raises(RuntimeError, match=r"append_text\(\) after score\(\)"):
        session.append_text("a")
    assert session.token_ids.tolist() == [5, 6, 7, 3]


def test_messages_close_no_turn_in_which_nothing_was_said(tokenizer: Tokenizer) -> None:
    session, _ = limited(tokenizer, tokenizer.prompt([Message("user", "ab")]), [[END], [END]])
    with pytest.raises(RuntimeError, match="close an empty turn"):
        session.append_messages([Message("user", "c")])
    asyncio.run(session.sample())
    session.append_messages([Message("user", "c")])
    with pytest.raises(RuntimeError, match="append all messages in one call"):
        session.append_messages([Message("user", "d")])
    session.append_text("a")
    session.append_messages([Message("user", "d")])
