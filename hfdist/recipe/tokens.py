"""Documents to blocks: the embedded tokenizer, packing, the held-out split, one seeded order.

Tokens of all documents are laid end to end, an end token after each, and cut into blocks of `seq_len`; every
position has a label, so the mean of block losses is the loss by tokens however blocks are dealt to ranks. The last
blocks are held out. Worked: 2,889,796 tokens in blocks of 128 are 22,576 blocks; 24 are held out, and a run of 100
steps of 12 sequences sees 1,200 of the other 22,552.

The order is drawn once from `seed` and written into the training set itself. Whoever deals consecutive batches to
ranks (accelerate, DeepSpeed, a DistributedSampler-less loop) trains on the same `batch_size` blocks in the same
step, whatever the number of ranks and of micro-steps."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hfdist.errors import ConfigError, say
from hfdist.recipe.arguments import RecipeArguments
from hfdist.recipe.cache import build_once
from hfdist.recipe.text import documents, stdlib_sources

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

EMBEDDED_VOCAB_SIZE = 8192
END_TOKEN = "<|end|>"
# Text is tokenized in pieces of about this many characters, cut at line ends: a short run need not read it all.
_PIECE_CHARACTERS = 100_000


@dataclass(frozen=True)
class Blocks:
    """A map-style data set of `{"input_ids": (seq_len,), "labels": (seq_len,)}`, int64, in a fixed order."""

    tokens: np.ndarray  # (num_tokens,) integers
    order: np.ndarray  # (num_items,) block numbers, with repeats when the run is longer than the text
    seq_len: int

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import numpy as np
        import torch

        start = int(self.order[index]) * self.seq_len
        ids = torch.from_numpy(self.tokens[start : start + self.seq_len].astype(np.int64))
        # The model shifts the labels itself, as all of transformers' causal language models do.
        return {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True)
class Data:
    """What a run trains on and is judged by."""

    train: Blocks  # steps x batch_size items
    held_out: Blocks
    tokenizer: PreTrainedTokenizerBase
    num_tokens: int  # read from the dataset


def load_data(args: RecipeArguments, tokenizer: PreTrainedTokenizerBase) -> Data:
    """The training and held-out blocks of `args.dataset`, the same on every rank."""
    import numpy as np

    if args.dataset == "embedded" and Path(tokenizer.name_or_path).parent.name == _embedded_name():
        tokens = np.load(_embedded_tokens(tokenizer), mmap_mode="r")
    else:
        # What the run can use, with room for the held-out blocks: never more than one epoch is read.
        wanted = (args.steps * args.batch_size + args.held_out) * args.seq_len
        tokens = tokenize(documents(args.dataset), tokenizer, at_most=wanted)
    num_blocks = len(tokens) // args.seq_len
    if num_blocks < 2:
        raise ConfigError(
            say(
                given=f"--dataset {args.dataset} with {len(tokens)} tokens and --seq-len {args.seq_len}",
                expected=f"at least {2 * args.seq_len} tokens: one block to train on and one held out",
                do="Give more text or a shorter --seq-len.",
            )
        )
    held_out = max(1, min(args.held_out, num_blocks // 10))
    train_blocks = num_blocks - held_out
    length = args.steps * args.batch_size
    epochs = -(-length // train_blocks)
    order = np.concatenate(
        [np.random.default_rng([args.seed, epoch]).permutation(train_blocks) for epoch in range(epochs)]
    )
    return Data(
        train=Blocks(tokens, order[:length], args.seq_len),
        held_out=Blocks(tokens, np.arange(train_blocks, num_blocks), args.seq_len),
        tokenizer=tokenizer,
        num_tokens=len(tokens),
    )


def tokenize(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase, *, at_most: int) -> np.ndarray:
    """Tokens of `texts` end to end, an end token after each, `at_most` of them. int32, (num_tokens,)."""
    import numpy as np

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts: list[np.ndarray] = []
    total = 0
    for text in texts:
        for piece in _pieces(text):
            ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            parts.append(np.asarray(ids, dtype=np.int32))
            total += len(ids)
            if total >= at_most:
                return np.concatenate(parts)[:at_most]
        parts.append(np.asarray(end, dtype=np.int32))
        total += len(end)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def embedded_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE of 8,192 entries trained on the standard library's text; 3 seconds once, then from the cache."""
    from transformers import PreTrainedTokenizerFast

    path = build_once(f"{_embedded_name()}/tokenizer", _train_tokenizer)
    return PreTrainedTokenizerFast.from_pretrained(path)


def _train_tokenizer(target: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=EMBEDDED_VOCAB_SIZE,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents("embedded"), trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_TOKEN, pad_token=END_TOKEN).save_pretrained(target)


def _embedded_tokens(tokenizer: PreTrainedTokenizerBase) -> Path:
    def build(target: Path) -> None:
        import numpy as np

        # Saved through a file object: numpy adds ".npy" to a bare name.
        with target.open("wb") as file:
            np.save(file, tokenize(documents("embedded"), tokenizer, at_most=1 << 40).astype(np.uint16))

    return build_once(f"{_embedded_name()}/tokens.npy", build)


@functools.cache
def _embedded_name() -> str:
    """Changes with the text (the Python release), the vocabulary and what `tokenizers` may do differently."""
    from importlib.metadata import version

    sources = stdlib_sources()
    text = f"{platform.python_version()} {len(sources)} {sum(path.stat().st_size for path in sources)}"
    key = f"{text} {EMBEDDED_VOCAB_SIZE} {version('tokenizers')}"
    return f"embedded-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = min(start + _PIECE_CHARACTERS, len(text))
        if stop < len(text):
            stop = text.find("\n", stop) + 1 or len(text)
        yield text[start:stop]
        start = stop
