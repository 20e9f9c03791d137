"""Chats as token ids: rendering, tokenising and masking, the same for `sft`, `dpo`, `reward-model` and `rl`.

    messages.py    what a message may hold
    template.py    a chat template, with all that transformers promises to every template
    forms.py       the form in which a template reads messages
    written.py     what a template writes of messages
    tokenizer.py   loads a tokenizer; text, prompts and continuations as token ids
    masking.py     whole chats and texts as token ids, with a mask of the trained tokens

The package uses `tokenizers` and `jinja2` directly. transformers would load torch, which costs seconds of start-up and
hundreds of megabytes in a process that never touches a tensor.
"""
