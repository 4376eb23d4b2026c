"""What the files beside `tokenizer.json` say of its tokens, read as transformers 5 reads them for every fast tokenizer.

Settings are read only where their effect is known: any other is an `UnprovenError`, and transformers reads the folder.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken

Token: TypeAlias = str | AddedToken

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names every tokenizer has. Others that end in `_token`, such as `image_token`, are a model's own."""

_WITHOUT_EFFECT = """
add_bos_token add_eos_token add_prefix_space auto_map backend clean_up_tokenization_spaces do_lower_case errors
from_slow is_local keep_accents legacy local_files_only max_len max_length merges_file model_max_length name_or_path
pad_to_multiple_of pad_token_type_id padding processor_class remove_space response_schema response_template
sp_model_kwargs spaces_between_special_tokens special_tokens_map_file stride strip_accents tokenize_chinese_chars
tokenizer_class tokenizer_file trim_offsets truncation truncation_strategy trust_remote_code use_default_system_prompt
vocab_file vocab_size
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Keys of tokenizer_config.json that change nothing beside a tokenizer.json, whatever their value."""
HARMLESS: dict[str, tuple[object, ...]] = {
    "padding_side": ("left", "right"),
    "truncation_side": ("left", "right"),
    "split_special_tokens": (False,),
    "init_inputs": ([],),
    "model_input_names": (["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]),
}
"""Keys of tokenizer_config.json with the values that change nothing."""
READ = frozenset({"added_tokens_decoder", "additional_special_tokens", "chat_template", "extra_special_tokens"})


class UnprovenError(Exception):
    """A setting whose effect only transformers knows."""


@dataclass
class TokenSettings:
    """Tokens that the tokenizer must have; those it lacks get ids in this order."""

    added: dict[int, AddedToken] = field(default_factory=dict)
    """Added tokens by the id they were written with, ascending or not."""
    named: dict[str, Token | None] = field(default_factory=dict)
    """Keys end in `_token` as a rule; None is a name without a token."""
    extra: list[Token] = field(default_factory=list)
    unclear: list[Token] = field(default_factory=list)
    """Extra tokens that one version of transformers adds and another ignores."""


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, empty where there is none. Raises `UnprovenError` for a key that is not known here."""
    config = _read_object(folder / "tokenizer_config.json")
    for key, value in config.items():
        if key in HARMLESS and value not in HARMLESS[key]:
            raise UnprovenError(f"{key} is {value!r}")
        if key not in READ and key not in WITHOUT_EFFECT and key not in HARMLESS and not key.endswith("_token"):
            raise UnprovenError(f"{key} is set")
    return config


def read_settings(folder: Path, config: dict[str, Any], own: dict[int, AddedToken], pad: str | None) -> TokenSettings:
    """The tokens of `config` and, where it lists no added tokens, of the files that older folders have.

    own: the added tokens of tokenizer.json. pad: the token with which tokenizer.json pads, if it does.
    """
    given = {key: _token(value) for key, value in config.items() if _names_a_token(key)}
    models_own = {key: given.pop(key) for key in list(given) if key not in NAMED and isinstance(given[key], str)}
    extra, unclear = _extra_tokens(config)
    if isinstance(extra, dict):
        models_own |= {key: _some_token(value) for key, value in extra.items()}
        extra = None
    if "added_tokens_decoder" in config:
        listed = config["added_tokens_decoder"]
        added = {int(token_id): AddedToken(**each) for token_id, each in listed.items()}
        if len(added) < len(listed):
            raise UnprovenError("added_tokens_decoder gives an id to two tokens")
    elif unclear is not None:
        raise UnprovenError("additional_special_tokens and extra_special_tokens are set")
    else:
        older, late = _special_tokens_map(folder)
        plain = {key: config[key] for key in NAMED if isinstance(config.get(key), str)} | older
        # The type of a token that tokenizer_config.json writes as an object is not known yet when these are compared.
        words = {str(plain[key]) for key in NAMED if plain.get(key)}
        words |= {token for token in extra or () if isinstance(token, str)}
        given |= older
        added = _added_tokens_file(folder, words, own)
        extra = late if extra is None else extra
    if pad is not None:
        given.setdefault("pad_token", pad)
    named = dict.fromkeys(NAMED) | {key: given[key] for key in NAMED if key in given}
    named |= {key: token for key, token in given.items() if key not in NAMED and token is not None} | models_own
    return TokenSettings(added, named, extra or [], unclear or [])


def read_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The folder's default chat template."""
    if (folder / "additional_chat_templates").exists():
        raise UnprovenError("additional_chat_templates exists")
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        if any(each.keys() != {"name", "template"} for each in template):
            raise UnprovenError("chat_template lists something else than templates")
        template = {each["name"]: each["template"] for each in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise UnprovenError("chat_template is no text")
    return template


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise UnprovenError(f"{path.name} is no object")
    return value


def _names_a_token(key: str) -> bool:
    return key.endswith("_token") and key not in WITHOUT_EFFECT


def _token(value: Any) -> Token | None:
    """A token as tokenizer_config.json writes it: a string, or an object that says its type."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        value = AddedToken(**{key: each for key, each in value.items() if key != "__type"})
    if value is not None and (not isinstance(value, Token) or not str(value)):
        raise UnprovenError("a token is no text")
    return value


def _some_token(value: Any) -> Token:
    token = _token(value)
    if token is None:
        raise UnprovenError("a token is null")
    return token


def _extra_tokens(config: dict[str, Any]) -> tuple[list[Token] | dict[str, Any] | None, list[Token] | None]:
    """`extra_special_tokens`, None where neither it nor its old name is there.

    Then what stands under the old name where the new one is empty, which a version of transformers ignores.
    """
    old, new = config.get("additional_special_tokens"), config.get("extra_special_tokens")
    if "additional_special_tokens" in config and "extra_special_tokens" in config:
        if not new:
            return [], _token_list(old)
        if isinstance(new, dict) and old:
            raise UnprovenError("additional_special_tokens and extra_special_tokens are set")
    elif "additional_special_tokens" in config:
        new = old
    elif "extra_special_tokens" not in config:
        return None, None
    return new if isinstance(new, dict) else _token_list(new), None


def _token_list(value: Any) -> list[Token]:
    if value is not None and not isinstance(value, list):
        raise UnprovenError("special tokens are no list")
    return [_some_token(each) for each in value or ()]


def _special_tokens_map(folder: Path) -> tuple[dict[str, Token | None], list[Token] | None]:
    """Tokens by name, and the extra ones, None where it does not list them."""
    tokens: dict[str, Token | None] = {}
    extra = None
    for key, value in _read_object(folder / "special_tokens_map.json").items():
        if key == "additional_special_tokens":
            extra = _token_list(value)
        elif not _names_a_token(key):
            raise UnprovenError(f"special_tokens_map.json has {key}")
        elif isinstance(value, dict):
            tokens[key] = _token(AddedToken(**(value | {"special": True})))
        else:
            tokens[key] = _token(value)
    return tokens, extra


def _added_tokens_file(folder: Path, special: set[str], own: dict[int, AddedToken]) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json, and `own`."""
    ids = _read_object(folder / "added_tokens.json")
    if len(set(ids.values())) < len(ids) or any(str(own.get(ids[text], text)) != text for text in ids):
        raise UnprovenError("added_tokens.json gives an id to two tokens")
    return {
        token_id: AddedToken(text, lstrip=False, rstrip=False, normalized=text not in special, special=text in special)
        for text, token_id in ids.items()
    } | own
