"""The calibration forward against transformers and against the runtime's decoder, for every family."""

import pytest
import torch
import torch.nn.functional as F

from bladellm_tools.quantize.algorithms.layer import GROUPS
from bladellm_tools.quantize.pipeline.forward import KEYS, VALUES, forward_layer, observe_layer, rotary_tables_of
from bladellm_tools.quantize.pipeline.source import open_float_model
from tests.models.harness import Sequences, load_tiny, reference_logits, save_tiny
from tests.models.test_families import CASES
from tests.quantize.jobs import windows

LIMIT = 1e-4


def load(folder, device):
    with open_float_model(folder) as model:
        layers = [{name: one.to(device) for name, one in weights.items()} for _, weights in model.layers()]
        return model.spec, layers, {name: one.to(device) for name, one in model.outer().items()}


@torch.no_grad()
def run(spec, layers, outer, tokens, device, observe=None):
    """Logits of tokens [B, T] by our layers between plain embedding, norm and head."""
    x = F.embedding(tokens.to(device), outer["model.embed_tokens.weight"])
    tables = rotary_tables_of(spec, tokens.shape[1], torch.device(device))
    for index, weights in enumerate(layers):
        x = forward_layer(spec, index, weights, x, tables, None if observe is None else observe(index))
    x = F.rms_norm(x, x.shape[-1:], outer["model.norm.weight"], spec.rms_norm_eps)
    return F.linear(x, outer.get("lm_head.weight", outer["model.embed_tokens.weight"])).cpu()


@pytest.mark.parametrize("case", list(CASES))
def test_logits_are_those_of_transformers(case, tmp_path, device):
    family, options = CASES[case]
    reference = save_tiny(tmp_path, family, **options)
    tokens = windows(3, 37)
    logits = run(*load(tmp_path, device), tokens, device)
    for row, prompt in zip(logits, tokens, strict=True):
        assert (row - reference_logits(reference, prompt.tolist())).abs().max() <= LIMIT


@pytest.mark.parametrize("case", ["llama-tied-biased", "mistral-window", "qwen3-window-yarn"])
def test_logits_are_those_of_the_runtime(case, tmp_path, device):
    save_tiny(tmp_path, CASES[case][0], **CASES[case][1])
    tokens = windows(2, 29)
    logits = run(*load(tmp_path, device), tokens, device)
    for slot, prompt in enumerate(tokens):
        ours = Sequences(load_tiny(tmp_path, device)).step([(slot, prompt.tolist())])[0]
        assert (logits[slot] - ours).abs().max() <= LIMIT


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_observed_inputs_are_those_of_the_linear_layers(family, tmp_path, device):
    """Compared with hooks on transformers' modules; keys and values with its KV cache."""
    reference = save_tiny(tmp_path, family)
    spec, layers, outer = load(tmp_path, device)
    tokens = windows(2, 17)
    expected, hooks = {}, []
    for index, layer in enumerate(reference.model.layers):
        for group in GROUPS:
            module = layer.get_submodule(group.members[0])

            def keep(_, inputs, key=(index, group.name)):
                expected[key] = inputs[0].flatten(0, 1)

            hooks.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        cache = reference(tokens, use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        expected[index, KEYS] = layer.keys.transpose(1, 2).flatten(2).flatten(0, 1)
        expected[index, VALUES] = layer.values.transpose(1, 2).flatten(2).flatten(0, 1)
    seen = {}

    def observe(index):
        return lambda name, x: seen.__setitem__((index, name), x.cpu())

    run(spec, layers, outer, tokens, device, observe)
    assert seen.keys() == expected.keys()
    for key, x in expected.items():
        torch.testing.assert_close(seen[key], x, atol=LIMIT, rtol=1e-3)


def test_observing_alone_shows_the_same(tmp_path):
    save_tiny(tmp_path, "qwen3")
    spec, layers, _ = load(tmp_path, "cpu")
    x = torch.randn(2, 13, spec.hidden_size)
    tables = rotary_tables_of(spec, 13, torch.device("cpu"))
    one, other = {}, {}
    forward_layer(spec, 1, layers[1], x, tables, one.__setitem__)
    observe_layer(spec, 1, layers[1], x, tables, other.__setitem__)
    assert one.keys() == other.keys() == {group.name for group in GROUPS} | {KEYS, VALUES}
    assert all(torch.equal(one[name], other[name]) for name in one)
