"""Decoders with adapters give the logits of merged weights, alone and mixed with others and the base in one batch."""

from dataclasses import replace

import pytest
import torch
import transformers
from bladellm_kernels.lora_shrink import lora_shrink
from bladellm_kernels.lora_tokens import token_adapters

from bladellm_runtime.layers.batch import WantedTokens
from bladellm_runtime.layers.linear import Linear
from bladellm_runtime.layers.lora import (
    ColParaLinearWithLoRA,
    ColParaLinearWithSliceLoRA,
    LoraState,
    QKVProjectionWithLoRA,
    RowParaLinearWithLoRA,
)
from bladellm_runtime.layers.stacked_lora import LoraWeights, StackedLora
from bladellm_runtime.lora.peft_folder import AdapterReader, empty_adapter
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.models.lora import lora_bytes
from bladellm_runtime.models.lora_layout import LoraShape
from bladellm_runtime.models.lora_stacking import stacked_rows
from bladellm_runtime.models.parallel import TensorParallel, make_plan
from bladellm_runtime.models.weights import weight_table
from bladellm_tools.split.splitting import split_model
from tests.distributed.threads import run_ranks
from tests.lora.folders import merged, save_adapter
from tests.models.harness import DEVICES, Sequences, random_prompt, reference_logits, save_tiny
from tests.models.quantized import SCHEMES, Tiny, plan

LIMIT = 1e-4
SHAPE = LoraShape(max_loras=4, max_rank=8, dtype=torch.float32)


class Adapted(Sequences):
    """Sequences of which each has the adapter in a slot, or none."""

    def __init__(self, model, slots, tiled=False):
        super().__init__(model, len(slots))
        self.slots, self.tiled = slots, tiled

    def batch(self, rows, decode=True):
        batch = super().batch(rows, decode)
        slots = [self.slots[row] for row, tokens in rows for _ in tokens]
        batch.adapters = token_adapters(slots, self.model.lora.max_loras, self.model.device, self.tiled)
        return batch


def load(folder, adapters, device="cpu", communicator=None, shape=SHAPE, dtype=torch.float32):
    """A model, or a rank's part of it, with adapters in its first slots."""
    spec = read_model_spec(folder)
    parallel = None if communicator is None else TensorParallel(make_plan(folder, communicator.size), communicator)
    place = {"device": torch.device(device), "dtype": dtype, "load_format": "auto", "seed": 0}
    model = load_model(folder, spec, **place, parallel=parallel, lora=shape)
    reader = AdapterReader(spec, model.lora.layout)
    for slot, adapter in enumerate(adapters):
        held = empty_adapter(model.lora.layout, shape.dtype, pinned=False)
        reader.read(adapter, held)
        model.lora.write(slot, held.numbers, held.scales)
    return model


def run(model, slots, prompts, tiled=False):
    """Logits of prompts that are prefilled in one step but for two tokens, which are decoded."""
    sequences = Adapted(model, slots, tiled)
    starts = sequences.step([(row, prompt[:-2]) for row, prompt in enumerate(prompts)])
    steps = [sequences.step([(row, [prompt[at]]) for row, prompt in enumerate(prompts)]) for at in (-2, -1)]
    return [torch.cat((start, *(step[row] for step in steps))) for row, start in enumerate(starts)]


def assert_merged(found, prompts, references):
    for logits, prompt, reference in zip(found, prompts, references, strict=True):
        wanted = reference_logits(reference, prompt)
        assert (logits - wanted).abs().max() <= LIMIT * max(1, float(wanted.abs().max()))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request, tmp_path_factory):
    """The folder of a tiny model, adapters of different kinds, and the references of the base and of each."""
    folder = tmp_path_factory.mktemp(request.param)
    base = save_tiny(folder / "model", request.param)
    adapters = [
        save_adapter(folder / "all", base, rank=8),
        save_adapter(folder / "few", base, 3, ("q_proj", "v_proj", "down_proj"), use_rslora=True),
        save_adapter(
            folder / "patterns", base, 5, ("k_proj", "o_proj", "up_proj"),
            rank_pattern={"o_proj": 2}, alpha_pattern={"up_proj": 1.25},
        ),
    ]  # fmt: skip
    return folder / "model", adapters, [base, *(merged(base, adapter) for adapter in adapters)]


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_any_mix_gives_the_logits_of_merged_weights(family, device, tiled):
    folder, adapters, references = family
    model = load(folder, adapters, device)
    slots = [1, -1, 0, 2, 1, 0, -1]
    prompts = [random_prompt(length) for length in (9, 23, 5, 17, 4, 41, 11)]
    assert_merged(run(model, slots, prompts, tiled), prompts, [references[slot + 1] for slot in slots])


def test_each_alone_and_the_base_beside_full_slots(family):
    folder, adapters, references = family
    model = load(folder, adapters)
    for slot in (-1, 0, 1, 2, 3):
        prompts = [random_prompt(13)]
        assert_merged(run(model, [slot], prompts), prompts, [references[0 if slot == 3 else slot + 1]])


def test_the_last_layer_of_wanted_tokens_alone_has_their_adapters(family):
    folder, adapters, references = family
    sequences = Adapted(load(folder, adapters), [2, -1, 0])
    prompts = [random_prompt(length) for length in (14, 9, 19)]
    batch = sequences.batch(list(enumerate(prompts)))
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    rows, lengths = [2, 0], torch.tensor([19, 14])
    bases = torch.tensor([sequences.arena.base_row(row) for row in rows])
    batch.logit_tokens = ends[rows]
    batch.wanted = WantedTokens(ends[rows], bases, torch.tensor(rows), lengths, 19)
    logits = sequences.model.logits(sequences.model.forward(batch))
    wanted = [reference_logits(references[slot + 1], prompts[row])[-1] for row, slot in ((2, 0), (0, 2))]
    assert (logits - torch.stack(wanted)).abs().max() <= LIMIT * max(1, float(logits.abs().max()))


def test_steps_without_adapters_are_those_of_the_layers_below(family):
    """Also where these fuse: a layer with slots says what the one below says, in steps without adapters alone."""
    folder, adapters, _ = family
    model = load(folder, adapters)
    plain = load_model(folder, model.spec, device=torch.device("cpu"), dtype=torch.float32, load_format="auto", seed=0)
    prompt = random_prompt(12)
    bare = Sequences(model)
    assert torch.equal(torch.cat(bare.step([(0, prompt)])), torch.cat(Sequences(plain).step([(0, prompt)])))

    class Fused(Linear):
        def fuses(self, rows, gated=False):
            return True

    state = LoraState()
    weights = LoraWeights(torch.zeros(1, 2, 3), torch.zeros(1, 4, 2), torch.zeros(1, 1), (4,))
    layer = ColParaLinearWithLoRA(Fused(torch.randn(4, 3)), weights, state)
    assert layer.fuses(1)
    state.adapters = token_adapters([0], 1, torch.device("cpu"), False)
    assert not layer.fuses(1)


@pytest.mark.parametrize("way", ["apart", "apart by cublas", "stacked"])
def test_each_layer_is_added_to_once(family, way, monkeypatch):
    """Also where the layer below adds to the residual by itself, which it does for many rows on a GPU."""
    folder, adapters, references = family
    monkeypatch.setattr("bladellm_runtime.models.lora_stacking.STACKED", way == "stacked")
    model, calls, outputs = load(folder, adapters), [], StackedLora._outputs

    def counted(*given):
        calls.append(given)
        return lora_shrink(*given)

    def counted_outputs(*given):
        calls.append(given)
        return outputs(*given)

    def add_to(self, residual, x):
        residual += self(x)
        return True

    monkeypatch.setattr("bladellm_runtime.layers.lora.lora_shrink", counted)
    monkeypatch.setattr(StackedLora, "_outputs", counted_outputs)
    if way == "apart by cublas":
        monkeypatch.setattr(Linear, "add_to", add_to)
    prompts = [random_prompt(11)]
    found = Adapted(model, [0]).step([(0, prompts[0])])
    assert_merged(found, prompts, [references[1]])
    assert len(calls) == 4 * model.spec.layers


def test_layers_have_the_names_of_the_field(family):
    folder, adapters, _ = family
    model = load(folder, adapters)
    layer = model.layers[0]
    kinds = [
        type(linear) for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    ]
    row = RowParaLinearWithLoRA
    assert kinds == [QKVProjectionWithLoRA, row, ColParaLinearWithSliceLoRA, row]
    table = weight_table(model.spec)
    stacked = stacked_rows(table, SHAPE, {}, torch.float32)
    assert len(stacked) == 4 * model.spec.layers
    assert lora_bytes(table, SHAPE, stacked) == model.lora.bytes
    layers = [(at.attention.qkv, at.attention.output, at.mlp.gate_up, at.mlp.down) for at in model.layers]
    linears = [linear.layer for of_layer in layers for linear in of_layer]
    behind = sum(linear.stacked.nbytes - linear.weight.nbytes for linear in linears)
    assert model.lora.numbers.nbytes + model.lora.scales.nbytes + behind == model.lora.bytes
    with pytest.raises(ValueError, match="3 slices"):
        QKVProjectionWithLoRA(layer.mlp.down.layer, layer.mlp.down.weights, model.lora.state)


def test_adapters_without_slots_are_refused(family):
    folder, adapters, _ = family
    model = load(folder, adapters)
    bare = load_model(folder, model.spec, device=torch.device("cpu"), dtype=torch.float32, load_format="auto", seed=0)
    batch = Adapted(model, [0]).batch([(0, [1, 2])])
    with pytest.raises(ValueError, match="without slots"):
        bare.forward(batch)


@pytest.mark.parametrize("degree", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_give_the_logits_of_merged_weights(family, degree):
    folder, adapters, references = family
    slots, prompts = [0, -1, 2, 1], [random_prompt(length) for length in (12, 7, 15, 9)]
    for found in run_ranks(degree, lambda group: run(load(folder, adapters, communicator=group), slots, prompts)):
        assert_merged(found, prompts, [references[slot + 1] for slot in slots])


def test_sums_are_taken_in_parts_where_no_token_has_an_adapter(family):
    folder, adapters, references = family
    prompts = [random_prompt(length) for length in (12, 7)]

    def work(group):
        group.overlap_rows = 2
        model = load(folder, adapters, communicator=group)
        found = run(model, [1, -1], prompts)
        names = {name for name, _ in group.joined}
        plain = Sequences(model).step([(0, prompts[0])])
        return found, names, plain, {name for name, _ in group.joined}

    for found, names, plain, all_names in run_ranks(2, work):
        assert_merged(found, prompts, [references[2], references[0]])
        assert_merged(plain, prompts[:1], references[:1])
        assert "start_sum" in all_names - names


@pytest.mark.parametrize("quantized", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_of_a_split_folder_cut_whole_adapters(quantized, tmp_path):
    if quantized:
        base = Tiny(tmp_path / "model", plan("gptq", SCHEMES["w4 g16"])).reference
    else:
        base = save_tiny(tmp_path / "model", "qwen3", head_dim=16, num_attention_heads=10)
    split_model(tmp_path / "model", tmp_path / "split", (3, 1))
    adapter = save_adapter(tmp_path / "adapter", base)
    references, prompts = [base, merged(base, adapter)], [random_prompt(length) for length in (6, 14)]
    for found in run_ranks(
        3, lambda group: run(load(tmp_path / "split", [adapter], communicator=group), [-1, 0], prompts)
    ):
        assert_merged(found, prompts, references)


@pytest.mark.parametrize(
    ("method", "scheme"),
    [("gptq", "w4 g16"), ("compressed-tensors", "w8 channel asymmetric"), ("awq", "w4 g16 asymmetric")],
)
def test_quantized_layers_take_adapters(method, scheme, tmp_path):
    tiny = Tiny(tmp_path / "model", plan(method, SCHEMES[scheme]))
    adapters = [save_adapter(tmp_path / name, tiny.reference, 6) for name in ("one", "two")]
    references = [tiny.reference, *(merged(tiny.reference, adapter) for adapter in adapters)]
    model = load(tmp_path / "model", adapters)
    slots, prompts = [1, -1, 0], [random_prompt(length) for length in (8, 13, 21)]
    assert_merged(run(model, slots, prompts), prompts, [references[slot + 1] for slot in slots])


def test_adapters_of_another_type_than_the_model(family):
    folder, adapters, references = family
    model = load(folder, adapters, shape=replace(SHAPE, dtype=torch.bfloat16))
    prompts = [random_prompt(20)]
    logits, wanted = run(model, [0], prompts)[0], reference_logits(references[1], prompts[0])
    assert 0 < (logits - wanted).abs().max() <= 0.05 * wanted.abs().max()


def test_trained_adapters_give_the_logits_of_merged_weights(target_model):
    """Both alone and in one batch with the base; absolute, in float32."""
    folder, adapters = target_model, [target_model.parent / "adapters" / name for name in ("gsm8k", "pep")]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    references = [base, *(merged(base, adapter) for adapter in adapters)]
    model = load(folder, adapters, shape=replace(SHAPE, max_rank=16))
    slots = [0, -1, 1]
    prompts = [torch.randint(0, base.config.vocab_size, (length,)).tolist() for length in (31, 18, 25)]
    mixed = run(model, slots, prompts)
    for row, slot in enumerate(slots):
        wanted = reference_logits(references[slot + 1], prompts[row])
        alone = run(model, [slot], [prompts[row]])[0]
        assert (mixed[row] - wanted).abs().max() <= LIMIT
        assert (alone - wanted).abs().max() <= LIMIT
