"""What recipes share: arguments, data, model, the record of a run. Importing it loads no torch.

args = begin(__file__)                       arguments.py   the command line; starts the ranks
tokenizer = load_tokenizer(args)             model.py       --model
data = load_data(args, tokenizer)            tokens.py      --dataset (text.py, fetch.py: where text comes from)
model = load_model(args)                     model.py
run = Run(args, ...)                         run.py         progress, losses, memory, wire -> jsonl (record.py)
save_model(accelerator, model, ...)          model.py       --save
"""

from hfdist.recipe.arguments import RecipeArguments, begin
from hfdist.recipe.model import build_loader, build_optimizer, load_model, load_tokenizer, save_model
from hfdist.recipe.run import Run
from hfdist.recipe.tokens import Data, load_data

__all__ = [
    "Data",
    "RecipeArguments",
    "Run",
    "begin",
    "build_loader",
    "build_optimizer",
    "load_data",
    "load_model",
    "load_tokenizer",
    "save_model",
]
