"""PEFT folders: what is refused, with the file and the field or tensor, and patterns that name modules."""

import json

import pytest
import torch
from safetensors.torch import save_file

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.lora.peft_folder import AdapterReader, empty_adapter
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.lora_layout import LoraLayout
from bladellm_runtime.models.parallel import make_plan
from bladellm_runtime.models.stages import stage_table
from bladellm_runtime.models.weights import weight_table
from tests.lora.folders import CONFIG, PREFIX, TENSORS, edit_config, edit_tensors, save_adapter
from tests.models.harness import save_tiny

KEY = f"{PREFIX}model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return folder, save_tiny(folder, "llama")


@pytest.fixture
def reader(base):
    spec = read_model_spec(base[0])
    return AdapterReader(spec, LoraLayout(weight_table(spec), 8))


@pytest.fixture
def adapter(base, tmp_path):
    return save_adapter(tmp_path / "adapter", base[1])


def read(reader, folder, dtype=torch.float32):
    held = empty_adapter(reader._layout, dtype, pinned=False)
    held.numbers.fill_(torch.nan)
    reader.read(folder, held)
    return held


def test_a_pattern_stands_for_modules_and_is_not_evaluated(reader, adapter):
    wanted = read(reader, adapter)
    edit_config(adapter, target_modules=r"(a+)+$|.*\.(q|k|v|o|gate|up|down)_proj")
    found = read(reader, adapter)
    assert torch.equal(found.numbers, wanted.numbers)
    assert reader.check(adapter).targets == ()


def test_a_stage_reads_its_own_layers_alone(base, reader, adapter):
    spec, table = read_model_spec(base[0]), weight_table(read_model_spec(base[0]))
    layout = LoraLayout(stage_table(table, make_plan(base[0], 1, 2), 1), 8)
    held = empty_adapter(layout, torch.float32, pinned=False)
    AdapterReader(spec, layout).read(adapter, held)
    whole, all_layers = read(reader, adapter), reader._layout
    own = len({name.split(".")[1] for name in layout.places})
    assert 0 < own < spec.layers
    for name, place in layout.places.items():
        _, layer, kind = name.split(".")
        same = all_layers.places[f"layers.{int(layer) + spec.layers - own}.{kind}"]
        for mine, other in zip(layout.views(place, held.numbers), all_layers.views(same, whole.numbers), strict=True):
            assert torch.equal(mine, other)
            assert mine.abs().sum() > 0


def test_some_layers_alone_where_the_config_says_so(reader, adapter):
    first = {key: None for key in _keys(reader) if ".layers.1." in key}
    edit_tensors(adapter, **first)
    with pytest.raises(CheckpointError, match="missing"):
        reader.check(adapter)
    edit_config(adapter, layers_to_transform=[0, 2])
    reader.check(adapter)


def _keys(reader):
    return [f"{PREFIX}{module}.lora_{matrix}.weight" for module in reader._parts for matrix in "AB"]


FIELDS = {
    "peft_type": "IA3",
    "bias": "all",
    "use_dora": True,
    "fan_in_fan_out": True,
    "modules_to_save": ["lm_head"],
    "lora_bias": True,
    "r": 9,
    "lora_alpha": "many",
    "use_rslora": 3,
    "init_lora_weights": "pissa",
    "loftq_config": {"loftq_bits": 4},
    "trainable_token_indices": [1],
    "rank_pattern": {"(q)+": 2},
    "alpha_pattern": {"q_proj": -1},
}


@pytest.mark.parametrize("field", FIELDS)
def test_fields_that_cannot_be_used(reader, adapter, field):
    edit_config(adapter, **{field: FIELDS[field]})
    with pytest.raises(CheckpointError, match=field) as caught:
        read(reader, adapter)
    assert CONFIG in str(caught.value)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens", "q_proj"], ["c_attn"], [], None, [3], {"q_proj": 1}])
def test_targets_that_are_no_known_modules(reader, adapter, targets):
    edit_config(adapter, target_modules=targets)
    with pytest.raises(CheckpointError, match="target_modules"):
        read(reader, adapter)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({KEY: torch.zeros(4, 47)}, "shape"),
        ({KEY: torch.zeros(5, 48)}, "shape"),
        ({KEY: torch.zeros(4, 48, dtype=torch.int32)}, "I32"),
        ({KEY: None}, "missing"),
        ({KEY: torch.full((4, 48), torch.nan)}, "finite"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}, "lm_head"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 97)}, "not a matrix"),
        ({"base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector": torch.zeros(48)}, "not a matrix"),
        ({"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 48)}, "not a module"),
    ],
)
def test_tensors_that_cannot_be_used(reader, adapter, changes, match):
    edit_tensors(adapter, **changes)
    with pytest.raises(CheckpointError, match=match) as caught:
        read(reader, adapter)
    assert TENSORS in str(caught.value)


def test_files_that_are_not_there_or_not_whole_or_too_large(reader, adapter, tmp_path):
    file = adapter / TENSORS
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match="not a whole"):
        read(reader, adapter)
    save_file({KEY: torch.zeros(3000, 2000)}, file)
    with pytest.raises(CheckpointError, match="at most"):
        read(reader, adapter)
    file.rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="missing"):
        read(reader, adapter)
    (tmp_path / "elsewhere").write_bytes(content)
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="link out"):
        read(reader, adapter)
    (adapter / CONFIG).write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="JSON object"):
        read(reader, adapter)


def test_numbers_that_the_type_cannot_hold(reader, adapter):
    edit_tensors(adapter, **{KEY: torch.full((4, 48), 1e5)})
    read(reader, adapter)
    with pytest.raises(CheckpointError, match="--lora_dtype"):
        read(reader, adapter, torch.float16)
