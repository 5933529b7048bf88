"""`--model`, its tokenizer, its optimizer, and where the trained model goes.

    embedded   Llama of 9,445,440 random parameters: hidden 320, 6 layers, 8 heads, 4 key/value heads, tied, 8,192 words
    tiny       the same with hidden 64 and 2 layers (615,232), for tests
    smollm2    SmolLM2-135M-Instruct, once `hfdist data smollm2` has fetched it
    a directory written by save_pretrained, or the id of a model of the Hugging Face hub

Weights are always fp32: they are the masters that the optimizer steps. What a step computes in is the config's
business."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfdist.errors import ConfigError, say
from hfdist.recipe.arguments import RecipeArguments, verify_room
from hfdist.recipe.cache import cache_dir
from hfdist.recipe.fetch import SMOLLM2
from hfdist.recipe.tokens import EMBEDDED_VOCAB_SIZE, Data, embedded_tokenizer

if TYPE_CHECKING:
    import accelerate
    import torch
    from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED_SHAPES: dict[str, dict[str, Any]] = {
    "embedded": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6},
    "tiny": {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2},
}


def load_tokenizer(args: RecipeArguments) -> PreTrainedTokenizerBase:
    """The tokenizer of `args.model`; for the embedded models the one trained on the embedded text."""
    if args.model in EMBEDDED_SHAPES:
        return embedded_tokenizer()
    from transformers import AutoTokenizer

    source = _source(args.model)
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # Unknown name, gated, no network, no tokenizer in the directory.
        raise _unknown_model(args.model, "tokenizer", error) from error


def load_model(args: RecipeArguments) -> PreTrainedModel:
    """The model of `args.model` in fp32, the same weights on every rank."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    torch.manual_seed(args.seed)
    model: PreTrainedModel
    if args.model in EMBEDDED_SHAPES:
        # Not `from_config`: under DeepSpeed's ZeRO-3 that draws other random weights.
        model = LlamaForCausalLM(embedded_config(args.model))
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(_source(args.model), dtype=torch.float32)
        except Exception as error:
            raise _unknown_model(args.model, "model", error) from error
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and args.seq_len > limit:
        raise ConfigError(
            say(
                given=f"--seq-len {args.seq_len} for {args.model}",
                expected=f"at most {limit} tokens, the positions this model has",
                do="Use shorter sequences.",
            )
        )
    if args.save is not None:
        verify_room(args.save, sum(p.numel() * p.element_size() for p in model.parameters()), option="--save")
    model.config.use_cache = False
    model.train()
    return model


def embedded_config(name: str) -> LlamaConfig:
    """The configuration of the embedded models."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=EMBEDDED_VOCAB_SIZE,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        **EMBEDDED_SHAPES[name],
    )


def build_optimizer(
    model: torch.nn.Module, args: RecipeArguments
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW without decay on vectors (norms, biases), and linear warm-up then cosine to a tenth of `lr`.

    The scheduler counts optimizer steps: call it once per update, and do not hand it to `prepare`, which would step it
    `num_processes` times. A warm-up is at most a tenth of the run.
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=args.lr, betas=(0.9, 0.95))
    warmup = min(args.warmup, args.steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, args.steps - warmup))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def build_loader(
    data: Data, args: RecipeArguments, *, num_processes: int, accumulation: int
) -> torch.utils.data.DataLoader:
    """Micro-batches of the training blocks, all ranks' after one another, in the order that `Blocks` already holds."""
    import torch

    size = args.micro_batch_size(num_processes=num_processes, accumulation=accumulation)
    return torch.utils.data.DataLoader(data.train, batch_size=size, shuffle=False)  # type: ignore[arg-type]


def save_model(
    accelerator: accelerate.Accelerator | None,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path | None,
) -> None:
    """Write the whole model to `directory` in the Hugging Face format; every rank calls it. Nothing when it is None."""
    if directory is None:
        return
    if accelerator is None:
        model.save_pretrained(directory)  # type: ignore[operator]
        tokenizer.save_pretrained(directory)
        return
    # On all ranks: collecting the weights is a collective where they are sharded.
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(directory, state_dict=state)
        tokenizer.save_pretrained(directory)
    accelerator.wait_for_everyone()


def _source(model: str) -> str:
    if model == "smollm2":
        path = cache_dir() / SMOLLM2
        if not path.exists():
            raise ConfigError(
                say(
                    given="--model smollm2, which has not been fetched",
                    expected=f"the directory {path}",
                    do="Run `hfdist data smollm2` once.",
                )
            )
        return str(path)
    path = Path(model).expanduser()
    return str(path) if path.exists() else model


def _unknown_model(model: str, what: str, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ConfigError(
        say(
            given=f"--model {model}, whose {what} could not be loaded ({reason})",
            expected=f"{', '.join(EMBEDDED_SHAPES)}, smollm2, a directory written by save_pretrained, or the id of a "
            "causal language model of the hub that this machine can reach",
            do="Check the spelling, the path and the network.",
        )
    )
