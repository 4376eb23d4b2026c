"""What only chat requests have: messages, how the templated prompt ends, template variables."""

import pytest

from tests.server.calls import HELLO, chat, refusal


def test_messages_in_every_accepted_form():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{**part, "cache_control": {}} for part in parts], "name": "Ann"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    ]
    assert chat(messages=messages).messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    ]


IMAGE = {"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ([], "messages"), ("hi", "messages"), ({}, "messages"), ([None], "messages[0]"),
        (["hi"], "messages[0]"), ([{}], "messages[0].role"), ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"), ([{"role": [], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"), ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([*HELLO, {"role": "user", "content": ["x"]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [IMAGE]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)  # fmt: skip
def test_bad_messages_name_their_place(messages, param):
    assert refusal(chat, param, messages=messages).status == 400


def test_how_the_templated_prompt_ends():
    call = chat()
    assert (call.add_generation_prompt, call.continue_final_message, call.resume_response) == (True, False, None)
    call = chat(messages=[*HELLO, {"role": "assistant", "content": "I"}], continue_final_message=True)
    assert (call.add_generation_prompt, call.continue_final_message) == (False, True)
    assert chat(resume_response="Sure, ").resume_response == "Sure, "
    assert not chat(add_generation_prompt=False).add_generation_prompt
    refusal(chat, "continue_final_message", continue_final_message=True)
    final = [*HELLO, {"role": "assistant", "content": "I"}]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refusal(chat, "continue_final_message", messages=final, **both)
    refusal(chat, "resume_response", messages=final, continue_final_message=True, resume_response="x")
    refusal(chat, "resume_response", resume_response=5)


def test_template_variables_are_scalars_and_never_internals():
    kwargs = {"enable_thinking": False, "style": "short", "budget": 5, "x": None, "y": 0.5}
    assert chat(chat_template_kwargs=kwargs).chat_template_kwargs == kwargs
    for name in (
        "tokenize",
        "messages",
        "chat_template",
        "tools",
        "bos_token",
        "_x",
        "a.b",
        "",
        "strftime_now",
        "x" * 65,
    ):
        refusal(chat, "chat_template_kwargs", chat_template_kwargs={name: 1})
    refusal(chat, "chat_template_kwargs.a", chat_template_kwargs={"a": [1]})
    refusal(chat, "chat_template_kwargs", chat_template_kwargs={"a": "x" * 1025})
    refusal(chat, "chat_template_kwargs", chat_template_kwargs={f"a{number}": 1 for number in range(33)})
    refusal(chat, "chat_template_kwargs", chat_template_kwargs=[1])
