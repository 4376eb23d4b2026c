"""Calibration texts: every kind of file read, mistakes named by line, windows of the right tokens."""

import json
import logging
import random
from pathlib import Path

import pytest
import torch

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_runtime.text.chat import render_chat
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_tools.quantize.args import QuantizeArgs
from bladellm_tools.quantize.calibration.texts import built_in, read_documents
from bladellm_tools.quantize.calibration.windows import (
    ADVISED_TOKENS,
    calibrate_with,
    draw_tokens,
    draw_windows,
    shortage,
)

CHAT = [{"role": "user", "content": "How deep is the sea?"}, {"role": "assistant", "content": "Up to 11 km."}]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.load(demo_model)


def written(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_lines_of_json_in_every_form(tmp_path) -> None:
    parts = [{"text": "one"}, {"text": "two"}]
    path = written(
        tmp_path / "a.jsonl",
        {"text": " a b "},
        "",
        {"content": parts},
        {"messages": CHAT},
        '"bare \\u00fc"',
        {"text": " "},
    )
    assert read_documents(path) == ["a b", "one\ntwo", CHAT, "bare ü"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{not json", "is not JSON"),
        ('{"text": "a"} {"text": "b"}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("12", "is 12"),
        ('{"prompt": "a"}', "has no key 'text'"),
        ('{"text": null}', "has no key 'text'"),
        ('{"text": 7}', "has no key 'text'"),
        ('{"content": [{"image": "a.png"}, {"text": "b"}]}', "holds an image"),
        ('{"content": ["b"]}', "must be an object with a text"),
        ('{"messages": ["b"]}', "every message must be an object"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, problem) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "fine"}, "", line)
    with pytest.raises(UserError) as caught:
        read_documents(path)
    assert f"{path} line 3" in str(caught.value)
    assert problem in str(caught.value)


def test_bytes_that_are_no_text(tmp_path) -> None:
    for name in ("a.jsonl", "a.txt"):
        path = tmp_path / name
        path.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
        with pytest.raises(UserError, match=r"line 2|not UTF-8"):
            read_documents(str(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.md", "a.json"])
@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_an_empty_file_is_refused(tmp_path, name, content) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match="holds no text"):
        read_documents(str(path))


def test_names_that_are_no_file(tmp_path) -> None:
    for name in (str(tmp_path / "none.jsonl"), "none", str(tmp_path), "/nowhere/a.parquet"):
        with pytest.raises(ConfigError, match="is no file"):
            read_documents(name)
    other = tmp_path / "a.csv"
    other.write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"must end in \.jsonl"):
        read_documents(str(other))


def test_pages_of_plain_text_are_documents(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\nstill one\n\f\ntwo\n")
    assert read_documents(str(path)) == ["one\n\nstill one", "two"]


@pytest.mark.parametrize(("name", "content"), [("a.txt", "one"), ("a.jsonl", '"one"')])
def test_a_mark_of_the_byte_order_is_no_text(tmp_path, name, content) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert read_documents(str(tmp_path / name)) == ["one"]


def test_a_parquet_file_without_rows_holds_no_text(tmp_path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(UserError, match="holds no text"):
        read_documents(str(path))


def test_a_broken_parquet_file_is_told_of_once(tmp_path, caplog, monkeypatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="is not a parquet file"):
        read_documents(str(path))
    assert not caplog.records


def test_parquet_through_datasets(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"text {number}" for number in range(57)]
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"text": texts, "n": list(range(57))}).to_parquet(path)
    assert read_documents(str(path)) == texts
    other = tmp_path / "b.parquet"
    datasets.Dataset.from_dict({"body": texts}).to_parquet(other)
    with pytest.raises(UserError, match=r"row 1 has no key 'text'"):
        read_documents(str(other))
    broken = tmp_path / "c.parquet"
    broken.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="is not a parquet file"):
        read_documents(str(broken))


def test_the_hub_out_of_reach_is_one_sentence(monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load(*args: object, **options: object) -> None:
        assert args[0] == "org/name"
        assert args[1] == "part"
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match="no route") as caught:
        read_documents("org/name:part")
    assert "\n" not in str(caught.value)


def test_the_hub_is_read_until_there_is_enough(monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")

    taken = []

    def rows():
        for number in range(10**6):
            taken.append(number)
            yield {"text": f"{number} " * 50_000}

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: rows())
    documents = read_documents("org/endless")
    assert 10 < len(documents) == len(taken) < 500


def test_tokens_are_those_of_the_documents_each_ended(tokenizer) -> None:
    documents = ["First text.", CHAT, "", "Second, ümläut."]
    end = tokenizer.eos_token_ids[0]
    pieces = [
        tokenizer.encode("First text."),
        render_chat(tokenizer, CHAT, add_generation_prompt=False),
        tokenizer.encode("Second, ümläut."),
    ]
    seen = set()
    for seed in range(20):
        tokens = draw_tokens(documents, tokenizer, 10**6, seed, "x")
        assert len(tokens) == sum(map(len, pieces)) + 3
        order = tuple(sorted(range(3), key=lambda number: _position(tokens, [*pieces[number], end])))
        assert tokens == [token for number in order for token in [*pieces[number], end]]
        seen.add(order)
    assert len(seen) > 1, "the seed draws the order"


def _position(tokens: list[int], piece: list[int]) -> int:
    return next(start for start in range(len(tokens)) if tokens[start : start + len(piece)] == piece)


def test_tokenizing_stops_when_there_is_enough(tokenizer) -> None:
    documents = [f"Text number {number} of many." for number in range(1000)]
    tokens = draw_tokens(documents, tokenizer, 100, 3, "x")
    assert 100 <= len(tokens) < 130


def test_windows_are_stretches_drawn_by_seed() -> None:
    count, length = random.randint(150, 400), random.randint(3, 9)
    tokens = list(range(count))
    whole = count // length
    every = draw_windows(tokens, 10**6, length, 0)
    assert every.dtype == torch.int64
    assert every.flatten().tolist() == tokens[: whole * length]
    drawn = [draw_windows(tokens, 7, length, seed) for seed in (0, 0, 1)]
    assert all(windows.shape == (7, length) for windows in drawn)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    for window in drawn[0].tolist():
        assert window[0] % length == 0
        assert window == list(range(window[0], window[0] + length))
    assert len({window[0] for window in drawn[0].tolist()}) == 7


def test_too_few_tokens_make_one_short_window_and_a_warning() -> None:
    assert draw_windows([5, 6, 7], 4, 10, 0).tolist() == [[5, 6, 7]]
    short = draw_windows([5, 6, 7], 4, 10, 0)
    assert "3 tokens" in str(shortage(short, 40, "x"))
    assert shortage(torch.zeros(4, 10), 40, "x") is None, "as many as asked for"
    assert shortage(torch.zeros(1, ADVISED_TOKENS), 10**6, "x") is None
    assert shortage(torch.zeros(1, ADVISED_TOKENS - 1), 10**6, "x") is not None


def test_texts_without_tokens(tokenizer) -> None:
    with pytest.raises(UserError, match="--calib_data holds no text"):
        calibrate_with(QuantizeArgs(calib_data=["", " \n"]), tokenizer, 8)
    with pytest.raises(UserError, match="has no tokens"):
        draw_tokens(["", ""], tokenizer, 8, 0, "x")


def test_a_chat_the_template_refuses_is_named(tokenizer, tmp_path) -> None:
    path = written(tmp_path / "a.jsonl", {"messages": [{"role": 7, "content": "x"}]})
    with pytest.raises(UserError, match=r"text 1 cannot be tokenized"):
        calibrate_with(QuantizeArgs(calib_data_file=path), tokenizer, 8)


def test_texts_of_the_command_line_and_of_a_file_come_together(tokenizer, tmp_path) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "from the file"})
    made = calibrate_with(QuantizeArgs(calib_data=["from the line"], calib_data_file=path), tokenizer, 64)
    text = tokenizer.decode(made.windows[0].tolist())
    assert "from the file" in text
    assert "from the line" in text
    assert made.source == f"--calib_data and --calib_data_file {path}"
    assert made.warning is not None


def test_the_built_in_text_is_mixed_large_and_apart_from_the_held_out_one(tokenizer) -> None:
    documents, held_out = built_in(), built_in("held_out")
    assert sum(map(len, documents)) > 800_000
    assert 50_000 < sum(map(len, held_out)) < 100_000
    text = "\n".join(str(document) for document in documents)
    for kind in ("def ", "Question: ", '"quantity":', "Assistant: ", "| --- |", "import torch"):
        assert text.count(kind) >= 3, kind
    sentences = {sentence for page in held_out for sentence in str(page).split(". ") if len(sentence) > 60}
    assert len(sentences) > 200
    assert not any(sentence in text for sentence in sentences)
    made = calibrate_with(QuantizeArgs(), tokenizer, 2048)
    assert made.windows.shape == (128, 2048)
    assert made.warning is None
    other = calibrate_with(QuantizeArgs(seed=1, max_samples=16), tokenizer, 512)
    again = calibrate_with(QuantizeArgs(seed=1, max_samples=16), tokenizer, 512)
    third = calibrate_with(QuantizeArgs(seed=2, max_samples=16), tokenizer, 512)
    assert torch.equal(other.windows, again.windows)
    assert not torch.equal(other.windows, third.windows)
