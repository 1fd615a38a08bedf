"""Weights go straight into their shards, and from there into files."""

import jax
import keras
import numpy as np
import pytest

from keras_posttrain.models import presets
from keras_posttrain.models.hf import checkpoint_files
from keras_posttrain.models.hf.export import export
from tests.distribution.runs import filled_adapter, mesh
from tests.support import REFERENCE, run_on_eight_devices

pytestmark = pytest.mark.usefixtures("eight_devices")
MODELS = REFERENCE / "models"
DIRECTORIES = sorted(p.name for p in MODELS.iterdir())


def some(names):
    """These families in CI, all others in `make test-full`."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.full)
        for name in DIRECTORIES
    ]


def models(preset, meshes, **kwargs):
    """The model on one device, then on each mesh: `(name, model)`."""
    for name in (None, *meshes):
        keras.distribution.set_distribution(mesh(name))
        yield name, presets.load_causal_lm(preset, **kwargs)


def check_values(preset, meshes, **kwargs):
    """Every variable, bit for bit, and where it is placed."""
    want = None
    for name, model in models(preset, meshes, **kwargs):
        got = [np.asarray(v.value) for v in model.variables]
        want = want or got
        for v, x, y in zip(model.variables, got, want, strict=True):
            assert x.dtype == v.value.dtype == jax.numpy.dtype(v.dtype)
            assert x.tobytes() == y.tobytes(), (name, v.path)
            if name:
                distribution = keras.distribution.distribution()
                layout = distribution.get_variable_layout(v).backend_layout
                placed = v.value.sharding
                assert placed.is_equivalent_to(layout, v.ndim), (name, v.path)
                assert v._layout.backend_layout == layout
        # What KerasHub compiles has values too.
        state = [*model.optimizer.variables, *model.sampler.variables]
        assert all(isinstance(v._value, jax.Array) for v in state)
        assert model.kpt_repairs is not None


# The others have the layers of one of these, with other numbers.
FAMILIES = ["gemma2", "gemma3_text", "llama3", "llama3_tied", "mistral"]
FAMILIES += ["qwen2", "qwen3", "qwen3_reward"]


@pytest.mark.parametrize("family", some(FAMILIES))
def test_every_family_loads_on_meshes_as_on_one_device(family):
    check_values(MODELS / family, ["4x2"])
    check_values(MODELS / family, ["2x4"], dtype="bfloat16")


@pytest.mark.parametrize("family", some(["gemma2", "qwen2"]))
def test_families_load_on_one_axis(family):
    check_values(MODELS / family, ["1x8", "dp"])


def same_files(one, other):
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in other.iterdir())
    for name in names:
        same = (one / name).read_bytes() == (other / name).read_bytes()
        assert same, name


@pytest.mark.parametrize("family", some(["gemma2", "qwen2"]))
def test_files_from_a_mesh_are_those_of_one_device(tmp_path, family):
    """Byte for byte; merged weights are sums, equal to rounding."""
    merged = {}
    for name, model in models(MODELS / family, ["4x2"]):
        out = tmp_path / str(name)
        out.mkdir()
        export(model, out / "plain", max_shard_bytes=100_000)
        export(model, out / "half", dtype="bfloat16")
        adapter = filled_adapter(model)
        adapter.save(out / "adapter")
        values = adapter.merged_values()
        for pair in adapter.pairs:
            kernel = pair.layer.kernel
            placed = values(kernel).sharding
            assert placed.is_equivalent_to(kernel.value.sharding, kernel.ndim)
        export(model, out / "merged", values=values)
        tensors = checkpoint_files.Reader(out / "merged")
        merged[name] = {x: tensors.get(x) for x in tensors.shapes}
        before = [np.asarray(v.value) for v in adapter.variables]
        for v in adapter.variables:
            v.assign(np.zeros(v.shape, "float32"))
        adapter.load(out / "adapter")
        for v, x in zip(adapter.variables, before, strict=True):
            assert (np.asarray(v.value) == x).all()
            if name:
                layout = v._layout.backend_layout
                assert v.value.sharding.is_equivalent_to(layout, 2)
    for kind in ("plain", "half", "adapter"):
        same_files(tmp_path / "None" / kind, tmp_path / "4x2" / kind)
    for name, x in merged[None].items():
        y = merged["4x2"][name]
        np.testing.assert_allclose(x, y, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("family", some(["llama3"]))
def test_a_preset_from_a_mesh_is_that_of_one_device(tmp_path, family):
    """KerasHub's format: written from a mesh, and read on others."""
    for name, model in models(MODELS / family, ["4x2"]):
        presets.save_to_preset(model, tmp_path / str(name))
    keras.distribution.set_distribution(None)
    one, other = (
        [np.asarray(v.value) for v in presets.load_causal_lm(p).variables]
        for p in (tmp_path / "None", tmp_path / "4x2")
    )
    assert all((x == y).all() for x, y in zip(one, other, strict=True))
    check_values(tmp_path / "4x2", ["1x8"])


def test_host_memory(tmp_path):
    """In a process of its own, whose peaks are those of this test alone."""
    script = "tests.distribution.host_memory"
    run_on_eight_devices(script, str(tmp_path))
