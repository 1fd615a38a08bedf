"""One server for all tests, whose programs are then compiled once."""

import pytest

from tests.serve import support


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def server(folder):
    with support.serve(folder, max_models=100) as server:
        yield server


@pytest.fixture(scope="session")
def client(server):
    with support.client_of(server) as client:
        yield client


@pytest.fixture
def model(client):
    return support.new_model(client)
