"""The study's scenes of images: every image once per epoch, a transformer learns them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch

from benchmarks.convergence import vision
from benchmarks.convergence.setting import Setting

needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


def setting(**changes):
    values = {
        **{"scene": "vision", "method": "adamw", "workers": 2, "batch": 16, "sequence": 0},
        **{"hidden": 64, "layers": 2, "steps": 200, "lr": 3e-3, "weight_decay": 1e-3},
        **{"betas": (0.9, 0.99), "schedule": "cosine", "seed": 0, "evaluations": 1},
    }
    return Setting(**{**values, **changes})


def some_images(count=40, side=8):
    """Images of which each has a value of its own."""
    pixels = torch.arange(float(count)).view(-1, 1, 1, 1).expand(-1, 3, side, side)
    part = vision.Batch(pixels, torch.arange(count) % 10)
    return vision.Images(train=part, held_out=part, patch=2)


class Some(vision.Digits):
    source = staticmethod(some_images)


class SomeOfCifar(vision.Cifar10):
    source = staticmethod(some_images)


def seen(scene, worker, steps, seed=1):
    batches = [scene.batch(worker, step, seed) for step in steps]
    for batch in batches:
        assert batch.labels.tolist() == [value % 10 for value in batch.pixels[:, 0, 0, 0]]
    return [int(value) for batch in batches for value in batch.pixels[:, 0, 0, 0]]


def test_a_worker_sees_every_image_once_per_epoch_in_an_order_of_its_own():
    # Scenes are shared by runs with any number of workers, which they are not told.
    scene = Some(setting(batch=5, workers=0))
    orders = {}
    for seed in (0, 1):
        for worker in (0, 1):
            for epoch in range(3):
                order = seen(scene, worker, range(8 * epoch, 8 * epoch + 8), seed)
                assert sorted(order) == list(range(40))
                orders[seed, worker, epoch] = tuple(order)
    assert len(set(orders.values())) == len(orders)
    assert tuple(seen(scene, 1, range(8))) == orders[1, 1, 0]


def test_a_batch_reaches_into_the_next_epoch():
    scene = Some(setting(batch=24))
    assert sorted(seen(scene, 0, range(5))) == sorted([*range(40)] * 3)


def test_cifars_images_are_moved_and_mirrored_alike_on_every_run():
    scene = SomeOfCifar(setting(batch=8))
    pixels = torch.arange(64.0).view(1, 1, 8, 8).expand(200, 3, 8, 8)
    first, again = (scene.augmented(pixels, vision.generator(0, 1)) for _ in "12")
    assert torch.equal(first, again)
    assert first.shape == pixels.shape
    # Unmoved and unmirrored is one in 162; 9 x 9 moves, each of them mirrored or not.
    distinct = {tuple(image[0].flatten().tolist()) for image in first}
    assert 80 < len(distinct) <= 162
    inside = first[(first != 0).sum((1, 2, 3)) >= 3 * 63]
    rows = inside[:, 0, 0, :]
    steps = (rows[:, 1:] - rows[:, :-1]).unique().tolist()
    assert set(steps) <= {-1.0, 1.0}


def test_the_papers_transformer_is_six_layers_of_eight_heads():
    images = some_images(count=2, side=32)
    images = vision.Images(train=images.train, held_out=images.held_out, patch=4)
    model = vision.vision_transformer(images, hidden=512, layers=6, seed=0)
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (6, 8)
    assert (config.hidden_size, config.intermediate_size, config.num_labels) == (512, 512, 10)
    assert model(pixel_values=images.train.pixels).logits.shape == (2, 10)
    assert vision.Cifar10.grids["lion"] == (5e-5, 1e-3, 5e-3, 1e-2)


def test_a_width_that_heads_cannot_share_is_refused():
    with pytest.raises(ValueError, match="hidden=20 must be a multiple of 8"):
        vision.vision_transformer(some_images(), hidden=20, layers=1, seed=0)


@pytest.mark.full
@needs_sklearn
def test_digits_are_learned():
    scene = vision.Digits(setting())
    model = scene.model(0)
    assert all(map(torch.equal, model.parameters(), scene.model(0).parameters()))
    assert scene.validation(model) == pytest.approx(2.3, abs=0.2)  # ln 10: it knows nothing
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        for worker in range(2):
            (scene.loss(model, scene.batch(worker, step, 0)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert scene.validation(model) < 0.6
    assert scene.metrics(model)["accuracy"] > 0.85
    assert model.training


@needs_sklearn
def test_held_out_digits_are_not_in_the_training_part():
    images = vision.digits()
    assert (len(images.train.labels), len(images.held_out.labels)) == (1438, 359)
    assert images.train.pixels.shape == (1438, 1, 8, 8)
    assert images.train.pixels.min() == -1.0
    assert images.train.pixels.max() == 1.0
    assert images.held_out.labels.bincount(minlength=10).min() > 20


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    vision.digits.cache_clear()
    with pytest.raises(ImportError, match=r"pip install scikit-learn$"):
        vision.Digits(setting())


def test_out_of_reach_cifar_names_the_data_set_and_the_other_scene(monkeypatch):
    def unreachable(name):
        raise ConnectionError(f"Couldn't reach {name}")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ConnectionError, match=r'uoft-cs/cifar10.*"vision"'):
        vision.Cifar10(setting(scene="cifar10"))


def test_cifars_rows_become_images(monkeypatch):
    from datasets import Array3D, ClassLabel, Dataset, DatasetDict, Features

    features = Features(
        {"img": Array3D(shape=(32, 32, 3), dtype="uint8"), "label": ClassLabel(num_classes=10)}
    )
    image = [[[0, 255, 3 * row + column] for column in range(32)] for row in range(32)]
    rows = {"img": [image] * 3, "label": [1, 2, 3]}
    part = Dataset.from_dict(rows, features=features)
    data = DatasetDict({"train": part, "test": part})
    monkeypatch.setattr("datasets.load_dataset", lambda name: data)
    vision.cifar10.cache_clear()
    images = vision.cifar10()
    vision.cifar10.cache_clear()
    assert images.train.pixels.shape == (3, 3, 32, 32)
    expected = torch.tensor([-1.0, 1.0, (3 * 5 + 7) / 127.5 - 1.0])
    torch.testing.assert_close(images.train.pixels[0, :, 5, 7], expected)
    assert images.train.labels.tolist() == [1, 2, 3]
