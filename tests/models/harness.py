"""Tiny random models of every family, a KV arena of fixed row ranges, and steps over it."""

from pathlib import Path

import torch
import transformers
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer

from bladellm_runtime.kv.arena import KvArena, KvShape
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.layers.batch import ForwardBatch, PrefillRow
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.loading import load_model

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
VOCAB = 97
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


class RowArena(KvArena):
    """A slot is a fixed range of rows. Rows start as NaN, so that reading one nobody wrote shows."""

    def __init__(self, model: Decoder, slots: int, max_tokens: int) -> None:
        spec = model.spec
        sizes = KvSpec((KvGroup(tuple(range(spec.layers)), 1),), max_tokens, slots, slots, max_tokens)
        super().__init__(sizes, KvShape(spec.kv_heads, spec.head_dim, model.dtype, NO_QUANT), model.device)
        shape = (slots * max_tokens, spec.layers, 2, spec.kv_heads, spec.head_dim)
        self.rows = torch.full(shape, torch.nan, dtype=model.dtype, device=model.device)

    def submit(self, plan, rows=None) -> None: ...

    def move(self, moves) -> None: ...

    def join_moves(self, stream) -> bool:
        return False

    def close(self) -> None: ...

    def base_row(self, slot: int) -> int:
        return slot * self.spec.max_tokens

    def granule_rows(self, slots, positions):
        return slots * self.spec.max_tokens + positions

    def layer(self, index: int) -> KvLayer:
        return KvLayer(self.rows[:, index], NO_QUANT, self.spec.granule_tokens)

    def granules(self, slot: int) -> list[int]:
        return [slot]


def save_tiny(folder: Path, family: str, max_shard_size: str = "1GB", **options) -> transformers.PreTrainedModel:
    """Build transformers' model of a family with every tensor random, save it, and return it for comparison."""
    config = CONFIGS[family](**{**SIZES, **options})
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * 0.15)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def load_tiny(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    spec = read_model_spec(folder)
    return load_model(folder, spec, device=torch.device(device), dtype=dtype, load_format="auto", seed=0)


class Sequences:
    """Sequences in the slots of an arena, advanced by steps that may mix decode rows and prefill chunks."""

    def __init__(self, model: Decoder, slots: int = 4, max_tokens: int = 160) -> None:
        self.model = model
        self.arena = RowArena(model, slots, max_tokens)
        self.lengths = [0] * slots

    def step(self, rows: list[tuple[int, list[int]]], decode: bool = True) -> list[torch.Tensor]:
        """Feed (slot, tokens) rows; logits [tokens, vocab] of each row, on the CPU."""
        batch = self.batch(rows, decode)
        logits = self.model.logits(self.model.forward(batch)) if batch.prefills else self.model.decode(batch)
        return list(logits.cpu().split([len(tokens) for _, tokens in rows]))

    def batch(self, rows: list[tuple[int, list[int]]], decode: bool = True) -> ForwardBatch:
        """The batch of a step that wants the logits of every token; the sequences count as advanced.

        A row of one token at a position above 0 is a decode row, unless `decode` is off; those must come first.
        """
        positions = [self.lengths[slot] + offset for slot, tokens in rows for offset in range(len(tokens))]
        bases = [self.arena.base_row(slot) for slot, _ in rows]
        count = sum(decode and len(tokens) == 1 and self.lengths[slot] > 0 for slot, tokens in rows)
        prefills, first = [], 0
        for index, (slot, tokens) in enumerate(rows):
            if index >= count:
                prefills.append(PrefillRow(first, len(tokens), self.lengths[slot], bases[index], slot))
            first += len(tokens)
        kv_rows = [bases[i] + self.lengths[s] + o for i, (s, t) in enumerate(rows) for o in range(len(t))]
        for slot, tokens in rows:
            self.lengths[slot] += len(tokens)
        kv_lens = [self.lengths[slot] for slot, _ in rows[:count]]
        return ForwardBatch(
            input_ids=self._tensor([token for _, tokens in rows for token in tokens]),
            positions=self._tensor(positions),
            kv_rows=self._tensor(kv_rows),
            granule_rows=None,
            num_decode=count,
            decode_base_rows=self._tensor(bases[:count]),
            decode_slots=self._tensor([slot for slot, _ in rows[:count]]),
            decode_kv_lens=self._tensor(kv_lens),
            max_decode_kv_len=max(kv_lens, default=0),
            prefills=prefills,
            logit_tokens=self._tensor(list(range(first))),
            kv=self.arena,
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)


def random_prompt(length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,)).tolist()


@torch.no_grad()
def reference_logits(model: transformers.PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0]


@torch.no_grad()
def reference_greedy(model: transformers.PreTrainedModel, prompt: list[int], steps: int) -> list[int]:
    """transformers' own generate, without an end."""
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False)
    return made[0, len(prompt) :].tolist()


def assert_greedy(model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """Tokens are transformers' own: each is the best behind those before it, by the logits of all of them at once.
    Where two are equal but for rounding, which random weights bring about now and then, either may come. Rotations that
    change with a text's length have other logits for a whole one: tokens are those of generate then."""
    logits = reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    short = logits.amax(1) - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    if not (short <= 1e-5 * logits.abs().amax(1)).all():
        assert tokens == reference_greedy(model, prompt, len(tokens)), short
