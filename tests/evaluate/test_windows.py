"""Reading texts and cutting windows."""

import json
import random

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_tools.evaluate.windows import EvaluationText, cut, read_text, tokenize
from tests.evaluate.texts import random_text


@given(st.integers(0, 200), st.integers(2, 30), st.none() | st.integers(1, 9))
def test_windows_are_plain_slices(tokens, window, most) -> None:
    ids = torch.randint(0, 99, (tokens,))
    expected = []
    for first in range(0, tokens, window):
        piece = ids[first : first + window].tolist()
        if len(piece) == window and len(expected) < (most or tokens):
            expected.append(piece)
    found = cut(ids, window, most)
    assert found.shape == (len(expected), window)
    assert found.tolist() == expected


def test_documents_are_joined_by_two_newlines_and_tokenized_once(tmp_path, demo_model) -> None:
    datasets = pytest.importorskip("datasets")

    documents = [random_text(random.randint(3, 30)) + end for end in (".", "\n", " ü€")]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps({"id": 3, "text": text}) for text in documents) + "\n")
    datasets.Dataset.from_dict({"text": documents, "id": [1, 2, 3]}).to_parquet(tmp_path / "b.parquet")
    joined = "\n\n".join(documents)
    (tmp_path / "c.txt").write_bytes(joined.encode())
    texts = [read_text(str(tmp_path / name)) for name in ("a.jsonl", "b.parquet", "c.txt")]
    assert [text.text for text in texts] == [joined] * 3

    ids = transformers.AutoTokenizer.from_pretrained(demo_model)(joined)["input_ids"]
    found = tokenize(texts[0], Tokenizer.load(demo_model), 7, None)
    assert found.tokens == len(ids)
    assert found.windows.flatten().tolist() == ids[: len(ids) // 7 * 7]


def test_a_text_file_keeps_its_line_ends(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    assert read_text(str(tmp_path / "a.txt")).text == "one\r\ntwo\n"


@pytest.mark.parametrize(("name", "content"), [("a.txt", "one"), ("a.jsonl", '{"text": "one"}')])
def test_a_mark_of_the_byte_order_is_no_text(tmp_path, name, content) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert read_text(str(tmp_path / name)).text == "one"


def test_a_text_below_one_window_is_refused_with_the_window_that_works(demo_model) -> None:
    tokenizer = Tokenizer.load(demo_model)
    text = EvaluationText("x.txt", random_text(20))
    tokens = len(tokenizer.encode(text.text))
    with pytest.raises(UserError, match=rf"x.txt has {tokens} tokens, below one window of 500; .*--window {tokens}"):
        tokenize(text, tokenizer, 500, None)
    assert len(tokenize(text, tokenizer, tokens, None).windows) == 1
    with pytest.raises(UserError, match=r"has 1 tokens, .*; give a longer text$"):
        tokenize(EvaluationText("x.txt", "a"), tokenizer, 500, None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": tw', r"a.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"txt": "one"}\n', r"a.jsonl line 1 must be an object whose field 'text'"),
        ("a.jsonl", b'\n["text"]\n', r"a.jsonl line 2 must be an object"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1 must be"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a.jsonl"),
        ("a.jsonl", b"\n\n", r"a.jsonl holds no text"),
        ("a.txt", b" \n\n ", r"a.txt holds no text"),
        ("a.txt", b"one \xff two", r"a.txt is not UTF-8"),
        ("a.parquet", b"PAR1 not really", r"a.parquet is not a readable parquet file"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, name, content, message) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_text(str(tmp_path / name))


def test_a_parquet_file_without_texts_is_named(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")

    datasets.Dataset.from_dict({"body": ["a"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has no column 'text'; it has body"):
        read_text(str(tmp_path / "a.parquet"))
    datasets.Dataset.from_dict({"text": ["a", None]}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b.parquet row 2: 'text' must be a string"):
        read_text(str(tmp_path / "b.parquet"))


def test_a_parquet_file_without_rows_holds_no_text(tmp_path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(UserError, match=r"a.parquet holds no text"):
        read_text(str(path))


@pytest.mark.parametrize("name", ["gone.txt", "gone.jsonl", "gone.parquet"])
def test_a_missing_file_is_named(tmp_path, name) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("datasets")
    with pytest.raises(UserError, match=f"{name} cannot be read: No such file"):
        read_text(str(tmp_path / name))


def test_other_kinds_of_file_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"must end in .txt, .jsonl, .parquet"):
        read_text(str(tmp_path / "a.pdf"))


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("some words")
    monkeypatch.setattr("bladellm_tools.evaluate.windows.MAX_FILE_BYTES", 9)
    with pytest.raises(UserError, match=r"a.txt is larger than 9 bytes"):
        read_text(str(tmp_path / "a.txt"))
    monkeypatch.setattr("bladellm_tools.evaluate.windows.MAX_FILE_BYTES", 10)
    assert read_text(str(tmp_path / "a.txt")).text == "some words"
