"""Folders read without transformers, against transformers: the whole tokenizer as JSON, its ids, texts and names."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.text.detokenizer import Detokenizer
from bladellm_runtime.text.folder_tokenizer import FolderTokenizer, read_folder, read_plain, read_with_transformers
from bladellm_runtime.text.token_settings import HARMLESS, WITHOUT_EFFECT, UnprovenError
from bladellm_runtime.text.tokenizer import Tokenizer
from tests.text.folders import BROKEN, CONFIG, KNOWN, MAP, TEXTS, UNKNOWN, backends, token, write_folder
from tests.text.samples import DEMO

BESIDE = Path(__file__).parents[3] / "shared"


def check_same(plain: FolderTokenizer, reference: FolderTokenizer) -> None:
    for read in (plain, reference):  # the server does so, before anything else
        read.backend.no_truncation()
        read.backend.no_padding()
    assert json.loads(plain.backend.to_str()) == json.loads(reference.backend.to_str())
    assert plain.backend.encode_special_tokens == reference.backend.encode_special_tokens
    assert plain.backend.get_vocab_size() == reference.backend.get_vocab_size()
    assert plain.named_tokens == reference.named_tokens
    assert plain.eos_token_id == reference.eos_token_id
    assert plain.chat_template == reference.chat_template


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, at_start=True)
    return [detokenizer.feed([token_id]) for token_id in ids]


@pytest.mark.parametrize("kind", backends())
def test_known_settings_need_no_transformers(tmp_path, kind):
    for case, files in KNOWN.items():
        folder = write_folder(tmp_path / case, backends()[kind], files)
        check_same(read_plain(folder), read_with_transformers(folder))


@pytest.mark.parametrize("kind", backends())
@pytest.mark.parametrize("case", ["typed", "listed again", "llama 2", "qwen 2", "older", "template"])
def test_ids_and_texts_are_those_of_transformers(tmp_path, case, kind):
    folder = write_folder(tmp_path, backends()[kind], KNOWN[case])
    tokenizer, reference = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.vocab_size == len(reference)
    for text in TEXTS:
        for around in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=around)
            assert ids == reference.encode(text, add_special_tokens=around)
            for skip in (True, False):
                expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids, skip) == expected
                assert streamed(tokenizer, ids, skip) == streamed(Tokenizer(reference.backend_tokenizer), ids, skip)


@pytest.mark.parametrize("case", UNKNOWN)
def test_other_settings_are_left_to_transformers(tmp_path, case):
    folder = write_folder(tmp_path, backends()["prepended"], UNKNOWN[case])
    with pytest.raises(UnprovenError):
        read_plain(folder)
    check_same(read_folder(folder), read_with_transformers(folder))


@pytest.mark.parametrize("case", BROKEN)
def test_broken_settings_are_one_sentence(tmp_path, case):
    folder = write_folder(tmp_path, backends()["byte-level"], BROKEN[case])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json or tokenizer_config\.json cannot be read") as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["x", 7, True, None, ["x"], {"a": "x"}])
def test_settings_without_effect_have_none(tmp_path, value):
    config = dict.fromkeys(WITHOUT_EFFECT, value) | {key: values[0] for key, values in HARMLESS.items()}
    folder = write_folder(tmp_path, backends()["metaspace"], {CONFIG: config | {"eos_token": "<new>"}})
    check_same(read_plain(folder), read_with_transformers(folder))
    (folder / CONFIG).write_text('{"eos_token": "<new>"}')
    check_same(read_plain(folder), read_with_transformers(folder))


def test_added_tokens_that_tokenizer_json_lists_twice_are_left_to_transformers(tmp_path):
    folder = write_folder(tmp_path, backends()["byte-level"], {})
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": 900, "lstrip": True})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UnprovenError, match="twice"):
        read_plain(folder)
    check_same(read_folder(folder), read_with_transformers(folder))


words = st.sampled_from(["<s>", "</s>", "<|end|>", "<new>", "</new>", "<img>", "<|user|>", "<tool>", "the", "wide"])
flags = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(["lstrip", "rstrip", "single_word", "normalized", "special"], st.booleans())
)
typed = st.builds(lambda text, fields: token(text, **fields), words, flags)
untyped = st.builds(lambda text, fields: token(text, typed=False, **fields), words, flags)
names = ["bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "image_token", "bot_token"]
lists = st.lists(words | typed, max_size=3)
own_names = st.dictionaries(st.sampled_from(["a", "b", "eos_token", "image_token"]), words | typed, max_size=2)
ids = st.integers(0, 5) | st.integers(255, 275) | st.integers(300, 9000)
configs = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(names, words | typed | st.none()),
        "additional_special_tokens": lists | st.none(),
        "extra_special_tokens": lists | own_names | st.none(),
        "added_tokens_decoder": st.dictionaries(ids.map(str), untyped, max_size=3),
        "add_bos_token": st.booleans(),
    },
)
maps = st.fixed_dictionaries(
    {}, optional={**dict.fromkeys(names, words | untyped | st.none()), "additional_special_tokens": lists}
)
files_beside = st.fixed_dictionaries(
    {CONFIG: configs}, optional={MAP: maps, "added_tokens.json": st.dictionaries(words, ids, max_size=3)}
)


@given(st.sampled_from(list(backends())), files_beside)
def test_random_settings_are_read_alike_or_left_to_transformers(kind, files):
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), backends()[kind], files)
        try:
            plain = read_plain(folder)
        except UnprovenError:
            return
        check_same(plain, read_with_transformers(folder))


@pytest.mark.parametrize(
    "folder", [DEMO, BESIDE / "testbed" / "target", BESIDE / "tokenizers" / "qwen2"], ids=lambda folder: folder.name
)
def test_published_tokenizers(folder):
    if not folder.is_dir():
        pytest.skip("not beside the checkout")
    check_same(read_plain(folder), read_with_transformers(folder))


READ_AT_ONCE = """
import sys, threading
from pathlib import Path
from bladellm_runtime.text.folder_tokenizer import read_with_transformers

together, failed = threading.Barrier(4), []

def read():
    together.wait()
    try:
        read_with_transformers(Path(sys.argv[1]))
    except Exception as error:
        failed.append(error)

threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
"""


def test_threads_may_read_folders_at_once():
    """A server's front end and its engine in one process do; transformers was not imported before."""
    done = subprocess.run([sys.executable, "-c", READ_AT_ONCE, str(DEMO)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
