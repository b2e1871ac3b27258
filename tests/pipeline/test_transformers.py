"""Models of transformers, as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.pipeline.stage_emulation import MakeStep, assert_transparent_apart

pytestmark = pytest.mark.slow

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


def gpt2() -> nn.Module:
    drop = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, bos_token_id=1, eos_token_id=1))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, **SMALL))


def t5() -> nn.Module:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def mixtral() -> nn.Module:
    routing = {"num_local_experts": 4, "output_router_logits": True, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_hidden_layers=4, **routing, **SMALL))


def text(rows: int = 4, length: int = 16) -> dict[str, Tensor]:
    ids = torch.randint(5, 64, (rows, length), generator=torch.Generator().manual_seed(rows * length))
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5, "mixtral": mixtral}


def root_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"model": MODELS[name]().train()})


def step_of(name: str, **more: object) -> MakeStep:
    batch = text()
    return lambda root: lambda: root.model(**batch, **more).loss


def deeper_than(root: nn.Module, depth: int) -> Callable[[str], bool]:
    """All at this depth, and those without modules in them."""
    return lambda name: name.count(".") >= depth or next(root.get_submodule(name).children(), None) is None


@pytest.mark.parametrize("name", MODELS)
def test_stages_need_no_parameters_but_their_own(name: str) -> None:
    root = root_of(name)
    stages = assert_transparent_apart(root, step_of(name), deeper_than(root, 3), 3, 2e-6)
    assert all(any(p.is_meta for p in stage.root.parameters()) for stage in stages)


def test_a_cache_passes_through_the_blocks() -> None:
    root = root_of("llama")
    assert_transparent_apart(root, step_of("llama", use_cache=True), deeper_than(root, 3), 3, 2e-6)
