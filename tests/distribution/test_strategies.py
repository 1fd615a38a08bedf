"""Errors of the strategies. Other files here test their effects."""

import jax
import keras
import pytest

import keras_posttrain as kpt
from keras_posttrain import optimizers
from keras_posttrain.distribution import mesh, strategies, topology

DEVICES = [f"cpu:{i}" for i in range(8)]


@pytest.fixture
def eight(monkeypatch):
    """Eight devices by name: a mesh is made of names alone."""
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: DEVICES)


def shape(made):
    names, sizes = made.device_mesh.axis_names, made.device_mesh.shape
    return dict(zip(names, sizes))


def test_axes_and_sizes(eight):
    devices = DEVICES
    made = kpt.distribution.data_parallel(devices=devices)
    assert shape(made) == {"batch": 8}
    made = kpt.distribution.fsdp(devices=devices)
    assert shape(made) == {"batch": 8} and made.shard_over_data
    made = kpt.distribution.tensor_parallel(devices=devices)
    assert shape(made) == {"batch": 1, "model": 8}
    made = kpt.distribution.tensor_parallel(model=4, devices=devices)
    assert shape(made) == {"batch": 2, "model": 4}
    assert not made.shard_over_data
    for sizes in ({"data": 4}, {"model": 2}, {"data": 4, "model": 2}):
        made = kpt.distribution.fsdp_tensor_parallel(**sizes, devices=devices)
        assert shape(made) == {"batch": 4, "model": 2}
        assert made.batch_dim_name == "batch" and made.shard_over_data
    assert made.device_mesh.devices.tolist() == [
        devices[i : i + 2] for i in range(0, 8, 2)
    ]
    for sizes in ({"experts": 4}, {"data": 2, "experts": None}):
        made = kpt.distribution.fsdp(**sizes, devices=devices)
        assert shape(made) == {"batch": 8}
        assert made.expert_mesh.axis_names == ["replica", "expert"]
        assert made.expert_mesh.devices.tolist() == [devices[:4], devices[4:]]
    for sizes in ({"context": 4}, {"data": 2, "context": None}):
        made = kpt.distribution.fsdp(**sizes, devices=devices)
        assert shape(made) == {"batch": 8}
        assert made.context_mesh.axis_names == ["rows", "context"]
        assert made.context_mesh.devices.tolist() == [devices[:4], devices[4:]]
        layout = made.get_data_layout((6, 100))
        assert tuple(layout.axes) == ("rows", None)
    made = kpt.distribution.hybrid(2, devices=devices)
    assert shape(made) == {"slice": 2, "batch": 4} and made.shard_over_data
    assert made.row_axes == ("slice", "batch")
    assert made.get_data_layout((16, 3)).axes == (made.row_axes, None)
    made = kpt.distribution.hybrid(2, model=2, devices=devices[:4])
    assert shape(made) == {"slice": 2, "batch": 1, "model": 2}


def test_what_is_tried_first():
    """FSDP, or FSDP within each slice; then with tensor parallelism."""
    found = strategies.of_topology(topology.get("v5e:2x4 x 2"))
    meshes = [
        shape(made(devices=topology.get("v5e:2x4 x 2").devices))
        for made in found
    ]
    assert meshes == [
        {"slice": 2, "batch": 8},
        {"slice": 2, "batch": 4, "model": 2},
        {"slice": 2, "batch": 2, "model": 4},
        {"batch": 16},
    ]
    first = strategies.of_topology(topology.get("v5e:2x4"))[0]
    assert first is kpt.distribution.fsdp


def test_slices_are_those_of_the_devices():
    """Chips of a slice stay together, in whatever order they are given."""
    devices = list(topology.get("v5e:2x2 x 2").devices)
    assert [d.slice_index for d in devices] == [0] * 4 + [1] * 4
    made = kpt.distribution.hybrid(devices=devices[::2] + devices[1::2])
    assert shape(made) == {"slice": 2, "batch": 4}
    grid = made.device_mesh.devices
    assert [{d.slice_index for d in row} for row in grid] == [{0}, {1}]
    # A device of a laptop is one.
    alone = kpt.distribution.hybrid(devices=DEVICES[:1])
    assert shape(alone) == {"slice": 1, "batch": 1}
    # A slice may be divided further, but not made of parts of two.
    made = kpt.distribution.hybrid(4, devices=devices)
    assert shape(made) == {"slice": 4, "batch": 2}
    for slices, given in ((1, devices), (3, devices), (None, devices[1:])):
        with pytest.raises(ValueError, match="slice.*Received:"):
            kpt.distribution.hybrid(slices, devices=given)


@pytest.mark.parametrize(
    "make, parts",
    [
        (lambda d: d.fsdp(16, devices=DEVICES), ["data=16", "8 devices"]),
        (lambda d: d.fsdp(4, devices=DEVICES), ["batch=4", "[:4]"]),
        (lambda d: d.fsdp(0, devices=DEVICES), ["data=0", "positive"]),
        (lambda d: d.fsdp(2.0, devices=DEVICES), ["data=2.0", "positive"]),
        (
            lambda d: d.fsdp(experts=3, devices=DEVICES),
            ["experts=3", "8 devices", "not a divisor"],
        ),
        (
            lambda d: d.fsdp(2, experts=2, devices=DEVICES),
            ["batch=2 * expert=2", "which is 4", "[:4]"],
        ),
        (
            lambda d: d.fsdp(experts=0, devices=DEVICES),
            ["experts=0", "positive"],
        ),
        (
            lambda d: d.fsdp(context=3, devices=DEVICES),
            ["context=3", "8 devices", "not a divisor"],
        ),
        (
            lambda d: d.fsdp(2, context=2, devices=DEVICES),
            ["batch=2 * context=2", "which is 4", "[:4]"],
        ),
        (
            lambda d: d.fsdp(context=0, devices=DEVICES),
            ["context=0", "positive"],
        ),
        (
            lambda d: d.fsdp(experts=2, context=4, devices=DEVICES),
            ["experts=2, context=4", "one of them must be 1"],
        ),
        (lambda d: d.fsdp(devices=[]), ["devices=[]", "list_devices()"]),
        (lambda d: d.fsdp(devices=["cpu:0"] * 2), ["different"]),
        (lambda d: d.fsdp(devices=["tpu:9"]), ["tpu:9"]),
        (lambda d: d.data_parallel(devices=["tpu:9"]), ["tpu:9"]),
        (
            lambda d: d.tensor_parallel(model=3, devices=DEVICES),
            ["model=3", "8 devices", "not a divisor"],
        ),
        (
            lambda d: d.fsdp_tensor_parallel(4, 4, devices=DEVICES),
            ["data=4 * model=4", "8 devices", "too many"],
        ),
        (
            lambda d: d.fsdp_tensor_parallel(2, 2, devices=DEVICES),
            ["batch=2 * model=2", "which is 4", "8 devices"],
        ),
        (lambda d: d.fsdp_tensor_parallel(), ["`data` or `model`"]),
        (
            lambda d: d.hybrid(devices=DEVICES),
            ["slices=None", "8 devices", "do not report"],
        ),
        (lambda d: d.hybrid(3, devices=DEVICES), ["slices=3", "8 devices"]),
        (lambda d: d.hybrid(0, devices=DEVICES), ["slices=0", "positive"]),
        (lambda d: d.hybrid(True, devices=DEVICES), ["slices=True"]),
        (
            lambda d: d.hybrid(2, model=3, devices=DEVICES),
            ["model=3", "4 devices", "not a divisor"],
        ),
    ],
)
def test_bad_sizes(eight, make, parts):
    with pytest.raises(ValueError) as e:
        make(kpt.distribution)
    for part in parts:
        assert part in str(e.value), str(e.value)


def test_all_devices_are_the_default():
    made = mesh.make_mesh({"batch": None, "model": 1})
    names = keras.distribution.list_devices()
    assert made.shape == (len(names), 1)
    assert sorted(made.devices.flatten().tolist()) == sorted(names)
    assert made.backend_mesh.devices.size == jax.device_count()


def test_a_large_weight_that_cannot_be_split(eight):
    made = kpt.distribution.fsdp(devices=DEVICES)
    with keras.device("cpu:0"):
        value = keras.Variable(jax.numpy.zeros((1021, 1031)), name="kernel")
    with pytest.raises(ValueError, match="(?s)kernel.*1021, 1031.*8 devices"):
        made.get_variable_layout(value)


def test_an_optimizer_made_too_early():
    early = keras.optimizers.SGD(0.1, name="early")
    with kpt.distribution.fsdp().scope():
        optimizers.check(keras.optimizers.SGD(0.1))
        with pytest.raises(ValueError, match="set_distribution.*'early'"):
            optimizers.check(early)
    optimizers.check(early)
