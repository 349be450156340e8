import importlib.util
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from holdfast.data.digits import Digits
from holdfast.data.images import TinyImageNet
from holdfast.data.rows import Expressions, count_values
from holdfast.data.sampler import load_microbatch, sample_indices
from holdfast.data.text import MASK, MaskedText, Text, text_files
from holdfast.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(bytes(range(10)))
    (tmp_path / "b" / "c.txt").write_bytes(bytes(range(10, 13)))
    (tmp_path / "b" / "empty.txt").write_bytes(b"")
    (tmp_path / "d.py").write_bytes(bytes(range(13, 30)))
    return tmp_path


def test_windows_run_over_the_files(folder: Path) -> None:
    data = Text(str(folder), context=7)
    assert (len(data), data.num_bytes) == (4, 30)
    for index in range(4):
        x, y = data[index]
        assert x.tolist() == list(range(7 * index, 7 * index + 7))
        assert y.tolist() == list(range(7 * index + 1, 7 * index + 8))
        assert x.dtype == y.dtype == torch.int64
    with pytest.raises(IndexError):
        data[4]


def test_the_last_window_has_its_target(folder: Path) -> None:
    assert len(Text(str(folder / "a.txt"), context=9)) == 1
    assert len(Text(str(folder / "a.txt"), context=5)) == 1
    assert len(Text(str(folder / "a.txt"), context=3)) == 3


def test_paths_name_files_folders_and_globs(folder: Path) -> None:
    assert [f.name for f in text_files(str(folder))] == ["a.txt", "c.txt", "empty.txt", "d.py"]
    assert [f.name for f in text_files(str(folder / "d.py"))] == ["d.py"]
    assert [f.name for f in text_files(f"{folder}/*.txt")] == ["a.txt"]
    assert [f.name for f in text_files(f"{folder}/**/*.txt")] == ["a.txt", "c.txt", "empty.txt"]


def test_the_standard_library_is_text() -> None:
    files = text_files("stdlib")
    assert len(files) > 300
    assert list(files) == sorted(files)
    assert not any("site-packages" in f.parts or "__pycache__" in f.parts for f in files)
    data = Text("stdlib", context=64)
    assert data.num_bytes > 5_000_000
    x, y = data[len(data) - 1]
    assert torch.equal(x[1:], y[:-1])


def test_paths_that_do_not_serve_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.* names no file"):
        Text(str(folder / "nowhere"), context=4)
    with pytest.raises(ConfigError, match="holds 0 bytes"):
        Text(str(folder / "b" / "empty.txt"), context=4)
    with pytest.raises(ConfigError, match="holds 10 bytes, expected at least 11"):
        Text(str(folder / "a.txt"), context=10)
    with pytest.raises(ConfigError, match="expected at least 1"):
        Text(str(folder), context=0)


def test_a_file_that_became_shorter_is_noticed(folder: Path) -> None:
    data = Text(str(folder), context=7)
    (folder / "a.txt").write_bytes(b"x")
    with pytest.raises(ConfigError, match="became shorter"):
        data[0]


def test_digits() -> None:
    data = Digits()
    x, y = data[5]
    assert len(data) == 1797
    assert (tuple(x.shape), x.dtype, tuple(y.shape), y.dtype) == ((1, 8, 8), torch.float32, (), torch.int64)
    assert 0.0 <= float(x.min()) < float(x.max()) <= 1.0


def test_digits_are_those_of_the_package() -> None:
    from sklearn.datasets import load_digits

    theirs, ours = load_digits(), Digits()
    pairs = [ours[index] for index in range(len(ours))]
    assert torch.equal(torch.stack([x for x, _ in pairs]).squeeze(1), torch.from_numpy(theirs.images).float() / 16.0)
    assert torch.equal(torch.stack([y for _, y in pairs]), torch.from_numpy(theirs.target))


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs scikit-learn"):
        Digits()


def test_digits_that_are_not_where_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None, is_package=True))
    with pytest.raises(ConfigError, match="has no"):
        Digits()


def test_every_epoch_covers_each_sample_once() -> None:
    length, drawn = 35, []
    for step in range(7):
        for microbatch in range(3):
            drawn += sample_indices(1, step, microbatch, 3, 5, length)
    epochs = [drawn[i : i + length] for i in range(0, 105, length)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_samples_are_a_pure_function() -> None:
    assert sample_indices(3, 2, 1, 4, 6, 100) == sample_indices(3, 2, 1, 4, 6, 100)
    assert sample_indices(3, 2, 1, 4, 6, 100) != sample_indices(4, 2, 1, 4, 6, 100)
    state = torch.get_rng_state()
    sample_indices(3, 9, 1, 4, 6, 100)
    assert torch.equal(state, torch.get_rng_state())


def test_a_micro_batch_may_be_larger_than_the_dataset() -> None:
    assert sorted(sample_indices(0, 0, 0, 1, 9, 3)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with pytest.raises(ConfigError, match="empty"):
        sample_indices(0, 0, 0, 1, 1, 0)


def test_micro_batches_are_stacked(folder: Path) -> None:
    data = Text(str(folder), context=7)
    x, y = load_microbatch(data, seed=0, step=0, microbatch=1, num_microbatches=2, microbatch_size=2)
    assert tuple(x.shape) == tuple(y.shape) == (2, 7)
    assert x[:, 0].tolist() == [7 * i for i in sample_indices(0, 0, 1, 2, 2, 4)]


def test_the_fingerprint_of_text_knows_sizes_and_looks_everywhere(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(bytes(range(256)) * 4096)
    before = Text(str(tmp_path), context=4).fingerprint()
    assert Text(str(tmp_path), context=8).fingerprint() == before
    for at in (0, 500_000, 1_000_000):
        for file in files:
            data = bytearray(bytes(range(256)) * 4096)
            data[at : at + 40_000] = bytes(min(40_000, len(data) - at))
            file.write_bytes(data)
            assert Text(str(tmp_path), context=4).fingerprint() != before
            file.write_bytes(bytes(range(256)) * 4096)
    assert Text(str(tmp_path), context=4).fingerprint() == before
    files[1].write_bytes(b"short")
    assert Text(str(tmp_path), context=4).fingerprint() != before


def test_masked_text_asks_for_a_few_bytes_of_each_window(folder: Path) -> None:
    (folder / "long.txt").write_bytes(bytes(range(97, 123)) * 400)
    plain, masked = Text(str(folder / "long.txt"), context=20), MaskedText(str(folder / "long.txt"), context=20)
    assert (len(masked), masked.fingerprint(), masked.vocab) == (len(plain), plain.fingerprint(), 257)
    torch.manual_seed(3)
    kinds: Counter[str] = Counter()
    for index in range(len(masked)):
        tokens, target = masked[index]
        there, _ = plain[index]
        asked = target != -100
        assert int(asked.sum()) == 3, "15 % of 20"
        assert torch.equal(target[asked], there[asked])
        assert torch.equal(tokens[~asked], there[~asked])
        for token, was in zip(tokens[asked].tolist(), there[asked].tolist(), strict=True):
            kinds["mask" if token == MASK else "same" if token == was else "other"] += 1
    shares = [kinds[kind] / kinds.total() for kind in ("mask", "other", "same")]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.03)


def test_masks_are_drawn_from_the_seeded_generator(folder: Path) -> None:
    data = MaskedText(str(folder), context=4)
    drawn = []
    for seed in (1, 1, 2, 3, 4, 5):
        torch.manual_seed(seed)
        drawn.append([each.tolist() for each in data[0]])
    assert drawn[0] == drawn[1]
    assert any(drawn[0] != other for other in drawn[2:])
    assert all(len([each for each in target if each != -100]) == 1 for _, target in drawn), "at least one"


def test_expressions_are_divided_by_the_largest_of_their_gene(tmp_path: Path) -> None:
    file = tmp_path / "nt.csv"
    file.write_text("1,2,-8,0\n0,-4,4,0\n")
    data = Expressions(str(file))
    assert [(values.tolist(), int(label)) for values, label in (data[0], data[1])] == [
        ([[0.5, -1.0, 0.0]], 1),
        ([[-1.0, 0.5, 0.0]], 0),
    ]
    assert count_values(str(file)) == 3


@pytest.mark.parametrize("text", ["", "2,1,1\n", "1\n", "1,x\n", "1,2\n1,2,3\n"])
def test_what_is_no_file_of_nt3_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "nt.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"data\.path: .*nt\.csv"):
        Expressions(str(file))
    with pytest.raises(ConfigError, match="there is no such file"):
        count_values(str(tmp_path / "missing.csv"))


def test_tinyimagenet_has_a_class_for_each_folder(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, (name, mode) in enumerate((("n02", "L"), ("n01", "RGB"))):
        folder = tmp_path / "train" / name / "images"
        folder.mkdir(parents=True)
        image.new(mode, (64, 64), (255 * number,) * 3 if mode == "RGB" else 0).save(folder / "0.JPEG")
    data = TinyImageNet(str(tmp_path))
    assert [(tuple(pixels.shape), int(label)) for pixels, label in data] == [((3, 64, 64), 0), ((3, 64, 64), 1)]
    assert data[0][0][0, 0, 0] == pytest.approx((1 - 0.485) / 0.229, abs=0.02)
    assert data[1][0][0, 0, 0] == pytest.approx(-0.485 / 0.229, abs=0.02)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected images in train/CLASS/images"):
        TinyImageNet(str(tmp_path))
