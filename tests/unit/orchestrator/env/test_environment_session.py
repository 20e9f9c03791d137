"""Sessions and the chat template: nothing is tokenised twice, nothing is lost, limits hold."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.errors import ConfigError, DataError
from holdfast.orchestrator.env.guard import step_rewards
from holdfast.orchestrator.env.interface import Message, Score, Session, SessionFull
from holdfast.protocol.rollouts import Rewards, StepRewards, TokenIds, VersionSpan
from tests.builders.scripted_sessions import Asked, scripted_session

BASE = "examples/reverse_text/base"
USER, ASSISTANT, END = 1, 2, 3

# The shape of many templates: a role line, a blank after the end token, trimmed content.
_LINES_TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""


def make_lines_tokenizer(directory: Path, *, template: str = _LINES_TEMPLATE) -> str:
    """Write a byte-level tokenizer whose turns end with a token other than its end-of-text token."""
    backend = Backend(
        models.BPE(vocab={char: n for n, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return str(directory)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(BASE)


def limited(
    tokenizer: Tokenizer, prompt_ids: list[int], turns: list[list[int]], *, seq_len: int = 64, max_tokens: int = 16
) -> tuple[Session, Asked]:
    """Return a session that samples `turns`, and the list of what it asks for."""
    asked: Asked = []
    session = scripted_session(tokenizer, prompt_ids, turns, asked=asked, seq_len=seq_len, max_tokens=max_tokens)
    return session, asked


def test_a_session_grows_by_new_tokens_only(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.prompt([Message("user", "ab")])
    session, asked = limited(tokenizer, prompt, [[6, 5, END], [7, END]])
    assert asyncio.run(session.sample()) == "ba"
    session.append_messages([Message("user", "c")])
    assert asyncio.run(session.sample()) == "c"
    middle = [USER, 7, END, ASSISTANT]
    assert session.token_ids.tolist() == [*prompt, 6, 5, END, *middle, 7, END]
    assert session.loss_mask.tolist() == [False] * 5 + [True] * 3 + [False] * 4 + [True] * 2
    assert session.logprobs.tolist() == [0.0] * 5 + [-1.0] * 3 + [0.0] * 4 + [-2.0] * 2
    assert session.versions == [VersionSpan(0, 5, 8), VersionSpan(1, 12, 14)]
    assert asked == [(prompt, 0, 16), (session.token_ids[:12].tolist(), 1, 16)]
    assert (session.texts, session.completion, session.truncated) == (["ba", "c"], "c", False)
    assert session.turn_ends == (8, 14)
    rewards = step_rewards(Score(1.0, turn_rewards=[0.5, -1.0]), session)
    assert rewards == StepRewards(TokenIds([7, 13]), Rewards([0.5, -1.0]))
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
    tokenizer = load_tokenizer(make_lines_tokenizer(tmp_path))
    end = tokenizer.encode("<|im_end|>")[0]
    assert sorted(tokenizer.stop_token_ids) == sorted([end, *tokenizer.encode("<|endoftext|>")])
    chat = [Message("user", " hi "), Message("assistant", "yo"), Message("user", "more")]
    session, _ = limited(tokenizer, tokenizer.prompt(chat[:1]), [[*tokenizer.encode("yo"), end]])
    asyncio.run(session.sample())
    session.append_messages(chat[2:])
    assert session.token_ids.tolist() == tokenizer.prompt(chat)


def test_templates_that_cannot_be_used_say_so(tmp_path: Path) -> None:
    refusing = (
        "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}{{ messages[-1].content }}"
    )
    tokenizer = load_tokenizer(make_lines_tokenizer(tmp_path, template=refusing))
    with pytest.raises(DataError, match=r"refuses a chat of \[user, assistant, user\]: one question only"):
        tokenizer.continuation([Message("user", "again")], last_token_id=0)
    with pytest.raises(DataError, match="is not valid"):
        load_tokenizer(make_lines_tokenizer(tmp_path, template="{% for %}"))
    without = load_tokenizer(make_lines_tokenizer(tmp_path, template=""))
    with pytest.raises(ConfigError, match="has no chat template"):
        without.prompt([Message("user", "hi")])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


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
