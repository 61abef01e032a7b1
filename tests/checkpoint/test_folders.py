"""The folder of checkpoints: which one is the newest, what is removed, what is damaged."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.checkpoint import folders
from hdet.checkpoint.manifest import FILE_NAME, entry_of

OLD = Path(__file__).parent.parent / "data/states/checkpoint"


def saved(folder: Path, step: int, keep: int = 2) -> Path:
    """A checkpoint with one file."""
    partial = folder / folders.start_save(folder, step)
    folders.check_token(partial)
    (partial / "data").write_bytes(b"%d" % step)
    files = {"data": entry_of(partial / "data")}
    return folder / folders.commit(partial, step, 1, files, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_checkpoint_is_found_and_the_last_ones_stay(tmp_path: Path) -> None:
    assert hdet.latest_checkpoint(tmp_path / "nothing") is None
    assert hdet.latest_checkpoint(tmp_path) is None
    for step in (10, 20, 30):
        assert hdet.latest_checkpoint(tmp_path) != saved(tmp_path, step)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]
    assert hdet.latest_checkpoint(str(tmp_path)) == tmp_path / "step-00000030"
    saved(tmp_path, 40, keep=1)
    assert names(tmp_path) == ["step-00000040"]


def test_newest_is_the_one_saved_last_also_at_an_earlier_or_equal_step(tmp_path: Path) -> None:
    saved(tmp_path, 1000)
    assert hdet.latest_checkpoint(tmp_path) != saved(tmp_path, 500)
    assert hdet.latest_checkpoint(tmp_path) == tmp_path / "step-00000500"
    again = saved(tmp_path, 500)
    assert again.name == "step-00000500-2"
    assert hdet.latest_checkpoint(tmp_path) == again


def test_what_a_killed_save_has_left_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    good = saved(tmp_path, 10)
    folders.start_save(tmp_path, 20)
    assert len(names(tmp_path)) == 2
    assert hdet.latest_checkpoint(tmp_path) == good
    saved(tmp_path, 30)
    assert names(tmp_path) == ["step-00000010", "step-00000030"]


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("data", b"3O", "the file data has other content"),
        ("data", b"3", "the file data has another length"),
        ("data", None, "the file data is missing"),
        (FILE_NAME, b"{", "the file checkpoint.json has other content"),
        (FILE_NAME, b"[]", "the file checkpoint.json has other content"),
        (FILE_NAME, b"\xff", "the file checkpoint.json has other content"),
        (FILE_NAME, None, "the file checkpoint.json is missing"),
    ],
)
def test_damaged_checkpoint_is_named_and_the_one_before_it_found(
    tmp_path: Path, file: str, content: bytes | None, why: str
) -> None:
    good, newest = saved(tmp_path, 20), saved(tmp_path, 30)
    if content is None:
        (newest / file).unlink()
    else:
        (newest / file).write_bytes(content)
    with pytest.warns(
        UserWarning, match=f"a checkpoint is skipped: .*step-00000030.*{why}"
    ) as said:
        assert hdet.latest_checkpoint(tmp_path) == good
    assert said[0].filename == __file__
    shutil.rmtree(good)
    with pytest.warns(UserWarning, match="step-00000030"):
        assert hdet.latest_checkpoint(tmp_path) is None


def test_manifest_with_a_changed_number_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 20)
    text = (saved(tmp_path, 30) / FILE_NAME).read_text()
    (tmp_path / "step-00000030" / FILE_NAME).write_text(text.replace('"step": 30', '"step": 31'))
    with pytest.warns(UserWarning, match="other content"):
        assert hdet.latest_checkpoint(tmp_path) == tmp_path / "step-00000020"


def test_checkpoint_instead_of_its_folder_is_returned_itself(tmp_path: Path) -> None:
    path = saved(tmp_path, 20)
    saved(tmp_path, 30)
    assert hdet.latest_checkpoint(path) == path
    moved = path.rename(tmp_path / "best")
    assert hdet.latest_checkpoint(str(moved)) == moved
    (moved / "data").write_bytes(b"3")
    with pytest.warns(
        UserWarning, match="a checkpoint is skipped: .*best.*data has another length"
    ):
        assert hdet.latest_checkpoint(moved) is None


def test_damaged_checkpoint_instead_of_its_folder_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, 20)
    (path / FILE_NAME).unlink()
    with pytest.warns(UserWarning, match="a checkpoint is skipped: .*checkpoint.json is missing"):
        assert hdet.latest_checkpoint(path) is None


def test_folder_with_the_name_of_a_checkpoint_may_hold_others(tmp_path: Path) -> None:
    path = saved(tmp_path / "step-00000001", 20)
    assert hdet.latest_checkpoint(path.parent) == path
    (path / "data").unlink()
    with pytest.warns(UserWarning) as said:
        assert hdet.latest_checkpoint(path.parent) is None
    assert len(said) == 1


def test_checkpoint_of_hdet_0_1_is_found(tmp_path: Path) -> None:
    """It is the folder itself."""
    folder = shutil.copytree(OLD, tmp_path / "old")
    assert hdet.latest_checkpoint(folder) == folder
    newer = saved(folder, 20)
    assert hdet.latest_checkpoint(folder) == newer
    shutil.rmtree(newer)
    (folder / ".metadata").write_bytes(b"3")
    with pytest.warns(UserWarning, match="a checkpoint is skipped: .* is no index of a checkpoint"):
        assert hdet.latest_checkpoint(folder) is None


def test_old_checkpoint_is_removed_only_after_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10)
    there: list[list[str]] = []
    remove = shutil.rmtree

    def watched(path: Path, **options: Any) -> None:
        there.append(names(tmp_path))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    saved(tmp_path, 20, keep=1)
    assert [name for name in there[-1] if not name.startswith(".")] == ["step-00000020"]
    assert names(tmp_path) == ["step-00000020"]
