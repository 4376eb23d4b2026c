"""Rows 51 and 52 of the fault table: model folders that cannot be served are refused by file, key and field."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.config import read_generation_defaults, read_model_spec
from bladellm_runtime.models.hub import resolve_model
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.text.tokenizer import Tokenizer
from tests.faults.folders import refusal
from tests.models.harness import Sequences, load_tiny, save_tiny

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tmp_path):
    """A whole tiny model in one file."""
    save_tiny(tmp_path, "llama")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """A whole tiny model in several shards."""
    save_tiny(tmp_path, "llama", max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def edit_tensors(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file, **changes):
    values = json.loads(file.read_text())
    values.update(changes)
    file.write_text(json.dumps(values))


def edit_index(folder, **changes):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update(changes)
    (folder / INDEX).write_text(json.dumps(index))


def shard_of(folder, key):
    return json.loads((folder / INDEX).read_text())["weight_map"][key]


def assert_works(folder):
    assert torch.isfinite(Sequences(load_tiny(folder)).step([(0, [1, 2, 3])])[0]).all()


def test_row_51_whole_folders_load(single):
    assert_works(single)


def test_row_51_sharded_folders_load(sharded):
    assert_works(sharded)


def test_row_51_missing_weights(single):
    (single / "model.safetensors").unlink()
    refusal(single, single, "model.safetensors", INDEX)


def test_row_51_only_pickled_weights(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    refusal(single, single, "safetensors")


def test_row_51_missing_shard(sharded):
    shard = shard_of(sharded, Q_PROJ)
    (sharded / shard).unlink()
    refusal(sharded, shard, "missing")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_row_51_truncated_file(single, keep):
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refusal(single, file)


def test_row_51_truncated_shard(sharded):
    shard = sharded / shard_of(sharded, Q_PROJ)
    shard.write_bytes(shard.read_bytes()[:-7])
    refusal(sharded, shard)


def test_row_51_header_that_claims_too_much(single):
    file = single / "model.safetensors"
    file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])
    refusal(single, file)


def test_row_51_missing_key(single):
    file = single / "model.safetensors"
    edit_tensors(file, lambda tensors: tensors.pop(Q_PROJ))
    refusal(single, file, Q_PROJ, "missing")


def test_row_51_missing_head_of_an_untied_model(single):
    edit_tensors(single / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    refusal(single, "lm_head.weight")


def test_row_51_extra_key(single):
    file = single / "model.safetensors"
    edit_tensors(file, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    refusal(single, file, "model.layers.0.self_attn.q_proj.bias")


def test_row_51_many_extra_keys_are_counted(single):
    edit_json(single / "config.json", num_hidden_layers=1)
    assert re.search(r"and 1[0-9] more", refusal(single, "model.layers.1."))


def test_row_51_extras_known_to_be_harmless_load(tmp_path):
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_tensors(tmp_path / "model.safetensors", add)
    assert_works(tmp_path)


def test_row_51_misshaped_tensor(single):
    file = single / "model.safetensors"
    edit_tensors(file, lambda tensors: tensors.update({Q_PROJ: torch.zeros(48, 47)}))
    refusal(single, file, Q_PROJ, "[48, 47]", "[48, 48]", "hidden_size")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.float64, torch.bool])
def test_row_51_wrong_dtype(single, dtype):
    file = single / "model.safetensors"
    edit_tensors(file, lambda tensors: tensors.update({Q_PROJ: torch.zeros(48, 48).to(dtype)}))
    refusal(single, file, Q_PROJ, "type")


@pytest.mark.parametrize(
    "outside",
    [
        "../{name}",
        "/etc/passwd.safetensors",
        "a/../../{name}",
        "..",
        "sub/{name}",
        "a\\b.safetensors",
        "",
        "x" * 5000 + ".safetensors",
    ],
)
def test_row_51_index_naming_a_path_outside_the_folder(sharded, outside):
    name = shard_of(sharded, Q_PROJ)
    (sharded.parent / name).write_bytes((sharded / name).read_bytes())
    edit_index(sharded, **{Q_PROJ: outside.format(name=name)})
    refusal(sharded, Q_PROJ)


@pytest.mark.parametrize("value", [None, 7, ["x"], "model.bin"])
def test_row_51_index_entry_that_is_no_safetensors_file(sharded, value):
    edit_index(sharded, **{Q_PROJ: value})
    refusal(sharded, INDEX, Q_PROJ)


def test_row_51_index_that_is_wrong_about_a_shard(sharded):
    other = next(path.name for path in sharded.glob("model-*") if path.name != shard_of(sharded, Q_PROJ))
    edit_index(sharded, **{Q_PROJ: other})
    refusal(sharded, Q_PROJ, INDEX)


def test_row_51_index_key_no_shard_holds(sharded):
    edit_index(sharded, **{"model.layers.9.made_up": shard_of(sharded, Q_PROJ)})
    refusal(sharded, "model.layers.9.made_up", shard_of(sharded, Q_PROJ))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_row_51_index_that_is_no_index(sharded, text):
    (sharded / INDEX).write_text(text)
    refusal(sharded, INDEX)


def test_row_51_link_out_of_the_folder(single, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "model.safetensors"
    (single / "model.safetensors").rename(outside)
    (single / "model.safetensors").symlink_to(outside)
    refusal(single, single / "model.safetensors", "link")


def test_row_51_links_of_a_hub_cache_load(sharded, tmp_path_factory):
    """The cache keeps snapshots/REVISION/name -> ../../blobs/HASH."""
    cache = tmp_path_factory.mktemp("models--org--name")
    snapshot, blobs = cache / "snapshots" / "0123abcd", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sharded.iterdir()):
        (blobs / f"{number:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    assert_works(snapshot)


def test_row_51_a_refused_folder_leaves_no_open_file(sharded):
    edit_index(sharded, **{"model.layers.9.made_up": shard_of(sharded, Q_PROJ)})
    refusal(sharded)
    assert str(sharded) not in Path("/proc/self/maps").read_text()
    assert not any(str(sharded) in str(link.resolve()) for link in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(
    "name", ["no-such-folder/at/all", "/no/such/folder", "", "a b", "../../nowhere", "x" * 5000, "\0"]
)
def test_row_51_model_that_is_nowhere(name):
    with pytest.raises(CheckpointError, match="--model"):
        resolve_model(name)


def test_row_51_model_that_is_a_file(single):
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model(str(single / "config.json"))
    assert resolve_model(str(single)) == single


def test_row_51_hub_id_while_offline(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="--model some-org/some-model is not a folder here") as caught:
        resolve_model("some-org/some-model")
    assert "\n" not in str(caught.value)


def test_row_51_modelscope_without_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "modelscope", None)
    with pytest.raises(CheckpointError, match=r"bladellm-open\[modelscope\]"):
        resolve_model("modelscope:org/name")
    with pytest.raises(CheckpointError, match="org/name"):
        resolve_model("modelscope:../etc")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BAD_FIELDS = [
    ("num_attention_heads", 0),
    ("num_attention_heads", -6),
    ("num_attention_heads", 6.0),
    ("num_attention_heads", "6"),
    ("num_attention_heads", True),
    ("num_attention_heads", 10**30),
    ("num_key_value_heads", 0),
    ("num_key_value_heads", 4),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 10**6),
    ("hidden_size", 0),
    ("hidden_size", None),
    ("intermediate_size", 2**40),
    ("vocab_size", -1),
    ("max_position_embeddings", 0),
    ("max_position_embeddings", 2**60),
    ("head_dim", 0),
    ("head_dim", 7),
    ("head_dim", 10**9),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", math.inf),
    ("rms_norm_eps", math.nan),
    ("architectures", ["GPT2LMHeadModel"]),
    ("architectures", []),
    ("architectures", "LlamaForCausalLM2"),
    ("architectures", ["LlamaForCausalLM", "Evil"]),
    ("hidden_act", "gelu"),
    ("hidden_act", 3),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("tie_word_embeddings", "yes"),
    ("attention_bias", 1),
    ("dtype", "int8"),
    ("sliding_window", 128),
    ("layer_types", ["sliding_attention"] * 3),
    ("layer_types", ["full_attention"]),
    ("layer_types", ["chunked_attention"] * 3),
    ("eos_token_id", 97),
    ("eos_token_id", [1, -1]),
    ("eos_token_id", "two"),
    ("partial_rotary_factor", 0.5),
    ("rope_parameters", [1]),
    ("rope_parameters", {"rope_type": "longrope", "factor": 2.0}),
    ("rope_parameters", {"rope_type": "linear"}),
    ("rope_parameters", {"rope_type": "linear", "factor": 0.0}),
    ("rope_parameters", {"rope_type": "linear", "factor": 0.5}),
    ("rope_parameters", {"rope_type": "linear", "factor": 1e9}),
    ("rope_parameters", {"rope_type": "dynamic", "factor": math.nan}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
    ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.25}),
    ("rope_parameters", {**LLAMA3, "high_freq_factor": 1.0}),
    ("rope_parameters", {**LLAMA3, "low_freq_factor": 0}),
    ("rope_parameters", {**YARN, "original_max_position_embeddings": 0}),
    ("rope_parameters", {**YARN, "attention_factor": -1.0}),
    ("rope_parameters", {**YARN, "truncate": "no"}),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("rope_scaling", {"type": "su", "factor": 2.0}),
    ("rope_scaling", "linear"),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda item: str(item)[:60])
def test_row_52_config_field(single, field, value):
    edit_json(single / "config.json", **{field: value})
    refusal(single, single / "config.json", field)


def test_row_52_head_dim_that_does_not_follow(single):
    values = json.loads((single / "config.json").read_text())
    del values["head_dim"]
    (single / "config.json").write_text(json.dumps({**values, "num_attention_heads": 5, "num_key_value_heads": 5}))
    refusal(single, "num_attention_heads", "hidden_size")


def test_row_52_head_dim_that_the_tensors_contradict(single):
    edit_json(single / "config.json", head_dim=16)
    refusal(single, "model.safetensors", "q_proj.weight", "head_dim")


def test_row_52_vocabulary_that_the_tensors_contradict(single):
    edit_json(single / "config.json", vocab_size=96)
    refusal(single, "model.safetensors", "model.embed_tokens.weight", "vocab_size")


def test_row_52_vocabulary_smaller_than_the_tokenizer(demo_model):
    tokenizer = Tokenizer.load(demo_model)
    tokenizer.check_vocabulary(tokenizer.vocab_size)
    with pytest.raises(CheckpointError, match="vocab_size 8191"):
        tokenizer.check_vocabulary(tokenizer.vocab_size - 1)


def test_row_52_window_in_use_without_a_size_is_full_attention(tmp_path):
    save_tiny(tmp_path, "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=0)
    edit_json(tmp_path / "config.json", use_sliding_window=False)
    refusal(tmp_path, "layer_types", "sliding_window")


def test_row_52_mistral_does_not_mix_attention(tmp_path):
    save_tiny(tmp_path, "mistral", sliding_window=9)
    edit_json(tmp_path / "config.json", layer_types=["full_attention", "sliding_attention", "full_attention"])
    refusal(tmp_path, "layer_types")


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{", "\ud800", "[" * 100_000, '{"vocab_size": 1' + "0" * 5000 + "}"]
)
def test_row_52_config_that_is_no_object(single, text):
    (single / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refusal(single, single / "config.json")


def test_row_52_missing_config(single):
    (single / "config.json").unlink()
    refusal(single, single / "config.json")


def test_row_52_model_larger_than_the_memory(single):
    sizes = {"hidden_size": 2**17, "intermediate_size": 2**20, "num_hidden_layers": 1024, "head_dim": 128}
    edit_json(single / "config.json", **sizes)
    spec = read_model_spec(single)
    with pytest.raises(CheckpointError, match=r"GiB are free on cpu"):
        load_model(single, spec, device=torch.device("cpu"), dtype=torch.float32, load_format="dummy", seed=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("temperature", math.inf), ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", "x")],
)
def test_row_52_generation_config_field(single, field, value):
    (single / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {field} "):
        read_generation_defaults(single)
