"""`Trace` writes the spans of some steps, and JAX's profile of them."""

import asyncio
import json

import jax
import pytest

import keras_posttrain as kpt
from keras_posttrain import _spans
from keras_posttrain.callbacks.trace import events
from tests.callbacks.test_report import PROMPTS, fit_rows, grpo


def read(path):
    found = json.loads(path.read_text())["traceEvents"]
    return [x for x in found if x["ph"] == "X"]


def test_the_steps_of_rollouts(tmp_path):
    """The trace begins before the rollout of its first step."""
    grpo().fit(
        PROMPTS,
        batch_size=2,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[kpt.callbacks.Trace(tmp_path, steps=(3, 6))],
    )
    found = read(tmp_path / "trace" / "steps_3_6.json")
    steps = [x for x in found if x["name"].startswith("step ")]
    assert [x["name"] for x in steps] == [f"step {i}" for i in range(3, 7)]
    names = [x["name"] for x in found]
    assert names.count("rollout") == 2 and names.count("train") == 4
    ends = {x["name"]: x["ts"] + x["dur"] for x in steps}
    for x in found:
        if x["name"] == "rollout":
            # Steps 3 and 5 are the first of their rollouts.
            assert 0 <= x["ts"] and x["ts"] + x["dur"] < ends["step 5"]
    assert (tmp_path / "trace" / "steps_3_6.memory.prof").stat().st_size
    assert list((tmp_path / "trace" / "plugins").rglob("*.xplane.pb"))
    assert _spans._listeners == ()


def test_a_run_that_ends_early(tmp_path):
    trace = kpt.callbacks.Trace(tmp_path, steps=(2, 50), profile=False)
    fit_rows(trace)
    found = read(tmp_path / "trace" / "steps_2_3.json")
    steps = [x["name"] for x in found if x["name"].startswith("step ")]
    assert steps == ["step 2", "step 3"]
    assert len(list((tmp_path / "trace").iterdir())) == 1


def test_a_profile_that_fails_never_stops_a_run(tmp_path):
    """JAX records one profile at a time."""
    jax.profiler.start_trace(str(tmp_path / "other"))
    try:
        trace = kpt.callbacks.Trace(tmp_path, steps=(1, 2))
        with pytest.warns(UserWarning, match="Trace has failed"):
            assert fit_rows(trace).step == 3
    finally:
        jax.profiler.stop_trace()
    assert _spans._listeners == ()


def test_tools_that_overlap_have_rows_of_their_own():
    spans = []
    _spans.listen(spans.append)

    async def tool(seconds):
        with _spans.span("tool", "wait"):
            await asyncio.sleep(seconds)

    async def both():
        await asyncio.gather(tool(0.05), tool(0.02))
        await tool(0.01)

    asyncio.run(both())
    _spans.unlisten(spans.append)
    spans = [s for s in spans if s.name == "tool"]
    found = events(spans, spans[0].start, [], 0)["traceEvents"]
    rows = [x["tid"] for x in found if x["ph"] == "X"]
    assert sorted(rows) == [1, 1, 2]


@pytest.mark.parametrize("steps", [(3, 2), (0, 1), 5, (1.0, 2), (1, 2, 3)])
def test_wrong_steps(steps, tmp_path):
    with pytest.raises(ValueError, match="the first and the last step"):
        kpt.callbacks.Trace(tmp_path, steps=steps)
