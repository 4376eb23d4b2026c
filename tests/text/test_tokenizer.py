import functools
import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors
from transformers import AutoTokenizer

from bladellm_runtime.errors import CheckpointError, ConfigError, ParameterError
from bladellm_runtime.text.tokenizer import Tokenizer
from tests.text.samples import DEMO, any_text, demo, sentencepiece


@pytest.fixture
def folder(tmp_path):
    for path in DEMO.glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


@functools.cache
def reference():
    return AutoTokenizer.from_pretrained(DEMO)


def test_a_front_end_and_its_guide_import_neither_torch_nor_transformers():
    code = (
        "import sys; from pathlib import Path; from bladellm_runtime.text.tokenizer import Tokenizer\n"
        "from bladellm_runtime.guided.backends import BACKENDS, load_vocabulary\n"
        "from bladellm_runtime.server import app, lifecycle\n"
        "from bladellm_runtime.text import chat, detokenizer, pool, stop, stream\n"
        f"folder = Path({str(DEMO)!r})\n"
        "t = Tokenizer.load(folder)\n"
        "assert chat.render_chat(t, [{'role': 'user', 'content': '<|im_end|>'}]) and t.decode(t.encode('hi')) == 'hi'\n"
        "BACKENDS['llguidance'](load_vocabulary(folder, 8192, [2]))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'they take seconds'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_facts_of_the_demo_tokenizer():
    assert demo().vocab_size == len(reference()) == 8192
    assert demo().eos_token_ids == [2, 0]
    assert demo().has_chat_template
    assert demo().special_ids == {0, 1, 2, 3}


@given(any_text, st.booleans())
def test_encode_and_decode_are_those_of_transformers(text, special):
    text += "<|im_end|>" if special else ""
    ids = demo().encode(text)
    assert ids == reference().encode(text)
    assert demo().decode(ids, skip_special_tokens=special) == reference().decode(ids, skip_special_tokens=special)


@given(any_text)
def test_token_bytes_join_to_the_exact_text(text):
    assert b"".join(map(demo().token_bytes, demo().encode(text))).decode() == text
    ids = sentencepiece().encode(text)
    joined = b"".join(map(sentencepiece().token_bytes, ids)).decode()
    assert joined == (" " + text if text else "")  # every sentencepiece-style text begins with a space


def test_half_characters_are_exact_bytes_and_display_as_replacement():
    ids = demo().encode("\U0001f9ff")
    assert len(ids) > 1
    assert b"".join(map(demo().token_bytes, ids)) == "\U0001f9ff".encode()
    assert demo().token_text(ids[0]) == "�"
    assert sentencepiece().token_bytes(3 + 0xF0) == b"\xf0"


def test_ids_outside_the_vocabulary_have_no_text():
    for token_id in (-1, 8192, 2**31, 2**40):
        assert demo().token_bytes(token_id) == b""
        assert demo().decode([68, token_id, 68]) == demo().decode([68, 68])


def test_nul_is_text_and_lone_surrogates_are_refused():
    assert demo().decode(demo().encode("a\0b")) == "a\0b"
    with pytest.raises(ParameterError, match="character 1") as caught:
        demo().encode("a\ud800b", param="suffix")
    assert caught.value.param == "suffix"
    with pytest.raises(ParameterError, match="must be a string"):
        demo().encode(7)


def test_what_the_tokenizer_file_adds_around_a_text_is_added_once(folder):
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("hi") == [0, *demo().encode("hi")] == AutoTokenizer.from_pretrained(folder).encode("hi")
    assert tokenizer.encode("hi", add_special_tokens=False) == demo().encode("hi")


def test_truncation_and_padding_of_the_file_do_not_apply(folder):
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).encode("one two three four five six") == demo().encode("one two three four five six")
    assert len(Tokenizer.load(folder).encode("a")) == 1


@pytest.mark.parametrize(
    ("value", "ids"), [(5, [5]), ([7, 5, 7], [7, 5]), (None, [2]), ("x", None), ([-1], None), ([True], None)]
)
def test_eos_ids(folder, value, ids):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    if ids is None:
        with pytest.raises(CheckpointError, match="eos_token_id"):
            Tokenizer.load(folder)
    else:
        assert Tokenizer.load(folder).eos_token_ids == ids


def test_broken_folders_are_one_sentence(folder):
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="slow tokenizers are not supported"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Strip("x", 0, 1), decoders.CTC(), None])
def test_other_decoders_are_refused_by_name(decoder):
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match="decoder"):
        Tokenizer(backend)


def test_folder_code_is_not_run(folder):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]},
        "tokenizer_class": "EvilTokenizer",
    }
    path.write_text(json.dumps(config))
    (folder / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()")
    assert Tokenizer.load(folder).encode("hi") == demo().encode("hi")
    assert not (folder / "ran").exists()


def test_chat_template_files(folder, tmp_path):
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ messages[0].content }}!")
    assert Tokenizer.load(folder, mine).chat_template.source.endswith("!")
    mine.write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"--chat_template .*line 1"):
        Tokenizer.load(folder, mine)
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(folder, tmp_path / "none")
    mine.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="--chat_template"):
        Tokenizer.load(folder, mine)
    mine.write_bytes(b"a" * (2**20 + 1))
    with pytest.raises(ConfigError, match="--chat_template"):
        Tokenizer.load(folder, mine)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template": "{% if %}"}))
    with pytest.raises(CheckpointError, match="chat template of"):
        Tokenizer.load(folder)
    path.write_text(json.dumps(config | {"chat_template": 5}))
    with pytest.raises(CheckpointError, match="chat_template must be text"):
        Tokenizer.load(folder)
    del config["chat_template"]
    path.write_text(json.dumps(config))
    assert not Tokenizer.load(folder).has_chat_template
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    assert Tokenizer.load(folder).chat_template.source.endswith("?")
