"""`read_folder`: the fast tokenizer of a Hugging Face folder, without transformers where its effect is known.

transformers takes half a second to import and reads large files twice. What its class for every fast tokenizer does
after reading tokenizer.json is little: it adds the tokens that the files beside it name. `read_plain` does the same for
the settings it knows, whatever `tokenizer_class` says; transformers reads every other folder.
"""

import json
import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from bladellm_runtime.errors import CheckpointError, one_line
from bladellm_runtime.text.token_settings import (
    TokenSettings,
    UnprovenError,
    read_chat_template,
    read_config,
    read_settings,
)

ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')

logger = logging.getLogger(__name__)

_one_at_a_time = threading.Lock()
"""transformers' modules import each other late, and fail in two threads at once; so does its one level of logging."""


@dataclass(frozen=True)
class FolderTokenizer:
    """What a model folder says about text."""

    backend: Tokenizer
    eos_token_id: int | None
    named_tokens: dict[str, str]
    """`bos_token` and the like, as chat templates know them."""
    chat_template: str | None


def read_folder(folder: Path) -> FolderTokenizer:
    """Read a folder that has a tokenizer.json. Raises `CheckpointError` where that or its configuration is broken."""
    try:
        return read_plain(folder)
    except Exception as error:  # of whatever kind: transformers has the last word, on broken files too
        logger.debug("transformers reads the tokenizer of %s: %s", folder, error)
        return read_with_transformers(folder)


def read_plain(folder: Path) -> FolderTokenizer:
    """Read a folder with known settings, without transformers. Raises `UnprovenError` for others.

    transformers reads config.json too, for vocabularies as large as Mistral's; that does nothing without the setting
    `fix_mistral_regex`, which is not known here.
    """
    config = read_config(folder)
    text = (folder / "tokenizer.json").read_bytes().decode()
    backend = Tokenizer.from_str(text)
    own = {} if "added_tokens_decoder" in config else _own_added_tokens(text, backend)
    settings = read_settings(folder, config, own, backend.padding["pad_token"] if backend.padding else None)
    backend.add_tokens(_missing_tokens(settings, backend))
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    named = {name: str(token) for name, token in settings.named.items() if token is not None}
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return FolderTokenizer(backend, eos, named, read_chat_template(folder, config))


def read_with_transformers(folder: Path) -> FolderTokenizer:
    """Read any folder. Raises `CheckpointError` where transformers cannot."""
    with _one_at_a_time:
        return _read_with_transformers(folder)


def _read_with_transformers(folder: Path) -> FolderTokenizer:
    # AutoTokenizer imports torch (seconds); the class it would end up with for a tokenizer.json does not.
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it warns when the folder names a subclass, which reads the same file
    try:
        loaded: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        template = loaded.chat_template
        named = {name: str(token) for name, token in loaded.special_tokens_map.items()}
        return FolderTokenizer(
            loaded.backend_tokenizer,
            loaded.eos_token_id,
            named,
            template.get("default") if isinstance(template, dict) else template,
        )
    except Exception as error:  # tokenizers raises bare Exception for a broken file
        source = folder / "tokenizer.json"
        raise CheckpointError(f"{source} or tokenizer_config.json cannot be read: {one_line(error)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)


def _own_added_tokens(text: str, backend: Tokenizer) -> dict[int, AddedToken]:
    """The added tokens that tokenizer.json (`text`) lists by id; parsing all of it would take as long as the rest."""
    places = [match.end() for match in ADDED_TOKENS.finditer(text)]
    if len(places) != 1:
        raise UnprovenError("tokenizer.json does not say once which tokens were added")
    entries: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text, places[0])[0]
    own = {entry.pop("id"): AddedToken(**entry) for entry in entries}
    if len(own) != len(entries) or own != backend.get_added_tokens_decoder():
        raise UnprovenError("tokenizer.json lists added tokens twice, or with ids that are not theirs")
    return own


def _missing_tokens(settings: TokenSettings, backend: Tokenizer) -> list[AddedToken]:
    """What transformers adds: every listed token once more, as it is listed, and those that the backend lacks."""
    tokens: list[str | AddedToken] = [token for _, token in sorted(settings.added.items(), key=lambda item: item[0])]
    known = {token.content for token in [*backend.get_added_tokens_decoder().values(), *settings.added.values()]}
    if not all(str(token) in known for token in settings.unclear):
        raise UnprovenError("additional_special_tokens and extra_special_tokens are set")
    names = {str(token) for token in settings.named.values() if token is not None}
    for token in [*settings.named.values(), *settings.extra]:
        if token is not None and str(token) not in known and token not in tokens:
            tokens.append(token)
    added = [AddedToken(token, special=True) if isinstance(token, str) else token for token in tokens]
    for token in added:
        token.special = token.special or token.content in names
    return added
