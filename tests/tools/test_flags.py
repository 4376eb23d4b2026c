"""Flags and recipes: every spelling reaches the field, and flag > recipe > default."""

import contextlib
import dataclasses
import io
import typing
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bladellm_runtime.config import EngineArgs, ServingArgs
from bladellm_runtime.errors import ConfigError, ParameterError
from bladellm_runtime.flags import flag
from bladellm_runtime.request import SamplingParams
from bladellm_tools import cli
from bladellm_tools.flags import Flag, flags_of, make_flag, normalise
from bladellm_tools.generate_args import GenerateArgs
from bladellm_tools.recipe import MAX_RECIPE_BYTES, read_recipe, to_yaml
from tests.tools.command import ROOT

SERVE = cli.COMMANDS["serve"]


def effective(arguments: list[str], command: str = "serve") -> dict[str, Any]:
    """The values in effect, as --print_config shows them."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert cli.run_command(command, "blade_llm", [*arguments, "--print_config"]) == 0
    return yaml.safe_load(shown.getvalue())


def value_of(item: Flag) -> st.SearchStrategy[Any]:
    words = st.text(
        st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cc", "Cs"]), min_size=1
    )
    words = words.filter(lambda text: not text.startswith("-"))
    if item.choices:
        one = st.sampled_from(item.choices)
    elif item.kind is bool:
        one = st.booleans()
    elif item.kind is int:
        one = st.integers(int(item.low), int(item.high))
    elif item.kind is float:
        one = st.floats(item.low, item.high)
    else:
        one = words
    if item.is_list and item.kind is int:
        return st.lists(one, min_size=1, max_size=3, unique=True).map(sorted)
    return st.lists(one, min_size=1, max_size=3) if item.is_list else one


@st.composite
def command_line(draw: st.DrawFn) -> tuple[list[str], dict[str, Any]]:
    """Some flags of the server in any order and spelling, and the values they must have."""
    chosen = draw(st.lists(st.sampled_from(flags_of(ServingArgs)), unique_by=lambda item: item.name))
    arguments: list[str] = []
    values = {}
    for item in chosen:
        value = values[item.name] = draw(value_of(item))
        name = item.name.replace("_", "-") if draw(st.booleans()) else item.name
        texts = [str(one).lower() if item.kind is bool else str(one) for one in (value if item.is_list else [value])]
        arguments += [f"--{name}={texts[0]}", *texts[1:]] if draw(st.booleans()) else [f"--{name}", *texts]
    # Those that cannot be together whatever is served.
    assume(not values.get("disable_frontend_multiprocessing") or values.get("frontend_processes", 1) == 1)
    assume(not values.get("enable_json_warmup") or values.get("guided_backend") != "fsm")
    return arguments, values


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(command_line())
def test_every_spelling_reaches_its_field(case: tuple[list[str], dict[str, Any]]) -> None:
    check_spellings(*case)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(command_line())
def test_every_spelling_reaches_its_field_in_many_cases(case: tuple[list[str], dict[str, Any]]) -> None:
    check_spellings(*case)


def check_spellings(arguments: list[str], values: dict[str, Any]) -> None:
    shown = effective(arguments)
    secrets = {"api_key"}
    for item in dataclasses.fields(ServingArgs):
        if item.name not in secrets:
            default = [] if item.default is dataclasses.MISSING else item.default
            assert shown[item.name] == values.get(item.name, default), item.name


def test_secrets_are_not_printed() -> None:
    assert "api_key" not in effective(["--api_key", "topsecret"])
    assert "topsecret" not in to_yaml({"api_key": ["topsecret"]})


def test_switches() -> None:
    assert effective(["--disable_overlap"])["disable_overlap"] is True
    assert effective(["--disable-overlap", "false", "--port", "1"])["disable_overlap"] is False
    assert effective(["--disable_overlap=TRUE"])["disable_overlap"] is True


def test_the_last_of_repeated_flags_wins_and_lists_grow() -> None:
    shown = effective(
        ["--port", "1", "--port=2", "--served_model_name", "a", "b", "--host", "h", "--served-model-name=c"]
    )
    assert shown["port"] == 2
    assert shown["served_model_name"] == ["a", "b", "c"]


def test_extra_names_and_dotted_names() -> None:
    tensor_parallel = next(item for item in cli.COMMANDS["check"].flags if item.name == "tensor_parallel_size")
    assert normalise(["-tp", "4"], [tensor_parallel]) == ["--tensor_parallel_size=4"]
    field = dataclasses.fields(dataclasses.make_dataclass("D", [("model", str, flag("", "help", group="Draft"))]))[0]
    dotted = dataclasses.replace(make_flag(field, str), name="draft.model")
    assert normalise(["--draft.model", "x"], [dotted]) == ["--draft.model=x"]
    assert cli.typer_parameter(dotted).name.isidentifier()


def test_negative_numbers_are_values_of_numeric_flags() -> None:
    flags = cli.COMMANDS["generate"].flags
    assert normalise(["--top_k", "-1", "--presence_penalty", "-0.5"], flags) == [
        "--top_k=-1",
        "--presence_penalty=-0.5",
    ]
    with pytest.raises(ConfigError, match="needs a value"):
        normalise(["--model", "-1"], flags)


def test_help_wins_over_everything() -> None:
    assert normalise(["--port", "1", "-h", "--nonsense"], SERVE.flags) == ["--help"]


def test_flag_beats_recipe_beats_default(tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: from-recipe\nport: 9000\nserved_model_name: [a, b]\ndisable_overlap: true\nmax_model_len: null\n"
    )
    shown = effective(["--config", str(recipe), "--port", "9001", "--disable_overlap=false"])
    default = ServingArgs()
    assert shown["model"] == "from-recipe"
    assert shown["port"] == 9001
    assert shown["served_model_name"] == ["a", "b"]
    assert shown["disable_overlap"] is False
    assert shown["max_model_len"] is None
    assert shown["max_queue_size"] == default.max_queue_size


def test_print_config_is_a_recipe(tmp_path) -> None:
    before = effective(
        ["--model", "m: [odd] #name", "--kv_cache_gib", "0.001", "--served_model_name", "yes", "1", "null"]
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(before))
    assert effective(["--config", str(recipe)]) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", ["'prot'", "'port'"]),
        ("max-model-len: 8", ["'max-model-len'", "'max_model_len'"]),
        ("1: 2", ["1", "--help"]),
        ("config: x", ["'config'"]),
        ("port: 70000", ["port must be", "65535", "70000"]),
        ("port: [1]", ["port must be", "[1]"]),
        ("port: {a: 1}", ["port must be"]),
        ("port: true", ["port must be"]),
        ("port:", ["port must be", "None"]),
        ("dtype: int3", ["dtype must be one of", "int3"]),
        ("port: 1\nhost: x\nport: 2", ["'port'", "twice", "line 3"]),
        ("- a", ["name: value"]),
        ("just text", ["name: value"]),
        ("a: [", ["not valid YAML", "line"]),
        ("? [a, b]\n: c", ["not valid YAML", "line 1"]),
        ("a: !!python/object/apply:os.system [id]", ["not valid YAML"]),
        ("\tport: 1", ["not valid YAML"]),
        ("strict_params: !!bool maybe", ["not valid YAML"]),
        ("host: !!timestamp x", ["not valid YAML"]),
        ("port: !!int ''", ["not valid YAML"]),
        ("a: " + "[" * 5000, ["not valid YAML"]),
        ("x" * (MAX_RECIPE_BYTES + 1), ["larger than"]),
    ],
)
def test_bad_recipes_name_file_and_key(text: str, words: list[str], tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_recipe(str(recipe), SERVE.own_flags)
    message = str(error.value)
    assert str(recipe) in message
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_unreadable_recipes(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_recipe(str(tmp_path / "none.yaml"), SERVE.own_flags)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(str(tmp_path), SERVE.own_flags)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_recipe(str(binary), SERVE.own_flags)
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing yet\n")
    assert read_recipe(str(empty), SERVE.own_flags) == {}


def test_the_recipes_of_the_repository_are_valid() -> None:
    recipes = sorted((ROOT / "recipes").glob("serve_*.yaml"))
    assert recipes
    for recipe in recipes:
        assert ServingArgs(**read_recipe(str(recipe), SERVE.own_flags)).model


def test_generate_has_a_flag_for_every_sampling_parameter() -> None:
    """All but logit_bias, a mapping, which no flag spells well; with the same defaults."""
    parameters = {item.name: item for item in dataclasses.fields(SamplingParams)}
    own = {item.name: item for item in flags_of(GenerateArgs)}
    assert set(parameters) - set(own) == {"logit_bias"}
    for name in set(parameters) & set(own):
        default = parameters[name].default
        assert own[name].default == (list(default) if isinstance(default, tuple) else default), name


def test_the_ranges_of_generate_are_those_of_a_request() -> None:
    for item in flags_of(GenerateArgs):
        if item.low is None:
            continue
        beyond = {"high": item.high + 1, "low": item.low - 1}
        for value in (item.low, item.high):
            SamplingParams(**{"max_tokens": None, item.name: item.kind(value)})
        for value in beyond.values():
            with pytest.raises(ParameterError, match=item.name):
                SamplingParams(**{"max_tokens": None, item.name: item.kind(value)})


def test_help_shows_defaults_and_how_a_switch_is_turned_off() -> None:
    shown = {item.name: item for item in flags_of(GenerateArgs)}
    assert (shown["ignore_eos"].metavar, shown["ignore_eos"].note) == ("", "")
    assert (shown["skip_special_tokens"].metavar, shown["skip_special_tokens"].note) == ("true|false", "(default true)")
    assert shown["presence_penalty"].note == "(-2 to 2; default 0)"
    assert shown["min_tokens"].note == "(at least 0; default 0)"
    assert shown["seed"].note == ""


def test_the_first_section_owns_a_shared_name() -> None:
    generate = cli.COMMANDS["generate"]
    assert generate.owners["seed"] is GenerateArgs
    assert generate.owners["model"] is EngineArgs
    assert len({item.name for item in generate.flags}) == len(generate.flags)


def test_a_preset_wins_over_defaults_only(tmp_path) -> None:
    """Also where a flag repeats the default's value."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("preset: pai\nrepeats: 7\noutput_len: 40\n")
    shown = effective(["--config", str(recipe), "--input_len", "1024"], "bench sweep")
    assert (shown["input_len"], shown["output_len"], shown["repeats"]) == (1024, 40, 7)
    assert shown["qps"] == ["2", "4", "6", "8", "10"]
    assert effective([], "bench sweep")["input_len"] == 1024


def test_defaults_of_list_flags_are_theirs() -> None:
    assert effective([], "bench sweep")["qps"] == ["1", "2", "4", "8"]
    assert effective(["--qps", "3"], "bench sweep")["qps"] == ["3"]
    assert effective([], "bench run")["qps"] == ["1"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_flags_are_declared_well(name: str) -> None:
    for item in cli.COMMANDS[name].flags:
        assert item.help.endswith("."), item.name
        assert item.group, item.name
        assert item.convert(item.default) == item.default or item.default == "", item.name


def test_hints_of_all_arguments_are_supported() -> None:
    for command in cli.COMMANDS.values():
        for cls in command.classes:
            hints = typing.get_type_hints(cls)
            assert {item.name for item in flags_of(cls)} == set(hints)


def test_a_value_that_only_bladellm_has_is_refused_with_what_to_use():
    (kv,) = [item for item in flags_of(ServingArgs) if item.name == "kv_cache_quant"]
    assert kv.convert("int8") == "int8"
    with pytest.raises(ConfigError, match="--kv_cache_quant mix_i8i4 is not supported; use int8 or int4_affine"):
        kv.convert("mix_i8i4")
