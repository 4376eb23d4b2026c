"""Adapters are found by given names and below the root alone; whatever leads elsewhere is refused, nothing opened."""

import pytest

from bladellm_runtime.errors import ConfigError, ParameterError
from bladellm_runtime.lora.names import AdapterNames, parse_modules
from tests.support.fake_adapters import save_fake_adapter


@pytest.fixture
def root(tmp_path):
    for name in ("allowed/one", "allowed/deep/two", "outside"):
        save_fake_adapter(tmp_path / name)
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "allowed" / "inner").symlink_to(tmp_path / "allowed" / "one")
    (tmp_path / "allowed" / "loop").symlink_to(tmp_path / "allowed" / "loop")
    (tmp_path / "allowed" / "file").write_text("x")
    return tmp_path


def test_names_and_paths_below_the_root(root):
    names = AdapterNames({"given": root / "outside"}, root / "allowed")
    assert names.find("given").folder == root / "outside"
    assert names.find("one").folder == root / "allowed" / "one"
    assert names.find("deep/two").folder == root / "allowed" / "deep" / "two"
    assert names.find(str(root / "allowed" / "one")).key == names.find("one").key == names.find("inner").key
    for unknown in ("", "three", "file", "one\0", "x" * 5000):
        assert names.find(unknown) is None


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "one/../../outside",
        "link",
        "loop",
        "/etc",
        "..",
        ".",
        "~/x",
        "http://host/x",
        "file:///etc",
        "a\\b",
    ],
)
def test_what_leads_out_is_refused(root, name, monkeypatch):
    def opened(*_, **__):
        raise AssertionError("something was opened")

    monkeypatch.setattr("builtins.open", opened)
    for names in (AdapterNames({}, root / "allowed"), AdapterNames({}, None)):
        if names.root is None and name in ("link", "loop", "."):
            assert names.find(name) is None
            continue
        with pytest.raises(ParameterError, match="--lora_dir") as caught:
            names.find(name)
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
        assert str(root) not in str(caught.value)


def test_without_a_root_only_given_names(root):
    names = AdapterNames({"given": root / "outside"}, None)
    assert names.find("given") is not None
    assert names.find("one") is None


def test_modules_are_names_and_folders(root):
    assert parse_modules([f"a={root}/outside", f"b={root}/allowed/one"]) == {
        "a": root / "outside",
        "b": root / "allowed" / "one",
    }
    for wrong in (["a"], ["=x"], ["a="], [f"a={root}", f"a={root}"], [f"a={root}/nothing"], [f"a={root}"]):
        with pytest.raises(ConfigError, match="--lora_modules"):
            parse_modules(wrong)
