"""`Tokenizer`: text to token ids and back, for a Hugging Face folder with a fast tokenizer. Imports no torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from bladellm_runtime.errors import CheckpointError, ConfigError, ParameterError, one_line
from bladellm_runtime.text.folder_tokenizer import FolderTokenizer, read_folder
from bladellm_runtime.text.special_tokens import SpecialTokenGuard
from bladellm_runtime.text.template import ChatTemplate
from bladellm_runtime.text.text_cuts import TextCuts
from bladellm_runtime.text.token_bytes import TokenBytes
from bladellm_runtime.text.token_json import TokenJson

MAX_TEMPLATE_BYTES = 2**20


def check_text(text: object, param: str) -> str:
    """`text` if it is a string that UTF-8 can hold; else `ParameterError` for the field `param`. NUL is text."""
    if not isinstance(text, str):
        raise ParameterError(f"{param} must be a string, got {type(text).__name__}", param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(f"{param} has half of a surrogate pair at character {error.start}", param) from None
    return text


class Tokenizer:
    """A fast tokenizer with its chat template and the special tokens of its model. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        named_tokens: dict[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        source: str = "tokenizer.json",
    ) -> None:
        """`named_tokens` are the variables a chat template may use, such as `bos_token`; `source` names the file."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._source = source
        self._bytes = TokenBytes(backend, source)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = list(eos_token_ids)
        self.named_tokens = dict(named_tokens or {})
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._json = {skip: TokenJson(self.token_bytes, self.special_ids if skip else ()) for skip in (False, True)}
        self.guard = SpecialTokenGuard(backend)
        self._cuts = TextCuts.of(backend)

    @staticmethod
    def load(folder: Path, chat_template_file: Path | None = None) -> "Tokenizer":
        """Load `tokenizer.json` and what belongs to it from a model folder.

        `chat_template_file` (`--chat_template`) replaces the folder's chat template. `CheckpointError` for a folder
        without a usable fast tokenizer, `ConfigError` for a template file that cannot be used.
        """
        source = folder / "tokenizer.json"
        if not source.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; slow tokenizers are not supported, "
                "so convert it with transformers' AutoTokenizer and save_pretrained"
            )
        read = read_folder(folder)
        template = _read_template_file(chat_template_file) if chat_template_file else _own_template(read, folder)
        return Tokenizer(
            read.backend,
            eos_token_ids=_eos_token_ids(folder, read.eos_token_id),
            named_tokens=read.named_tokens,
            chat_template=template,
            source=str(source),
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `CheckpointError` for a model with fewer embeddings than the tokenizer has entries (more is common:
        padding)."""
        if self.vocab_size > vocab_size:
            raise CheckpointError(
                f"{self._source} has {self.vocab_size} tokens, above the vocab_size {vocab_size} of the model's "
                "config.json; use the tokenizer that belongs to the model (--tokenizer_dir)"
            )

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self.chat_template is not None

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops the space before the first word of a text (sentencepiece-style tokenizers)."""
        return self._bytes.strips_first_space

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of `text`. The text of a special token in it *does* become that token: prompts may use them.

        `add_special_tokens` adds what the tokenizer puts around a text, such as a beginning-of-text token.
        Lone surrogates raise `ParameterError` naming `param`.
        """
        check_text(text, param)
        if self._cuts is not None:
            return self._cuts.encode(text, add_special_tokens=add_special_tokens)
        # The batch call lets other Python threads run meanwhile; `encode` holds the interpreter lock.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` and nothing around it, in which the text of a special token stays text."""
        if self.guard.always or self.guard.has_special(text):
            return self.guard.encode(self.guard.mark(text))
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of all `ids` at once; ids outside the vocabulary have no text. For streams use `Detokenizer`."""
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        # The batch call lets other Python threads run meanwhile, as in `encode`.
        texts: list[str] = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, be it only a part of a UTF-8 character; special tokens are their text."""
        return self._bytes[token_id]

    def token_json(self, skip_special_tokens: bool) -> TokenJson:
        """The texts of single tokens as JSON, those of special tokens left out or not."""
        return self._json[skip_special_tokens]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` for display: bytes that are no character show as U+FFFD."""
        return self._bytes[token_id].decode(errors="replace")


def _own_template(read: FolderTokenizer, folder: Path) -> ChatTemplate | None:
    if read.chat_template is None:
        return None
    if not isinstance(read.chat_template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be text; download it again")
    try:
        return ChatTemplate(read.chat_template)
    except ValueError as error:
        raise CheckpointError(f"the chat template of {folder} cannot be used: {one_line(error)}") from None


def _read_template_file(path: Path) -> ChatTemplate:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"--chat_template {path} is above {MAX_TEMPLATE_BYTES} bytes; give a Jinja template file")
        return ChatTemplate(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--chat_template {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # UnicodeDecodeError too
        raise ConfigError(f"--chat_template {path} is not a usable Jinja template: {one_line(error)}") from None


def _eos_token_ids(folder: Path, own: int | None) -> list[int]:
    """The ids of generation_config.json, which may list several, else the tokenizer's own one."""
    path = folder / "generation_config.json"
    value: Any = None
    if path.is_file():
        try:
            value = json.loads(path.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError):
            raise CheckpointError(f"{path} is not a JSON object") from None
    if value is None:
        value = [] if own is None else own
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them")
    return list(dict.fromkeys(ids))
