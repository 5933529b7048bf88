"""What a recipe takes from the command line, and what is checked before anything heavy is imported.

`begin(__file__)` is a recipe's first line. It parses, refuses what can be refused now, and starts the recipe's ranks
where nobody has: a bare `python recipes/X.py` or `accelerate launch recipes/X.py` runs on `accelerate_configs/X.yaml`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from hfdist.errors import ConfigError, DistributedError, say
from hfdist.recipe.text import documents

# Divides by 1, 2, 3, 4, 6 and 12 ranks.
DEFAULT_BATCH_SIZE = 12


@dataclass(frozen=True, kw_only=True)
class RecipeArguments:
    """A recipe's settings. `batch_size` counts sequences per optimizer step over all ranks and micro-steps."""

    recipe: str
    model: str = "embedded"
    dataset: str = "embedded"
    steps: int = 100
    batch_size: int = DEFAULT_BATCH_SIZE
    seq_len: int = 128
    lr: float = 2e-3
    warmup: int = 10
    weight_decay: float = 0.1
    # Micro-steps per optimizer step; None takes what the accelerate config says (1 when it says nothing).
    gradient_accumulation_steps: int | None = None
    # Ranks; None takes what the accelerate config says.
    num_processes: int | None = None
    seed: int = 42
    # Blocks of seq_len tokens that are never trained on.
    held_out: int = 24
    save: Path | None = None
    plot: Path | None = None
    # PNG of one step of a pipeline, measured beside ideal; only where the model is cut over ranks.
    timeline: Path | None = None
    # The run record, jsonl; None: runs/<recipe>-<time>.jsonl.
    record: Path | None = None

    def accelerator_options(self) -> dict[str, int]:
        """Keyword arguments for `Accelerator`: only what the command line asked for, so that the yaml keeps its say."""
        if self.gradient_accumulation_steps is None:
            return {}
        return {"gradient_accumulation_steps": self.gradient_accumulation_steps}

    def micro_batch_size(self, *, num_processes: int, accumulation: int) -> int:
        """Sequences in one forward on one rank."""
        if self.batch_size < num_processes:
            raise ConfigError(
                say(
                    given=f"--batch-size {self.batch_size} for {num_processes} ranks",
                    expected="at least one sequence for each rank",
                    do=f"Use --batch-size {num_processes * accumulation} or fewer ranks.",
                )
            )
        if self.batch_size % (num_processes * accumulation):
            parts = f"{num_processes} ranks x {accumulation} micro-steps"
            raise ConfigError(
                say(
                    given=f"--batch-size {self.batch_size} for {parts}",
                    expected=f"a multiple of {num_processes * accumulation}: it counts the sequences of one optimizer "
                    "step over all ranks and micro-steps",
                    do=f"Use --batch-size {_next_multiple(self.batch_size, num_processes * accumulation)}.",
                )
            )
        return self.batch_size // (num_processes * accumulation)


def begin(
    file: str,
    *,
    engine: Literal["hfdist", "native", "none"] = "hfdist",
    processes: Literal["ranks", "one"] = "ranks",
    defaults: Mapping[str, object] | None = None,
) -> RecipeArguments:
    """The arguments of the recipe `file`; starts its ranks if nobody has.

    `engine="native"` hands the yaml to accelerate's own engine, "none" is for recipes without hfdist.Accelerator.
    `defaults` replace those of `RecipeArguments`, by name. `processes="one"` is for a recipe that drives everything
    from one process (and starts its own ranks, if any): other processes of a launch have nothing to do and end here.
    """
    recipe = Path(file).stem
    sys.excepthook = _say_error
    args = parse(recipe, sys.argv[1:], defaults=defaults)
    if args.save is not None:
        verify_writable(args.save, option="--save")
    if args.timeline is not None and (engine != "hfdist" or processes == "one"):
        raise no_pipeline(recipe)
    for option, path in (("--plot", args.plot), ("--timeline", args.timeline), ("--record", args.record)):
        if path is not None:
            verify_writable(path.parent, option=option)
    # Not read yet: whatever is wrong with the name alone is said before ranks are started.
    documents(args.dataset)
    from hfdist import launch

    if processes == "one":
        if int(os.environ.get("RANK", "0")) > 0:
            print(f"{recipe} is driven by one process: rank {os.environ['RANK']} has nothing to do.", flush=True)
            raise SystemExit(0)
        return args
    if engine == "native":
        os.environ["HFDIST_ENGINE"] = "native"
    launch.relaunch_if_alone(file, num_processes=args.num_processes)
    if engine == "none":
        # Nobody else will: plain accelerate on a machine without accelerator must be told that N ranks are one group.
        launch.ensure_one_group(os.environ)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.num_processes not in (None, world_size):
        raise ConfigError(
            say(
                given=f"--num-processes {args.num_processes} in a launch of {world_size} ranks",
                expected="one number of ranks",
                do=f"Give the number to the launcher: accelerate launch --num_processes {args.num_processes} ...",
            )
        )
    if args.gradient_accumulation_steps is not None:
        # The yaml's number is only its recipe's default; the command line is more specific.
        launch.override_accumulation(os.environ, args.gradient_accumulation_steps)
        args.micro_batch_size(num_processes=world_size, accumulation=args.gradient_accumulation_steps)
    elif args.batch_size < world_size:
        args.micro_batch_size(num_processes=world_size, accumulation=1)
    return args


def parse(recipe: str, argv: Sequence[str], *, defaults: Mapping[str, object] | None = None) -> RecipeArguments:
    """Arguments from `argv`. A value that can never be right is refused here."""
    default = replace(RecipeArguments(recipe=recipe), **(defaults or {}))  # type: ignore[arg-type]
    parser = argparse.ArgumentParser(prog=f"recipes/{recipe}.py", formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", default=default.model, help="embedded (9.4 M Llama), tiny (0.6 M), smollm2, hub id, directory")
    add("--dataset", default=default.dataset, help="embedded, moby-dick, gsm8k, hub id, .txt .jsonl .parquet paths")
    add("--steps", type=int, default=default.steps, help="optimizer steps (%(default)s)")
    add(
        "--batch-size",
        type=int,
        help=f"sequences per optimizer step over ALL ranks and micro-steps; must divide by both ({DEFAULT_BATCH_SIZE})",
    )
    add("--seq-len", type=int, default=default.seq_len, help="tokens per sequence (%(default)s)")
    add("--lr", type=float, default=default.lr, help="peak learning rate (%(default)s)")
    add(
        "--warmup",
        type=int,
        default=default.warmup,
        help="steps of linear warm-up, at most a tenth; then cosine (%(default)s)",
    )
    add("--weight-decay", type=float, default=default.weight_decay, help="AdamW's (%(default)s)")
    add("--gradient-accumulation-steps", type=int, help="micro-steps per optimizer step (the config's, else 1)")
    add("--num-processes", type=int, help="ranks, when this command starts them (the config's)")
    add("--seed", type=int, default=default.seed, help="of the weights and of the data order (%(default)s)")
    add("--held-out", type=int, default=default.held_out, help="blocks never trained on (%(default)s)")
    add("--save", type=Path, help="directory for the trained model, in the Hugging Face format")
    add("--plot", type=Path, help="PNG: the loss, and the memory next to the formula")
    add("--timeline", type=Path, help="PNG, pipelines only: who computed when in one step, next to the ideal")
    add("--record", type=Path, help="the run record, jsonl (runs/<recipe>-<time>.jsonl)")
    values = vars(parser.parse_args(list(argv)))
    asked = values.pop("batch_size")
    args = RecipeArguments(recipe=recipe, batch_size=DEFAULT_BATCH_SIZE if asked is None else asked, **values)
    _verify_positive(args)
    if asked is None:
        args = replace(args, batch_size=_default_batch_size(args))
    return args


def no_pipeline(recipe: str) -> ConfigError:
    """What `--timeline` gets where no model is cut over ranks."""
    return ConfigError(
        say(
            given=f"--timeline for {recipe}, which cuts no model into stages",
            expected="a recipe with a pipeline on 2 ranks or more",
            do="Use recipes/pipeline_1f1b.py or another pipeline, or leave --timeline out.",
        )
    )


def verify_writable(directory: Path, *, option: str) -> None:
    """Refuse a directory that cannot be made or written, before any work starts."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        raise ConfigError(
            say(
                given=f"{option} {directory} ({error})",
                expected="a directory that can be written",
                do="Name another one.",
            )
        ) from error


def verify_room(directory: Path, num_bytes: int, *, option: str) -> None:
    """Refuse a directory on a file system with less than `num_bytes` free."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ConfigError(
            say(
                given=f"{option} {directory} with {free:,} bytes free",
                expected=f"room for {num_bytes:,} bytes",
                do="Free some space or name a directory on another file system.",
            )
        )


def _verify_positive(args: RecipeArguments) -> None:
    for name in ("steps", "batch_size", "seq_len", "held_out", "gradient_accumulation_steps", "num_processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(
                say(
                    given=f"--{name.replace('_', '-')} {value}",
                    expected="a whole number, 1 or more",
                    do="Leave it out for the default.",
                )
            )
    if args.seq_len < 2 or args.lr <= 0 or args.warmup < 0:
        raise ConfigError(
            say(
                given=f"--seq-len {args.seq_len} --lr {args.lr} --warmup {args.warmup}",
                expected="2 tokens or more, a learning rate above 0, a warm-up of 0 or more",
                do="Leave them out for the defaults.",
            )
        )


def _default_batch_size(args: RecipeArguments) -> int:
    """Nobody named one: the default, or the next multiple of what the ranks and micro-steps need."""
    ranks = args.num_processes or int(os.environ.get("WORLD_SIZE", "1"))
    return _next_multiple(DEFAULT_BATCH_SIZE, ranks * (args.gradient_accumulation_steps or 1))


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _say_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A user error is its text and the rank it happened on; anything else keeps its traceback."""
    rank = os.environ.get("RANK", "0")
    if issubclass(kind, (ConfigError, DistributedError)):
        print(f"[rank {rank}] {kind.__name__}: {error}", file=sys.stderr, flush=True)
    else:
        print(f"[rank {rank}]", file=sys.stderr)
        traceback.print_exception(kind, error, trace)
