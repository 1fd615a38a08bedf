"""Checkpoints, wrong requests and clients that go away."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from keras_posttrain.serve import TinkerServer, __main__, sessions
from keras_posttrain.serve.wire import PROTO
from tests.serve import support


def serves(model):
    """Asserts that the server still trains."""
    done, _ = support.step(model, support.supervised(slice(4)))
    assert done.metrics["loss:sum"] > 0


# Checkpoints


def test_training_goes_on_from_a_checkpoint(model, folder):
    data, prompt = support.supervised(slice(4)), support.encoded()[0][0]
    prompt = types.ModelInput.from_ints(prompt)
    support.step(model, data)
    path = model.save_state("one").result(60).path
    named = model.save_weights_for_sampler("one").result(60).path
    sampler = model.save_weights_and_get_sampling_client().result(60)
    logps = sampler.compute_logprobs(prompt).result(60)
    support.step(model, data)
    wanted = support.weights_of(model, folder, "two")
    # As after a restart: another server on the same folder.
    with support.serve(folder) as server, support.client_of(server) as own:
        go_on = own.create_training_client_from_state_with_optimizer(path)
        model = go_on.result(60)
        support.step(model, data)
        support.equal(support.weights_of(model, folder, "three"), wanted)
        # Without the optimizer's state the step is another.
        other = own.create_training_client_from_state(path).result(60)
        support.step(other, data)
        found = support.weights_of(other, folder, "four")
        assert any((found[k] != wanted[k]).any() for k in wanted)
        sampler = own.create_sampling_client(model_path=named).result(60)
        assert sampler.compute_logprobs(prompt).result(60) == logps
        with pytest.raises(tinker.TinkerError, match="no optimizer state"):
            own.create_training_client_from_state_with_optimizer(named).result(
                60
            )


def test_checkpoints_are_listed_and_deleted(server, model):
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    saved = [
        model.save_state("a", user_metadata={"note": "x"}).result(60).path,
        model.save_weights_for_sampler("a").result(60).path,
    ]
    with pytest.raises(tinker.TinkerError, match="pass overwrite=True"):
        model.save_state("a").result(60)
    model.save_state("a", overwrite=True).result(60)
    info = rest.get_weights_info_by_tinker_path(saved[0]).result(60)
    assert info.lora_rank == support.RANK and not info.train_unembed
    run = rest.get_training_run(model.model_id).result(60)
    assert run.last_checkpoint.tinker_path == saved[0]
    found = rest.list_checkpoints(model.model_id).result(60).checkpoints
    assert {x.tinker_path for x in found} >= set(saved)
    rest.delete_checkpoint_from_tinker_path(saved[0]).result(60)
    found = rest.list_user_checkpoints().result(60).checkpoints
    paths = {x.tinker_path for x in found}
    assert saved[1] in paths and saved[0] not in paths


# Wrong requests


def test_a_wrong_key_is_refused(server, model):
    assert support.post(server, "create_session", {}, key="tml-no")[0] == 401
    with pytest.raises(tinker.AuthenticationError, match="TINKER_API_KEY"):
        tinker.ServiceClient(
            base_url=server.url, api_key="tml-no"
        ).create_lora_training_client(support.preset())
    serves(model)


def train_bytes(model_id, **more):
    message = proto.ForwardBackwardRequest(
        model_id=model_id, seq_id=1, loss_fn="cross_entropy", **more
    )
    return message.SerializeToString()


@pytest.mark.parametrize(
    "path, body, status, text",
    [
        ("optim_step", b"{", 422, "The request is no JSON"),
        ("optim_step", b"[" * 100_000, 422, "The request is no JSON"),
        ("optim_step", [1], 422, "must be a JSON object"),
        ("optim_step", {}, 422, "`model_id` must be of type str"),
        ("optim_step", {"model_id": "x:train:0"}, 404, "There is no model"),
        ("forward_backward", b"\xff\xff", 422, "no ForwardBackwardRequest"),
        ("forward_backward", train_bytes("x"), 404, "There is no model 'x'"),
        ("create_model", {"base_model": "other"}, 404, "'other'"),
        ("session_heartbeat", {"session_id": "s"}, 404, "no session 's'"),
        ("retrieve_future", {"request_id": "r"}, 404, "no request 'r'"),
        ("load_weights", {"path": "tinker://../a/b", "optimizer": False},
         400, "A path must be tinker://RUN/weights/NAME"),
        ("weights_info", {"tinker_path": "tinker://run/weights/none"}, 404,
         "There is no checkpoint"),
        ("create_custom_loss", {}, 404, "does not have POST"),
    ],
)  # fmt: skip
def test_a_malformed_request_is_answered(server, path, body, status, text):
    found, answer = support.post(server, path, body)
    assert found == status and text in answer["detail"]


@pytest.mark.parametrize(
    "data, loss, text",
    [
        ([support.datum([1] * 40, weights=[1.0] * 39)], "cross_entropy",
         "1 to 32 tokens. Received: datum 0 with 39"),
        ([support.datum([1, 2, 10**6])], "cross_entropy",
         "1000000 in `target_tokens` of datum 0"),
        ([support.datum([1, 2], weights=[1.0, 1.0])], "cross_entropy",
         "`weights` of datum 0 must have one value for each"),
        ([support.datum([1, 2])], "ppo", "`logprobs`: missing in datum 0"),
        ([support.datum([1, 2], advantages=[1.0])], "cross_entropy",
     "'advantages' in datum 0"),
        ([support.datum([1, 2])], "gspo", "`loss_fn` must be one of"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on(model, data, loss, text):
    with pytest.raises(tinker.BadRequestError, match=text):
        model.forward_backward(data, loss).result(60)


def test_other_settings_are_refused(client, model):
    with pytest.raises(tinker.BadRequestError, match="--lora-rank 64"):
        support.new_model(client, rank=64)
    with pytest.raises(tinker.TinkerError, match="no gradients to step by"):
        support.new_model(client).optim_step(support.ADAM).result(60)
    with pytest.raises(tinker.BadRequestError, match="unknown setting"):
        data = support.supervised(slice(1))
        model.forward_backward(data, "cross_entropy", {"x": 1}).result(60)
    serves(model)


# Clients that go away


def test_a_request_that_comes_twice_is_done_once(server, model):
    session = model.model_id.partition(":train:")[0]
    body = {"session_id": session, "model_seq_id": 99,
            "base_model": support.preset(),
            "lora_config": {"rank": 2, "seed": 0}}  # fmt: skip
    first, second = (
        support.post(server, "create_model", body)[1] for _ in range(2)
    )
    assert first == second
    [data] = support.supervised(slice(1))
    own = proto.ForwardBackwardRequest(
        model_id=first["model_id"], seq_id=1, loss_fn="cross_entropy"
    )
    own_data = own.data.add()
    ids = data.model_input.to_ints()
    own_data.model_input.add().encoded_text.tokens = support.ints(ids)
    target = own_data.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = support.ints(ids), proto.DTYPE_INT32
    target.shape.append(len(ids))
    norms = []
    for seq_id, times in ((1, 1), (3, 2)):
        for _ in range(times):
            own.seq_id = seq_id
            status, _ = support.post(
                server, "forward_backward", own.SerializeToString(),
                content=PROTO,
            )  # fmt: skip
            assert status == 200
        body = {"model_id": first["model_id"], "seq_id": seq_id + 1,
                "adam_params": {"learning_rate": 0.0}}  # fmt: skip
        status, answer = support.post(server, "optim_step", body)
        _, found = support.post(server, "retrieve_future", answer)
        norms.append(found["metrics"]["grad_norm"])
    assert norms[0] == norms[1] > 0


def test_a_request_that_is_cut_off(server, model):
    host = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    for part in (b"POST /api/v1/asample HTTP/1.1\r\nContent-Length: 99\r\n",
                 b"\r\n{", b"\x00\x01"):  # fmt: skip
        with socket.create_connection(host) as connection:
            connection.sendall(part)
    serves(model)


def test_models_of_clients_that_have_gone_make_room(tmp_path, monkeypatch):
    with support.serve(tmp_path, max_models=1) as server:
        with support.client_of(server) as own:
            support.new_model(own)
            with pytest.raises(tinker.BadRequestError, match="--max-models"):
                support.new_model(own)
        with support.client_of(server) as other:
            model = support.new_model(other)
            # Nobody waits for what a silent client has asked for.
            monkeypatch.setattr(sessions, "SILENCE", -1)
            with pytest.raises(tinker.TinkerError, match="client has gone"):
                model.save_state("late").result(60)


KILLED = """
sampler = support.new_model(client).save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints([1])
params = types.SamplingParams(max_tokens=30, stop=[])
asked = [sampler.result().sample(prompt, 8, params) for _ in range(50)]
print("asked", flush=True)
time.sleep(1)
os.kill(os.getpid(), 9)
"""
STRAIGHT = """
model = support.new_model(client)
support.step(model, support.supervised())
print(model.save_state("kept").result().path, flush=True)
support.step(model, support.supervised())
model.save_weights_for_sampler("straight").result()
"""
RESUMED = """
start = client.create_training_client_from_state_with_optimizer(sys.argv[1])
model = start.result()
support.step(model, support.supervised())
print(model.save_weights_for_sampler("resumed").result().path)
"""


def run_client(script, environment, *arguments):
    """Runs a client in a process of its own; returns what it prints."""
    names = "import os, sys, time, tinker; from tinker import types\n"
    names += "from tests.serve import support\n"
    names += f"support.preset = lambda: {support.preset()!r}\n"
    names += "client = tinker.ServiceClient()\n"
    found = subprocess.run(
        [sys.executable, "-c", names + script, *arguments],
        env=os.environ | environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return found.stdout.strip(), found.returncode


@contextlib.contextmanager
def process_of_server(folder):
    command = [
        sys.executable, "-m", "keras_posttrain.serve", "--preset",
        support.preset(), "--lora-rank", str(support.RANK),
        "--sequence-length", str(support.LENGTH), "--state", str(folder),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True
    ) as process:
        found = {}
        while "TINKER_API_KEY" not in found:
            name, _, value = process.stdout.readline().partition("=")
            found[name.removeprefix("export ")] = value.strip()
        yield process, found


@pytest.mark.full
def test_processes_that_are_killed(tmp_path):
    """A client in the middle of a request, then the server."""
    with process_of_server(tmp_path) as (server, environment):
        assert run_client(KILLED, environment) == ("asked", -9)
        path, status = run_client(STRAIGHT, environment)
        assert status == 0
        server.kill()
    with process_of_server(tmp_path) as (server, environment):
        resumed, status = run_client(RESUMED, environment, path)
        assert status == 0
        server.terminate()
        assert server.wait(60) == 0
    straight = path.replace("/weights/kept", "/sampler_weights/straight")
    support.equal(
        support.saved_arrays(tmp_path, resumed),
        support.saved_arrays(tmp_path, straight),
    )


# The command line


def test_the_command_line_answers(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) < 50
    assert __main__.main(["--preset", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err
    arguments = ["--preset", support.preset(), "--key", "abc"]
    assert __main__.main(arguments) == 2
    assert "begins with 'tml-'" in capsys.readouterr().err


def test_a_task_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a task with an adapter"):
        TinkerServer(object(), tmp_path)
