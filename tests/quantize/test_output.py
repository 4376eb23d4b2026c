"""Where a result may go, and what is said when it cannot."""

import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from bladellm_runtime.errors import CheckpointError, ConfigError, UserError
from bladellm_tools.quantize.job import Progress
from bladellm_tools.quantize.pipeline import output as output_module
from bladellm_tools.quantize.pipeline.files import file_digest, tensor_bytes, write_file
from bladellm_tools.quantize.pipeline.publish import small_files
from bladellm_tools.quantize.pipeline.run import quantize_model
from tests.quantize.jobs import Steps, digests, job_of, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float") / "model"
    save_model(folder)
    return folder


def run(model, output, **options):
    steps = Steps()
    return quantize_model(job_of(model, output, "minmax", windows=None, **options), steps), steps


def test_an_empty_folder_and_missing_parents_are_fine(model, tmp_path):
    (tmp_path / "empty").mkdir()
    run(model, tmp_path / "empty")
    run(model, tmp_path / "some" / "where" / "else")
    assert digests(tmp_path / "empty") == digests(tmp_path / "some" / "where" / "else")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "some"}


def test_a_link_to_a_folder_is_followed(model, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    run(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").exists()


def test_a_folder_with_files_is_refused_before_any_work(model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="is not empty; give a folder that is empty or does not exist"):
        run(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="is not empty"):
        run(model, tmp_path / "out", resume=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]


def test_a_mount_point_is_refused_before_any_work(model, tmp_path, monkeypatch):
    """A rename onto it would fail, at the end."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    with pytest.raises(ConfigError, match="is a mount point, which cannot be replaced; give a folder in it"):
        run(model, tmp_path / "disk")


def test_a_file_is_refused(model, tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        run(model, tmp_path / "out")


@pytest.mark.parametrize("inside", [".", "quantized", "../model"])
def test_the_model_folder_is_refused(inside, model):
    before = digests(model)
    with pytest.raises(ConfigError, match="in the model's own folder"):
        run(model, model / inside)
    assert digests(model) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(model, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match=r"cannot be written: Permission denied; give --output_dir a folder"):
        run(model, tmp_path / "locked" / "out")


def test_a_parent_that_is_a_file_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot be written: Not a directory"):
        run(model, tmp_path / "file" / "out")


def test_a_name_too_long_for_the_unfinished_folder_is_refused(model, tmp_path):
    with pytest.raises(UserError, match=r"cannot be used \(File name too long\)"):
        run(model, tmp_path / ("a" * 250))


def test_too_small_a_disk_is_refused_before_any_work(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(output_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"its disk has 0.00 GiB free; free some space, then go on with --resume"):
        run(model, tmp_path / "out")
    monkeypatch.undo()
    run(model, tmp_path / "out", resume=True)


def test_only_small_files_of_known_kinds_go_along(model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    names = ["tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    others = [
        "x.bin",
        "model.safetensors.index.json",
        "code.py",
        "training_args.pt",
        "quantize_report.json",
        "other.model",
    ]
    for name in names + others:
        (folder / name).write_text(name)
    (folder / "folder.json").mkdir()
    expected = {*names, "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in small_files(folder)} == expected


def test_links_out_of_the_model_folder_are_refused(model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (tmp_path / "secret.txt").write_text("x")
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(CheckpointError, match=r"notes.txt is a link out of the model folder"):
        quantize_model(job_of(folder, tmp_path / "out", "minmax", windows=None), Progress())


def test_files_are_replaced_whole(tmp_path):
    path = tmp_path / "file"
    write_file(path, b"one")
    first = file_digest(path)
    path_stat = path.stat().st_ino
    write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_ino != path_stat
    assert file_digest(path) != first
    assert file_digest(tmp_path / "none") is None
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_views_of_one_tensor_can_be_stored():
    whole = torch.randn(6, 4)
    data = tensor_bytes({"a": whole[:3], "b": whole[3:], "c": whole.t()})
    read = safetensors.torch.load(data)
    assert torch.equal(read["a"], whole[:3])
    assert torch.equal(read["b"], whole[3:])
    assert torch.equal(read["c"], whole.t())
