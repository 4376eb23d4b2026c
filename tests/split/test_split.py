"""Split folders: every rank is a plain checkpoint of its own, and all of them are the model."""

import functools
import itertools
import json
import operator
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bladellm_runtime.distributed.layouts import find_layout
from bladellm_runtime.distributed.manifest import MANIFEST_FILE, rank_folder, read_manifest
from bladellm_runtime.errors import CheckpointError, ConfigError, UserError
from bladellm_runtime.fields import Fields
from bladellm_runtime.models.checkpoint import open_checkpoint
from bladellm_runtime.models.config import ModelSpec, read_model_spec
from bladellm_runtime.models.parallel import make_plan
from bladellm_runtime.models.ranges import read_ranges
from bladellm_runtime.models.rank_checkpoint import cut_checkpoint
from bladellm_runtime.models.registry import FAMILIES
from bladellm_runtime.models.split_folder import open_merged, open_rank
from bladellm_runtime.models.weights import weight_table
from bladellm_tools.split import splitting, writer
from bladellm_tools.split.splitting import split_model
from bladellm_tools.split.verify import verify
from tests.distributed.models import FILE, Random
from tests.distributed.test_cuts import CASES, QUICK, random_model, sampled
from tests.split.layouts import SAVED
from tests.tools.command import ROOT


@pytest.mark.parametrize(("method", "scheme", "scrambled"), sampled(CASES, QUICK))
def test_the_ranks_are_proved_to_be_the_model(tmp_path: Path, method: str | None, scheme: str, scrambled: bool) -> None:
    model = random_model(tmp_path / "model", method, scheme, scrambled)
    most = min(8, model.config["num_attention_heads"])
    for degree in {1, most, *random.sample(range(1, most + 1), 2)}:
        output, stages = tmp_path / f"split{degree}", random.choice((1, 2))
        split_model(model.folder, output, (degree, stages))
        for source in (None, model.folder):
            proof = verify(output, source)
            assert proof.tensors == len(model.tensors)
            assert proof.bytes == sum(tensor.nbytes for tensor in model.tensors.values())
            assert proof.ranks == degree * stages


@pytest.mark.parametrize("name", SAVED)
def test_layouts_that_are_not_served(tmp_path: Path, name: str) -> None:
    SAVED[name](tmp_path / "model")
    for degree, stages in ((1, 1), (2, 1), (3, 2), (4, 1), (6, 1)):
        output = tmp_path / f"split{degree}"
        split_model(tmp_path / "model", output, (degree, stages))
        verify(output, tmp_path / "model")


def test_every_family_that_is_served_has_a_layout() -> None:
    for family in FAMILIES:
        for values in ({"architectures": [family.architecture]}, {"model_type": family.model_type}):
            layout = find_layout(Fields(Path("config.json"), values))
            keys = {part.module for row in weight_table(tiny_spec()).values() for part in row if part.module}
            cut = {f"{layout.layers}.0.{rule.module}" for rule in layout.rules}
            assert cut == {key for key in keys if ".layers.0." in key}


def tiny_spec() -> ModelSpec:
    return read_model_spec(ROOT / "recipes" / "models" / "demo")


def test_bloom_ranks_hold_query_key_and_value_of_their_heads(tmp_path: Path) -> None:
    """A fused projection [heads · 3 · head_dim, hidden] is cut between heads, so that a rank's rows are q, k and v."""
    SAVED["bloom"](tmp_path / "model")
    split_model(tmp_path / "model", tmp_path / "split", (3, 1))
    key = "transformer.h.1.self_attention.query_key_value.weight"
    whole = load_file(tmp_path / "model" / FILE)[key].view(6, 3, 8, 48)
    for rank in range(3):
        share = load_file(tmp_path / "split" / rank_folder(0, rank) / FILE)[key].view(2, 3, 8, 48)
        assert torch.equal(share, whole[2 * rank : 2 * rank + 2])


def test_chatglm_ranks_hold_whole_kinds_one_after_the_other(tmp_path: Path) -> None:
    SAVED["chatglm"](tmp_path / "model")
    split_model(tmp_path / "model", tmp_path / "split", (2, 1))
    layer = "transformer.encoder.layers.0."
    whole = load_file(tmp_path / "model" / FILE)
    query, key, value = whole[f"{layer}self_attention.query_key_value.weight"].split((48, 16, 16))
    gate, up = whole[f"{layer}mlp.dense_h_to_4h.weight"].chunk(2)
    for rank in range(2):
        share = load_file(tmp_path / "split" / rank_folder(0, rank) / FILE)
        parts = [part.chunk(2)[rank] for part in (query, key, value)]
        assert torch.equal(share[f"{layer}self_attention.query_key_value.weight"], torch.cat(parts))
        inner = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(share[f"{layer}mlp.dense_h_to_4h.weight"], inner)


def test_a_rank_reads_from_its_folder_what_it_cuts_from_the_model(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", "gptq", "w4 g16", True)
    degrees = (min(3, model.config["num_attention_heads"]), 2)
    split_model(model.folder, tmp_path / "split", degrees)
    for stage, rank in itertools.product(range(2), range(degrees[0])):
        with open_checkpoint(model.folder) as whole, open_rank(tmp_path / "split", stage, rank) as own:
            cut = cut_checkpoint(whole, model.fields, degrees, stage, rank)
            assert cut.files.keys() == own.files.keys()
            assert cut.model == own.model
            assert all(torch.equal(cut.read(key), own.read(key)) for key in cut.files)
            assert {path.parent.name for path in own.files.values()} == {rank_folder(stage, rank)}


def starts_of_wide_tensors(path: Path) -> list[int]:
    """Where the data of tensors of 4 bytes a number begins in a file."""
    return [part.start for part in read_ranges(path).values() if part.dtype.itemsize == 4]


def test_rank_folders_are_plain_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a bounded size with an index, config and tokenizer beside them; tensors are aligned."""
    model = Random(tmp_path / "model", heads=6, kv_heads=2, method="compressed-tensors", scheme="fp8 static")
    (model.folder / "tokenizer.json").write_text("{}")
    (model.folder / "modeling.py").write_text("")
    monkeypatch.setattr(writer, "FILE_BYTES", 10_000)
    split_model(model.folder, tmp_path / "split", (2, 1))
    for folder in (tmp_path / "split", tmp_path / "split" / rank_folder(0, 1)):
        assert (folder / "tokenizer.json").read_text() == "{}"
        assert json.loads((folder / "config.json").read_text()) == model.config
        assert not (folder / "modeling.py").exists()
    files = sorted((tmp_path / "split" / rank_folder(0, 1)).glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        assert path.stat().st_size < 25_000
        assert load_file(path)
        assert all(start % 4 == 0 for start in starts_of_wide_tensors(path))
    with open_checkpoint(tmp_path / "split" / rank_folder(0, 1)) as checkpoint:
        assert checkpoint.index is not None
    verify(tmp_path / "split", model.folder)


def test_only_one_tensor_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are written as they are cut: between two tensors that are read every share of the first one is."""
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    events = []
    take, put = splitting.take_share, writer.ShareWriter.put
    monkeypatch.setattr(splitting, "take_share", lambda *parts: (events.append("take"), take(*parts))[1])
    monkeypatch.setattr(writer.ShareWriter, "put", lambda *parts: (events.append("put"), put(*parts))[1])
    split_model(model.folder, tmp_path / "split", (3, 1))
    assert events == ["take", "put"] * (len(events) // 2)


def change(folder: Path, key: str) -> None:
    """Flip the lowest bit of a tensor's last value."""
    tensors = load_file(folder / FILE)
    data = tensors[key].view(-1).view(torch.uint8)
    data[-1] ^= 1
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def test_the_first_tensor_that_differs_is_named(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2, biases=False)
    split_model(model.folder, tmp_path / "split", (3, 1))
    key = f"model.layers.1.{random.choice(tuple(model.sizes))}.weight"
    change(tmp_path / "split" / rank_folder(0, 2), key)
    for source in (None, model.folder):
        with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
            verify(tmp_path / "split", source)


def test_what_two_ranks_hold_must_be_the_same(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2, biases=False)
    split_model(model.folder, tmp_path / "split", (4, 1))
    change(tmp_path / "split" / rank_folder(0, 3), "model.norm.weight")
    with pytest.raises(CheckpointError, match=r"rank-00-03/.*model\.norm\.weight is not the share"):
        verify(tmp_path / "split", None)


def test_another_model_is_not_the_one_that_was_split(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    other = Random(tmp_path / "other", heads=6, kv_heads=2)
    split_model(model.folder, tmp_path / "split", (2, 1))
    with pytest.raises(CheckpointError, match="differs from"):
        verify(tmp_path / "split", other.folder)


def test_damage_is_one_sentence(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    split_model(model.folder, tmp_path / "split", (2, 1))
    path = tmp_path / "split" / rank_folder(0, 1) / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        verify(tmp_path / "split", None)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"), open_rank(tmp_path / "split", 0, 1):
        pass
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00-01 holds neither"):
        verify(tmp_path / "split", None)
    path.write_bytes(whole)
    (tmp_path / "split" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not as blade_llm_split wrote it"):
        verify(tmp_path / "split", None)


def test_a_manifest_that_is_not_one_is_one_sentence(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    split_model(model.folder, tmp_path / "split", (2, 1))
    path = tmp_path / "split" / MANIFEST_FILE
    values = json.loads(path.read_text())
    key = "model.norm.weight"
    broken = [
        values | {"version": 2},
        values | {"tensor_parallel_size": 3},
        values | {"layout": "../llama"},
        values | {"ranks": []},
        values | {"shape": {}},
        values | {"tensors": values["tensors"] | {key: values["tensors"][key] | {"dim": 4}}},
        {"version": 1},
        [],
    ]
    for one in broken:
        path.write_text(json.dumps(one))
        with pytest.raises(CheckpointError, match=rf"{MANIFEST_FILE}.*again$"):
            read_manifest(tmp_path / "split")


def changed(values: dict, path: tuple[str | int, ...], new: object) -> dict:
    """A copy of JSON values with one of them changed, or taken away where `new` is None."""
    copy = json.loads(json.dumps(values))
    home = functools.reduce(operator.getitem, path[:-1], copy)
    home[path[-1]] = new
    if new is None:
        del home[path[-1]]
    return copy


def test_a_manifest_of_something_else_is_told_by_the_proof_and_by_loading(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    split_model(model.folder, tmp_path / "split", (2, 1))
    path = tmp_path / "split" / MANIFEST_FILE
    values = json.loads(path.read_text())
    weight = ("tensors", "model.layers.0.mlp.down_proj.weight")
    for place, new in (
        (("layout",), "opt"),
        (("shape", "intermediate_size"), 0),
        (("shape", "layers"), 10**12),
        (("shape", "mlp_unit"), 0),
        (weight, None),
        ((*weight, "shape", 0), 2**63),
        ((*weight, "dtype"), "F16"),
        ((*weight, "dtype"), "?"),
        ((*weight, "shares", 1, "ranges", 0, 1), 1),
    ):
        path.write_text(json.dumps(changed(values, place, new)))
        with pytest.raises(CheckpointError, match=r"again$"):
            verify(tmp_path / "split", None)
        with pytest.raises(CheckpointError, match=r"again$"), open_rank(tmp_path / "split", 0, 1):
            pass
        if place[0] in ("layout", "shape"):
            with pytest.raises(CheckpointError, match=r"again$"):
                make_plan(tmp_path / "split", 2)


def test_only_the_files_of_a_rank_are_proved(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    split_model(model.folder, tmp_path / "split", (2, 1))
    path = tmp_path / "split" / MANIFEST_FILE
    values = json.loads(path.read_text())
    files = values["ranks"][1]["files"]
    for others in ({}, {"../../model/model.safetensors": files[FILE]}, files | {"more.safetensors": files[FILE]}):
        path.write_text(json.dumps(changed(values, ("ranks", 1, "files"), others)))
        with pytest.raises(CheckpointError, match=r"names other files than there are in .*rank-00-01"):
            verify(tmp_path / "split", None)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_copies_that_differ_are_named(tmp_path: Path, name: str) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    (model.folder / "tokenizer.json").write_text("{}")
    split_model(model.folder, tmp_path / "split", (2, 1))
    (tmp_path / "split" / "notes.txt").write_text("not of the model")
    verify(tmp_path / "split", None)
    path = tmp_path / "split" / rank_folder(0, 1) / name
    path.write_text("[]")
    with pytest.raises(CheckpointError, match=rf"rank-00-01/{name} and .* differ"):
        verify(tmp_path / "split", None)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"rank-00-01/{name} is missing"):
        verify(tmp_path / "split", None)


def test_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    with pytest.raises(ConfigError, match=r"6 query heads; use --tensor_parallel_size 6 or less"):
        split_model(model.folder, tmp_path / "split", (7, 1))
    with pytest.raises(ConfigError, match="--pipeline_parallel_size 3"):
        split_model(model.folder, tmp_path / "split", (1, 3))
    with pytest.raises(ConfigError, match="in the model's own folder"):
        split_model(model.folder, model.folder / "split", (2, 1))
    assert not (tmp_path / "split").exists()
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "file").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        split_model(model.folder, tmp_path / "split", (2, 1))
    (tmp_path / "split" / "file").unlink()
    split_model(model.folder, tmp_path / "split", (2, 1))
    with pytest.raises(ConfigError, match="split already"):
        split_model(tmp_path / "split", tmp_path / "again", (2, 1))
    with pytest.raises(ConfigError, match=MANIFEST_FILE):
        verify(model.folder, None)
    with pytest.raises(CheckpointError, match="--tensor_parallel_size 2"), open_rank(tmp_path / "split", 0, 2):
        pass


@pytest.mark.parametrize("target", ["empty", "nowhere"])
def test_the_output_may_be_a_link(tmp_path: Path, target: str) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(target)
    split_model(model.folder, tmp_path / "link", (2, 1))
    assert verify(tmp_path / "link", model.folder).ranks == 2
    assert verify(tmp_path / target, None).ranks == 2


def test_paths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    (tmp_path / "circle").symlink_to("circle")
    for name in ("circle", 250 * "x"):
        with pytest.raises(ConfigError, match=r"cannot be used .*; give another one"):
            split_model(model.folder, tmp_path / name, (2, 1))


def test_a_mount_point_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename onto it would fail, at the end."""
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    with pytest.raises(ConfigError, match="is a mount point, which cannot be replaced; give a folder in it"):
        split_model(model.folder, tmp_path / "disk", (2, 1))
    split_model(model.folder, tmp_path / "disk" / "split", (2, 1))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(writer.ShareWriter, "_write", full)
    with pytest.raises(UserError, match=r"cannot be written: No space left.*--output_dir$"):
        split_model(model.folder, tmp_path / "split", (2, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    monkeypatch.setattr(splitting.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="GiB free"):
        split_model(model.folder, tmp_path / "split", (2, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tensors_that_are_missing_or_strange_are_named(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    key = "model.layers.1.input_layernorm.weight"
    norm = model.tensors.pop(key)
    save_file(model.tensors, model.folder / FILE)
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight is missing"):
        split_model(model.folder, tmp_path / "split", (2, 1))
    strange = {"model.layers.1.mlp.router.weight": torch.randn(4, 48)}
    save_file(model.tensors | {key: norm} | strange, model.folder / FILE)
    with pytest.raises(CheckpointError, match=r"mlp\.router\.weight is not part of"):
        split_model(model.folder, tmp_path / "split", (2, 1))


def test_the_merged_model_is_a_checkpoint(tmp_path: Path) -> None:
    model = Random(tmp_path / "model", heads=6, kv_heads=2)
    split_model(model.folder, tmp_path / "split", (4, 2))
    with open_merged(tmp_path / "split") as merged:
        assert merged.files.keys() == model.tensors.keys()
        assert all(torch.equal(merged.read(key), tensor) for key, tensor in model.tensors.items())
        assert len(merged.paths) == 8
