import functools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.text.chat import render_chat
from bladellm_runtime.text.template import ChatTemplate
from bladellm_runtime.text.tokenizer import Tokenizer
from tests.support.cases import drawn_of
from tests.text.samples import DEMO, SPECIALS, any_text, demo, sentencepiece, sentencepiece_backend

TRIMMING = (
    "{% for m in messages %}<s><|user|>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
DEMO_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
fragments = st.sampled_from(
    ["<|", "<", "im_", "end", "|>", ">", "|", "<|im_end|>", "<|im_start|>", "a", " ", "\n", "s"]
)
attacks = st.lists(fragments, max_size=12).map("".join)


@functools.cache
def reference():
    return AutoTokenizer.from_pretrained(DEMO)


def user(*contents):
    return [{"role": "user", "content": content} for content in contents]


def plain_ids(tokenizer, pieces):
    """The truth for a prompt of (special id) and (plain text) pieces: no special token is parsed in a text."""
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.encode_special_tokens = True
    ids = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else backend.encode(piece, add_special_tokens=False).ids
    return ids


@given(st.lists(any_text, min_size=1, max_size=4), st.booleans())
def test_ordinary_content_has_the_ids_of_transformers(texts, prompt):
    if any(special in text for text in texts for special in DEMO_SPECIALS):
        return
    expected = reference().apply_chat_template(user(*texts), add_generation_prompt=prompt, return_dict=False)
    assert render_chat(demo(), user(*texts), add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("prepend", ["normalizer", "metaspace"])
@pytest.mark.parametrize("template", [TRIMMING, BARE])
@given(texts=st.lists(any_text, min_size=1, max_size=3), ends=st.sampled_from(["", "<", " <", "<|", "|>"]))
def test_marked_content_has_the_same_ids_as_transformers_where_nothing_is_special(prepend, template, texts, ends):
    # Contents that end like the beginning of a special token take the guarded path; they are still plain text.
    texts = [ends[::-1] + text + ends for text in texts]
    if any(special in "".join(texts) for special in [*SPECIALS, "<tool>"]):
        return
    fast = _fast(prepend)
    expected = fast.apply_chat_template(user(*texts), chat_template=template, return_dict=False)
    ids = render_chat(sentencepiece(prepend, template), user(*texts), add_generation_prompt=False)
    assert ids == expected


@functools.cache
def _fast(prepend):
    return PreTrainedTokenizerFast(tokenizer_object=sentencepiece_backend(prepend))


@given(st.lists(attacks, min_size=1, max_size=4))
def test_special_tokens_in_content_stay_text(contents):
    pieces = []
    for content in contents:
        pieces += [1, "user\n" + content, 2, "\n"]
    pieces += [1, "assistant\n"]
    assert render_chat(demo(), user(*contents)) == plain_ids(demo(), pieces)


@given(st.lists(st.sampled_from(["<|", "us", "er|>", "<", "s>", "</s", ">", "<s>", "<|user|>", " "]), max_size=8))
def test_special_tokens_cannot_be_put_together_from_several_strings(contents):
    ids = render_chat(sentencepiece(template=BARE), user("a", *contents))
    assert not set(ids) & sentencepiece().special_ids


@pytest.mark.parametrize(
    ("template", "content"),
    [("<{{ messages[0].content }}", "|user|>"), ("{{ messages[0].content }}|user|>", "x<"), ("<|us{{ '' }}er|>", "x")],
)
def test_special_tokens_cannot_be_put_together_with_the_template(template, content):
    ids = render_chat(sentencepiece(template=template), user(content))
    written_by_template_alone = "messages" not in template
    assert bool(set(ids) & sentencepiece().special_ids) == written_by_template_alone


def test_special_tokens_elsewhere_in_a_request_stay_text():
    template = (
        "<|im_start|>{% for m in messages %}{{ m.name }}{{ m.tool_calls | tojson }}{% endfor %}"
        "{{ tools | tojson }}{{ extra }}<|im_end|>"
    )
    end = "<|im_end|>"
    message = {"role": "user", "name": end, "content": "x", "tool_calls": [{end: {"args": end}}]}
    kwargs = {"tools": [{"description": "a" + end}], "extra": "<|pad|>"}
    tokenizer = Tokenizer(demo()._backend, chat_template=ChatTemplate(template))
    ids = render_chat(tokenizer, [message], resume_response=end + "b", template_kwargs=kwargs)
    text = f'{end}[{{"{end}": {{"args": "{end}"}}}}][{{"description": "a{end}"}}]<|pad|>'
    assert ids == plain_ids(tokenizer, [1, text, 2, end + "b"])


def test_special_tokens_that_take_the_space_beside_them():
    backend = sentencepiece_backend("metaspace")
    backend.add_special_tokens([AddedToken("<|turn|>", special=True, normalized=False, lstrip=True, rstrip=True)])
    backend.add_special_tokens([AddedToken("word", special=True, normalized=False, single_word=True)])
    template = "a  <|turn|> \n b{{ messages[0].content }} <|turn|> swords word c"
    tokenizer = Tokenizer(backend, chat_template=ChatTemplate(template))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    turn = backend.token_to_id("<|turn|>")
    for content in ("x", " x <", "<", "x<|"):
        ids = render_chat(tokenizer, user(content))
        assert ids == fast.apply_chat_template(user(content), chat_template=template, return_dict=False)
        assert ids.count(turn) == 2
    assert render_chat(tokenizer, user(" <|turn|> ")).count(turn) == 2


def test_special_tokens_matched_in_normalised_text():
    backend = sentencepiece_backend()
    backend.add_special_tokens([AddedToken("<|big turn|>", special=True, normalized=True)])
    tokenizer = Tokenizer(backend, chat_template=ChatTemplate("<|big turn|>{{ messages[0].content }}"))
    # The normaliser turns a space into the character used here, so both spell the token in normalised text.
    content = "x <|big▁turn|>x"
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    parsed = fast.apply_chat_template(user(content), chat_template=tokenizer.chat_template.source, return_dict=False)
    assert parsed.count(backend.token_to_id("<|big turn|>")) == 2
    assert render_chat(tokenizer, user(content)).count(backend.token_to_id("<|big turn|>")) == 1


def test_a_role_cannot_hold_a_special_token():
    for role in ("user<|im_end|>", "", None, 7, "a" * 65):
        with pytest.raises(ParameterError, match="role") as caught:
            render_chat(demo(), [{"role": role, "content": "x"}])
        assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "hi", ["hi"], [None], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": 7}],
        [{"role": "user", "content": None}], [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 7}]}], [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": "x", "\udfff": 1}],
        [{"role": "user", "content": "x", "extra": object()}],
    ],
)  # fmt: skip
def test_bad_messages_are_refused(messages):
    with pytest.raises(ParameterError) as caught:
        render_chat(demo(), messages)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def test_deep_nesting_is_refused():
    deep = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(ParameterError, match="nested"):
        render_chat(demo(), [{"role": "user", "content": "x", "extra": deep}])


def test_text_parts_are_joined_or_passed_on_as_the_template_wants():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render_chat(demo(), user(parts)) == render_chat(demo(), user("one\ntwo"))
    template = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
    tokenizer = sentencepiece(template=template)
    assert tokenizer.decode(render_chat(tokenizer, user(parts))) == "[one][two]"
    trimming = sentencepiece(template=TRIMMING)  # `trim` turns a list into its printed form
    assert render_chat(trimming, user(parts)) == render_chat(trimming, user("one\ntwo"))


def test_refusals_of_the_template_itself():
    tokenizer = sentencepiece(template="{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(ParameterError, match="Roles must alternate") as caught:
        render_chat(tokenizer, user("x"))
    assert caught.value.param == "messages"
    with pytest.raises(ParameterError, match="no chat template") as caught:
        render_chat(sentencepiece(), user("x"))
    assert caught.value.param == "messages"


@given(any_text.filter(str.strip), st.booleans())
def test_continuing_the_final_message_is_that_of_transformers(text, special):
    chat = [*user("x"), {"role": "assistant", "content": text}]
    if any(token in text for token in DEMO_SPECIALS):
        return
    expected = reference().apply_chat_template(chat, continue_final_message=True, return_dict=False)
    assert render_chat(demo(), chat, add_generation_prompt=False, continue_final_message=True) == expected
    trimmed = sentencepiece(template=TRIMMING)
    expected = _fast("normalizer").apply_chat_template(
        chat, chat_template=TRIMMING, continue_final_message=True, return_dict=False
    )
    assert render_chat(trimmed, chat, add_generation_prompt=False, continue_final_message=True) == expected


def test_what_cannot_be_continued_is_refused():
    with pytest.raises(ParameterError) as caught:
        render_chat(demo(), user(None), add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(ParameterError, match="add_generation_prompt"):
        render_chat(demo(), user("x"), continue_final_message=True)
    dropping = sentencepiece(template="{{ messages[0].role }}")
    with pytest.raises(ParameterError, match="drops"):
        render_chat(dropping, user("x"), add_generation_prompt=False, continue_final_message=True)


def test_resume_response_follows_the_rendered_prompt():
    prompt = render_chat(demo(), user("x"))
    assert render_chat(demo(), user("x"), resume_response="Sure, ") == prompt + demo().encode("Sure, ")
    assert 2 not in render_chat(demo(), user("x"), resume_response="<|im_end|>")[len(prompt) :]
    with pytest.raises(ParameterError) as caught:
        render_chat(demo(), user("x"), resume_response="\ud800")
    assert caught.value.param == "resume_response"


def test_template_kwargs_are_variables_of_the_template_only():
    tokenizer = sentencepiece(template="{% if think %}{{ messages[0].content }}{% endif %}{{ tokenize }}")
    text = tokenizer.decode(render_chat(tokenizer, user("a"), template_kwargs={"think": True, "tokenize": "b"}))
    assert text == "ab"
    for kwargs in ({"messages": []}, {"add_generation_prompt": False}, [1], {"x": "\ud800"}):
        with pytest.raises(ParameterError) as caught:
            render_chat(tokenizer, user("a"), template_kwargs=kwargs)
        assert caught.value.param == "chat_template_kwargs"


def test_the_callers_messages_are_not_changed():
    chat = [{"role": "user", "content": "<|im_end|>", "name": None}]
    render_chat(demo(), chat, add_generation_prompt=False, continue_final_message=True)
    assert chat == [{"role": "user", "content": "<|im_end|>", "name": None}]


@pytest.mark.parametrize("unit", drawn_of(["<|im_end|>", "<|im_", " ", "a", "<", "<|", ">"], 2, always=["<|im_end|>"]))
def test_a_megabyte_of_one_text_takes_linear_time(unit):
    begin = time.perf_counter()
    ids = render_chat(demo(), user(unit * (2**20 // len(unit))))
    assert ids.count(2) == 1
    assert time.perf_counter() - begin < 30
