"""Loading at stage 3 never holds the whole model on any rank: anonymous resident memory, and a hard cap.

    cap = model / N + the largest block + CONSTANT

CONSTANT covers what does not grow with the model: Python objects of the loader, its threads, gloo's connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hfdist import ZeroPlugin
from hfdist.measure.memory import measure_memory
from hfdist.measure.resident import anonymous_bytes, sample_resident
from hfdist.models.size import model_size
from tests.limits import give_memory_back, limit_data
from tests.pool import Pools, RankErrors
from tests.worker import make_accelerator

MB = 1 << 20
CONSTANT = 24 * MB
# 164 MB: 8 blocks of 19 MB, untied embeddings and head of 6 MB each.
CONFIG = LlamaConfig(
    vocab_size=2053,
    hidden_size=768,
    intermediate_size=1280,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=False,
    use_cache=False,
)

pytestmark = pytest.mark.skipif(anonymous_bytes() is None, reason="this system does not say what memory is anonymous")


@dataclass(frozen=True)
class Loaded:
    """One rank's load: growth of anonymous memory at its peak, what the shards store, and whether they are right."""

    peak: int
    parameters: int
    right: bool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model in one file, which stays mapped until its last tensor is let go."""
    torch.manual_seed(5)
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(CONFIG).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def sizes() -> tuple[int, int]:
    """Bytes of the model and of its largest block."""
    with torch.device("meta"):
        size = model_size(LlamaForCausalLM(CONFIG))
    return 4 * size.num_parameters, 4 * size.largest_block


def load(directory: str, headroom: int | None = None) -> Loaded:
    """`from_pretrained` while an Accelerator at stage 3 lives, under a cap of `headroom` bytes when given."""
    give_memory_back()
    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=3)])
    with sample_resident() as sampler:
        if headroom is None:
            model = AutoModelForCausalLM.from_pretrained(directory)
        else:
            with limit_data(headroom):
                model = AutoModelForCausalLM.from_pretrained(directory)
        accelerator.prepare(model)
    right = _has_rows_of(model, Path(directory), accelerator.process_index, accelerator.num_processes)
    parameters = measure_memory(model).parameters
    accelerator.free_memory()  # loading is transformers' own again
    return Loaded(peak=sampler.growth, parameters=parameters, right=right)


def load_whole(directory: str, headroom: int) -> None:
    """Plain transformers under a cap, on every rank; its tensors are made its own, as a first update would."""
    with limit_data(headroom):
        model = AutoModelForCausalLM.from_pretrained(directory)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def _has_rows_of(model: nn.Module, directory: Path, rank: int, num_ranks: int) -> bool:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        for name, parameter in model.named_parameters():
            saved = file.get_slice(name)
            rows = -(-saved.get_shape()[0] // num_ranks)
            if not torch.equal(parameter._local_tensor, saved[rank * rows : (rank + 1) * rows]):
                return False
    return True


@pytest.mark.parametrize("world_size", [2, 4])
def test_peak_of_loading_is_a_share_and_a_block(
    pool: Pools, checkpoint: str, sizes: tuple[int, int], world_size: int
) -> None:
    """Anonymous resident memory of every rank, sampled every 2 ms; the shards are own memory, and the right rows."""
    model, block = sizes
    cap = model // world_size + block + CONSTANT
    assert cap < model
    for rank, loaded in enumerate(pool(world_size).run(load, checkpoint, timeout=150)):
        assert loaded.right, rank
        assert loaded.parameters == pytest.approx(model / world_size, rel=0.01), rank
        assert loaded.parameters <= loaded.peak <= cap, (rank, loaded)


def test_loading_succeeds_under_a_cap_that_the_whole_model_breaks(
    pool: Pools, checkpoint: str, sizes: tuple[int, int]
) -> None:
    """`RLIMIT_DATA` counts the loader's mapping of the files too (private, so the system reserves for it)."""
    model, block = sizes
    cap = model + model // 2 + block + CONSTANT
    assert cap < 2 * model
    assert all(loaded.right for loaded in pool(2).run(load, checkpoint, cap, timeout=150))
    with pytest.raises(RankErrors, match=r"not enough memory|Cannot allocate memory"):
        pool(2).run(load_whole, checkpoint, cap, timeout=150)
