"""test_ranks_training.py: context parallelism beside what training uses, over two processes on gloo."""

import importlib.util
import pathlib

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
from test_context_parallel import run_ranks  # noqa: E402

WORKER = pathlib.Path(__file__).with_name("ranks_training_worker.py")


def test_dtensors_and_models(tmp_path):
    run_ranks(tmp_path, 2, "dtensors,models", worker=WORKER)


@pytest.mark.rotates(2)
def test_compiled_code_is_one_graph(tmp_path):
    run_ranks(tmp_path, 2, "compiled", worker=WORKER)


@pytest.mark.rotates(2)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_models_of_transformers(tmp_path):
    run_ranks(tmp_path, 2, "transformers", worker=WORKER)
