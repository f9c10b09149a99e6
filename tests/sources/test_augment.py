import pytest
import torch
from torch.func import vmap

from undrift.core.random import bits, fold, integers
from undrift.errors import ConfigError, DataError
from undrift.sources import augment

KEY = fold(3, "augment", 7)


def pictures(batch=64, channels=3, size=32):
    draws = bits(fold(0, "pictures"), torch.arange(batch * channels * size * size)) % 1000
    return draws.view(batch, channels, size, size).float() + 1  # never 0


def longhand(x, key, pad=4):
    """The recipe one picture at a time."""
    made = []
    for i, picture in enumerate(x):
        if bits(fold(key, "flip"), i) < 2**62:
            picture = picture.flip(-1)
        if bits(fold(key, "crop"), i) < 2**62:
            down, right = (
                int(integers(fold(key, side), i, -pad, pad + 1)) + pad for side in ("down", "right")
            )
            big = torch.nn.functional.pad(picture, (pad,) * 4)
            picture = big[:, down : down + x.shape[2], right : right + x.shape[3]]
        made.append(picture)
    return torch.stack(made)


@pytest.mark.parametrize("shape", [(64, 3, 32), (5, 1, 28), (1, 2, 3)])
def test_equals_the_recipe_one_picture_at_a_time(shape):
    x = pictures(*shape)
    assert torch.equal(augment(x, KEY), longhand(x, KEY))


def test_pictures_need_not_be_square():
    x = pictures(8)[..., :20]
    assert torch.equal(augment(x, KEY), longhand(x, KEY))


def test_half_are_flipped_and_half_are_cropped():
    x = pictures(4000, 1, 6)
    flipped = (augment(x, KEY, crop=0) == x.flip(-1)).flatten(1).all(1)
    moved = (augment(x, KEY, flip=0) != x).flatten(1).any(1)
    assert 0.45 < flipped.float().mean() < 0.55
    assert 0.45 < moved.float().mean() * 81 / 80 < 0.55
    assert 0.2 < (flipped & moved).float().mean() < 0.3  # independent


def test_every_offset_occurs():
    x = torch.arange(1.0, 401.0).view(1, 1, 20, 20).expand(4000, -1, -1, -1)
    middle = augment(x, KEY, flip=0, crop=1)[:, 0, 10, 10]
    assert len(middle.unique()) == 81


def test_zero_chances_change_nothing_and_a_pad_of_zero_does_not_move():
    x = pictures(6)
    assert torch.equal(augment(x, KEY, flip=0, crop=0), x)
    assert torch.equal(augment(x, KEY, flip=0, crop=1, pad=0), x)


def test_a_row_depends_on_its_place_alone():
    x = pictures(8)
    assert torch.equal(augment(x[:5], KEY), augment(x, KEY)[:5])
    assert not torch.equal(augment(x, KEY), augment(x, fold(3, "augment", 8)))


def test_clients_at_once_are_the_clients_one_by_one():
    x = pictures(12).view(3, 4, 3, 32, 32)
    keys = fold(1, "augment", torch.arange(3))
    together = vmap(augment)(x, keys)
    assert torch.equal(together, torch.stack([augment(a, k) for a, k in zip(x, keys, strict=True)]))


def test_the_type_stays_and_no_generator_moves():
    before = torch.get_rng_state()
    assert augment(pictures(2).double(), KEY).dtype == torch.float64
    assert augment(pictures(2).to(torch.uint8), KEY).dtype == torch.uint8
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_takes_the_same_decisions():
    x = pictures()
    assert torch.equal(augment(x.cuda(), KEY.cuda()).cpu(), augment(x, KEY))


@pytest.mark.parametrize(
    ("x", "settings", "error"),
    [
        (torch.zeros(3, 8, 8), {}, DataError),
        (torch.zeros(1, 3, 8, 8), {"flip": 1.5}, ConfigError),
        (torch.zeros(1, 3, 8, 8), {"crop": float("nan")}, ConfigError),
        (torch.zeros(1, 3, 8, 8), {"pad": -1}, ConfigError),
    ],
)
def test_mistakes_are_named(x, settings, error):
    with pytest.raises(error, match="augment"):
        augment(x, KEY, **settings)
